"""RPC methods of the rollout's workers for looking into a running engine and for experiments.

Use with plain vLLM: `LLM(..., worker_extension_cls="quads_ops.vllm_method.diagnosis.QuadsDiagnosis")`, then
`llm.collective_rpc("quads_state")`.
"""

from __future__ import annotations

from collections.abc import Iterator

from quads_ops.settings import SettingsError
from quads_ops.vllm_method.compat_vllm import captures_graphs
from quads_ops.vllm_method.compensation import Compensation
from quads_ops.vllm_method.projection import Projection, projections
from quads_ops.vllm_method.reload import rac_summary, settle


class QuadsDiagnosis:
    """Mixin for a vLLM worker. Every method runs on all workers of an engine and returns one result for each."""

    def quads_state(self) -> dict[str, dict[str, object]]:
        """Layer and weight -> mode, shape, and what its mask is."""
        state = {}
        for projection in projections(self.model_runner.get_model()):
            entry: dict[str, object] = {"mode": projection.mode, "loads": projection.loads}
            if projection.compensation is not None:
                entry |= projection.compensation.describe()
            state[f"{projection.layer_name} ({projection.stem})"] = entry
        return state

    def quads_masks(self) -> list[dict[str, object]]:
        """The residual compensation in force, also of an engine that sleeps: an entry for every quantized input.

        - `module`, `stem`: which input
        - `residual`: `none`, `all`, `token` (chosen anew for each) or `mask`; `ratio`, `granularity`
        - `first`, `columns`, `k`: this worker's part of K, and the whole
        - `experts`: global index of the expert that each mask belongs to, or None: one mask
        - `mask`: bytes of bool [masks, entries]; only where `residual` is `mask`
        """
        return [
            mask_entry(projection)
            for projection in projections(self.model_runner.get_model())
            if projection.compensation is not None
        ]

    def quads_refresh_masks(self) -> dict[str, float | bool | None]:
        """Choose masks from the statistics gathered so far, as a weight sync does."""
        return rac_summary(self.model_runner.get_model(), settle(self.model_runner.get_model(), reloaded=False))

    def quads_reset_statistics(self) -> None:
        """Forget all statistics. Masks stay as they are until they are next chosen."""
        for compensation in self._quads_compensations():
            compensation.forget()

    def quads_set_residual(self, ratio: float) -> None:
        """Change the residual ratio of every layer; masks are chosen anew from what is known.

        Raises:
            SettingsError: a ratio outside [0, 1], a mode that has no residual, or an engine with CUDA graphs.
        """
        if captures_graphs(self.vllm_config):
            raise SettingsError(
                "ratio", ratio, "CUDA graphs keep the ratio that they were captured with; start with enforce_eager=True"
            )
        compensations = list(self._quads_compensations())
        if not compensations:
            raise SettingsError("ratio", ratio, "this rollout does not quantize activations to NVFP4 (mode w4a4)")
        for compensation in compensations:
            compensation.set_ratio(ratio)

    def _quads_compensations(self) -> Iterator[Compensation]:
        for projection in projections(self.model_runner.get_model()):
            if projection.compensation is not None:
                yield projection.compensation


def mask_entry(projection: Projection) -> dict[str, object]:
    """One entry of `quads_masks`."""
    compensation, shard = projection.compensation, projection.shards[0]
    settings = compensation.settings
    if settings.ratio in (0, 1):
        residual = "all" if settings.ratio else "none"
    else:
        residual = "mask" if settings.scope == "step" else "token"
    experts = None
    if compensation.experts is not None:
        experts = [int(s.name.split(".")[-2]) for s in projection.shards]
    return {
        "module": projection.layer_name,
        "stem": projection.stem,
        "residual": residual,
        "ratio": settings.ratio,
        "granularity": settings.granularity,
        "first": shard.col0,
        "columns": shard.columns,
        "k": shard.full_shape[1],
        "experts": experts,
        "mask": compensation.host_mask.numpy().tobytes() if residual == "mask" else None,
    }
