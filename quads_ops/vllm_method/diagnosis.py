"""RPC methods of the rollout's workers for looking into a running engine and for experiments.

Use with plain vLLM: `LLM(..., worker_extension_cls="quads_ops.vllm_method.diagnosis.QuadsDiagnosis")`, then
`llm.collective_rpc("quads_state")`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from quads_ops.settings import SettingsError
from quads_ops.vllm_method import sensitivity
from quads_ops.vllm_method.allocation import choose_masks
from quads_ops.vllm_method.compat_vllm import captures_graphs
from quads_ops.vllm_method.compensation import Compensation, RollReport
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

    def quads_set_residual(
        self, ratio: float, score: str | None = None, allocation: str | None = None
    ) -> dict[str, float | bool | None]:
        """Change the residual ratio of every layer, and how masks are chosen; they are chosen anew from what is known.

        Returns what a weight sync reports as `rac`.

        Raises:
            SettingsError: a wrong value, a mode that has no residual, or an engine with CUDA graphs.
        """
        if captures_graphs(self.vllm_config):
            raise SettingsError(
                "ratio", ratio, "CUDA graphs keep the ratio that they were captured with; start with enforce_eager=True"
            )
        model = self.model_runner.get_model()
        compensations = list(self._quads_compensations())
        if not compensations:
            raise SettingsError("ratio", ratio, "this rollout does not quantize activations to NVFP4 (mode w4a4)")
        changes = {"ratio": ratio, "score": score, "allocation": allocation}
        changes = {name: value for name, value in changes.items() if value is not None}
        settings = replace(compensations[0].settings, **changes)
        if any(projection.operators for projection in projections(model)):
            settings.require_kernels()
        for compensation in compensations:
            compensation.change(**changes)
        with torch.no_grad():
            return rac_summary(model, choose_masks(model, RollReport()))

    def quads_set_sensitivity(self, vectors: dict[str, list]) -> None:
        """Give every input its squared gradients, as a weight sync does; masks stay as they are until next chosen.

        vectors: input -> [K] or [experts, K] numbers (nested lists: arguments of an RPC are plain values).

        Raises:
            SensitivityError: some are missing, or do not fit.
        """
        own = {name: sensitivity.take(name, torch.tensor(values)) for name, values in vectors.items()}
        sensitivity.apply(projections(self.model_runner.get_model()), own)

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
