"""Live reload: the trainer's weights into a running vLLM model, quantized on the way.

One `WeightUpdate` spans all buckets of a sync. vLLM loads layer by layer: tensors are kept until their layer is
complete, then its method processes them and the result goes into the layer's old storage. Around it this module

- copies every tensor (buckets are re-used, and vLLM keeps references),
- checks names, shapes and values before vLLM sees them: it takes a tensor sent twice for the one that is still missing,
- notes the amax of whole matrices (source_amax), and
- undoes an update that failed. Layers that were complete by then keep their new weights, so a model whose update failed
  refuses to run until one succeeds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from vllm.config import VllmConfig, set_current_vllm_config

from quads_ops import receipt
from quads_ops.listing import first_names
from quads_ops.vllm_method import checkpoint_map, compat_vllm, first_load, names, sensitivity, source_amax
from quads_ops.vllm_method.allocation import MaskChoiceError, choose_masks
from quads_ops.vllm_method.compensation import RollReport
from quads_ops.vllm_method.cpu_reload import fresh_cpu_moe_kernels, repack_tied_head
from quads_ops.vllm_method.projection import Projection, projections


class WeightUpdateError(RuntimeError):
    """The weights that arrived can't be loaded; the message names the tensor and what is wrong."""


@dataclass
class Loaded:
    """What one worker loaded; sums over the tensor parallel group describe the whole model."""

    receipts: dict[str, receipt.Entry] = field(default_factory=dict)
    changed: dict[str, tuple[int, int]] = field(default_factory=dict)


class WeightUpdate:
    """One update of all weights. `begin`, `load` for each bucket, then `finish` or `abort`.

    Args:
        model: vLLM's model, on this worker.
        vllm_config: of the engine.
        device: of this worker.
    """

    def __init__(self, model: torch.nn.Module, vllm_config: VllmConfig, device: torch.device):
        self.model, self.vllm_config, self.device = model, vllm_config, device
        self.table = names.table_for(vllm_config.model_config.hf_config.model_type)
        self._tied = checkpoint_map.has_tied_head(model)
        self._wanted: dict[str, checkpoint_map.Wanted] = {}
        self._seen: set[str] = set()
        self._amaxes: dict[str, torch.Tensor] = {}
        self._sensitivities: dict[str, torch.Tensor] = {}
        self._owner: dict[str, Projection] = {}
        self._loads: dict[Projection, int] = {}
        self._touched = False
        self._stack = ExitStack()

    def begin(self) -> None:
        """Put the model into its load format."""
        self._stack.enter_context(set_current_vllm_config(self.vllm_config))
        self._stack.enter_context(torch.no_grad())
        self._stack.enter_context(source_amax.amaxes_of_stream(self._amaxes))
        self._stack.enter_context(fresh_cpu_moe_kernels(self.model))
        self._loads = {p: p.loads for p in projections(self.model)}
        self._owner = {shard.name: p for p in self._loads for shard in p.shards}
        if self.vllm_config.load_config.load_format == "dummy" and not getattr(self.model, "_quads_updated", False):
            self._forget_statistics()
        first_load.leave_unchecked(self.model)
        compat_vllm.initialize_layerwise_reload(self.model)
        self._wanted = checkpoint_map.wanted_weights(self.model, self.table)

    def _forget_statistics(self) -> None:
        """Of random weights: vLLM warms up with requests of its own."""
        for projection in self._loads:
            if projection.compensation is not None:
                projection.compensation.forget()

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take one bucket; its tensors may be overwritten afterwards.

        weights: checkpoint names (canonical, or as vLLM's loader has them) and whole tensors; between them may be
            sensitivities (`quads_ops.vllm_method.sensitivity`), those of all inputs or none.

        Raises:
            WeightUpdateError: a name that is unknown or came twice, a wrong shape or dtype, NaN or Inf.
            SensitivityError: the same for a sensitivity.
        """
        taken = [item for name, tensor in weights if (item := self._take(name, tensor)) is not None]
        self._touched = True
        self.model.load_weights(taken)

    def finish(self) -> Loaded:
        """Complete the update on this worker; no collectives.

        Raises:
            WeightUpdateError: weights that did not come, with their names.
            SensitivityError: sensitivities that did not come, or do not fit.
        """
        missing = sorted(self._wanted.keys() - self._seen)
        if missing:
            raise WeightUpdateError(f"the weight stream ended without {first_names(missing, 8)}")
        if self._sensitivities:
            sensitivity.apply(self._loads, self._sensitivities)
        compat_vllm.finalize_layerwise_reload(self.model, self.vllm_config.model_config)
        if self._tied:
            repack_tied_head(self.model)
        for projection, before in self._loads.items():
            if projection.loads != before + 1:
                raise WeightUpdateError(
                    f"{projection.layer_name} was quantized {projection.loads - before} times in one update; "
                    "vLLM's reload does not do what this version was tried with"
                )
        self._stack.close()
        self.model._quads_updated = True
        _allow_running(self.model)
        loaded = Loaded()
        for projection in self._loads:
            loaded.receipts |= projection.weight.receipts()
            loaded.changed |= projection.weight.changed
        return loaded

    def abort(self, reason: str) -> None:
        """Undo what is incomplete. If any weight was loaded, the model refuses to run until an update succeeds."""
        compat_vllm.abort_layerwise_reload(self.model)
        self._stack.close()
        if self._touched:
            _refuse_running(self.model, reason)

    def _take(self, name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor] | None:
        """Checks, and a copy under the name that vLLM's loader takes."""
        if name.startswith(names.SENSITIVITY_PREFIX):
            self._take_sensitivity(name.removeprefix(names.SENSITIVITY_PREFIX), tensor)
            return None
        if checkpoint_map.ignorable(name, self._tied):
            return None
        canonical = self.table.canonical(name)
        want = self._wanted.get(canonical)
        if want is None:
            raise WeightUpdateError(f"the trainer sent {name}, which the rollout's model does not have")
        if canonical in self._seen:
            raise WeightUpdateError(f"the trainer sent {name} twice in one update")
        if not tensor.is_floating_point():
            raise WeightUpdateError(f"the trainer sent {name} as {tensor.dtype}; a floating point tensor is needed")
        if want.shape is not None and tuple(tensor.shape) != want.shape:
            raise WeightUpdateError(f"the trainer sent {name} with shape {tuple(tensor.shape)}; needed {want.shape}")
        own = torch.empty(tensor.shape, dtype=want.dtype, device=self.device).copy_(tensor)
        if not bool(torch.stack(torch.aminmax(own)).isfinite().all()):
            raise WeightUpdateError(f"the trainer sent NaN or Inf in {name}")
        self._seen.add(canonical)
        if want.elsewhere:
            return None
        self._observe(canonical, own)
        return self.table.loader(canonical), own

    def _take_sensitivity(self, name: str, tensor: torch.Tensor) -> None:
        if name in self._sensitivities:
            raise WeightUpdateError(f"the trainer sent the sensitivity of {name} twice in one update")
        self._sensitivities[name] = sensitivity.take(name, tensor)

    def _observe(self, name: str, tensor: torch.Tensor) -> None:
        matrix = name.removesuffix(".weight")
        owner = self._owner.get(matrix)
        if owner is not None and matrix != name:
            self._amaxes[matrix] = owner.weight.observe(tensor)


def settle(model: torch.nn.Module, reloaded: bool = True) -> RollReport:
    """End a sync on all workers: choose new masks. A collective; call it when every worker has finished.

    reloaded: whether the weights are new. Returns the sums over all workers.

    Raises:
        WeightUpdateError: on every worker, statistics of one of them that are not finite.
    """
    report = RollReport()
    with torch.no_grad():
        for projection in projections(model) if reloaded else ():
            projection.share()
        for projection in projections(model):
            if projection.compensation is not None:
                report += projection.compensation.end_period()
        try:
            return choose_masks(model, report)
        except MaskChoiceError as error:
            raise WeightUpdateError(str(error)) from None


def rac_summary(model: torch.nn.Module, report: RollReport) -> dict[str, float | bool | None] | None:
    """For metrics; None for a rollout without activation quantization.

    Its ratio is the configured one, or, where the layers share a budget, the share of the FLOPs that masks spend.
    """
    compensations = [p.compensation for p in projections(model) if p.compensation is not None]
    if not compensations:
        return None
    ratio = sum(c.settings.ratio for c in compensations) / len(compensations)
    if compensations[0].settings.allocation != "uniform" and report.spent_ratio is not None:
        ratio = report.spent_ratio
    summary = report.summary(ratio)
    return summary if compensations[0].settings.score == "sensitivity" else summary | {"by_sensitivity": None}


def combine_loaded(workers: Sequence[Loaded]) -> Loaded:
    """The whole model's receipts and changed codes, from those of all workers of the tensor parallel group."""
    shards: dict[str, list[receipt.Entry]] = {}
    whole = Loaded()
    for worker in workers:
        for name, entry in worker.receipts.items():
            shards.setdefault(name, []).append(entry)
        for name, (changed, total) in worker.changed.items():
            before = whole.changed.get(name, (0, 0))
            whole.changed[name] = (before[0] + changed, before[1] + total)
    whole.receipts = {name: receipt.combine(entries, name) for name, entries in shards.items()}
    return whole


def _refuse_running(model: torch.nn.Module, reason: str) -> None:
    _allow_running(model)

    def refuse(*_):
        raise RuntimeError(f"the last weight update failed and left old and new weights mixed: {reason}")

    # A CUDA graph of a whole forward is replayed without calling the model; logits are computed outside of it.
    entrances = [model, *(m for m in model.modules() if isinstance(m, compat_vllm.LogitsProcessor))]
    model._quads_refusal = [module.register_forward_pre_hook(refuse) for module in entrances]


def _allow_running(model: torch.nn.Module) -> None:
    for handle in model.__dict__.pop("_quads_refusal", ()):
        handle.remove()
