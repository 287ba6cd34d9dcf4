"""One weight of a layer as the rollout multiplies it: its kernel tensors, its activation, and the emulated product."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

from quads_ops import dispatch, gemm
from quads_ops.residual_layout import CompensatedWeight, ResidualForm, residual_form
from quads_ops.settings import RolloutSettings
from quads_ops.vllm_method import source_amax
from quads_ops.vllm_method.activation import make_activation
from quads_ops.vllm_method.compat_vllm import tp_reduce_
from quads_ops.vllm_method.compensation import Compensation, RollReport
from quads_ops.vllm_method.shards import Shard
from quads_ops.vllm_method.weight_fp8 import Fp8Weight
from quads_ops.vllm_method.weight_nvfp4 import Nvfp4Weight
from quads_ops.weights import PackedWeight


class Projection:
    """[N, K] of a linear layer or [E, N, K] of fused experts.

    Args:
        layer_name: canonical, for messages and reports.
        stem: prefix of its tensors' names on the vLLM layer.
        source: name of the vLLM parameter that checkpoint tensors are loaded into.
        shards: this worker's matrices.
        rollout: mode and residual settings.
        k: this worker's K.
        masks: number of masks (local experts of a down projection), or None for one.
        uses: matrices of a stack of experts that a token meets behind one mask (gate and up: experts per token).
        stack: experts of the whole layer, where there are any.
    """

    def __init__(
        self,
        layer_name: str,
        stem: str,
        source: str,
        shards: Sequence[Shard],
        rollout: RolloutSettings,
        k: int,
        masks: int | None = None,
        uses: int = 1,
        stack: int | None = None,
    ):
        self.layer_name, self.stem, self.source, self.shards = layer_name, stem, source, tuple(shards)
        self.stack = stack
        self.mode = rollout.mode
        self.size = max(shard.rows.stop for shard in shards)
        """N of this worker."""
        self.weight = Fp8Weight(shards) if rollout.mode == "fp8" else Nvfp4Weight(shards)
        width = uses * sum(shard.full_shape[0] for shard in self.shards if shard.expert == self.shards[0].expert)
        self.activation = make_activation(rollout, f"{layer_name} ({stem})", k, masks, width)
        self.loads = 0
        """How often it was loaded."""
        self.operators = False
        """Whether the product is one of `quads_ops.gemm`; known once it is loaded."""
        self._dense: torch.Tensor | None = None
        self._operand: CompensatedWeight | None = None
        self._fitted = -1
        # Workers that split N (or the experts) see the same activations, so they share one mask.
        self.shared_mask = masks is None and all(shard.full_shape[1] == shard.columns for shard in shards)

    @property
    def compensation(self) -> Compensation | None:
        return self.activation if isinstance(self.activation, Compensation) else None

    def load(self, layer: torch.nn.Module) -> None:
        """Quantize the layer's loaded source weight, and put the kernel tensors in its place.

        Raises:
            ValueError: NaN or Inf in the weights.
            SettingsError: a shared budget of residuals, which the kernels can't have.
        """
        source = getattr(layer, self.source).data
        self.weight.load(source)
        delattr(layer, self.source)
        self.weight.register(layer, self.stem, self.source)
        self.operators = uses_operators(source.device, self.mode)
        if self.operators:
            self.compensation.settings.require_kernels()
        self._renew_dense(source.device)
        if self.compensation is not None:
            self.compensation.create(source.device)
            self.compensation.register(layer, self.stem)
            self.compensation.set_weight_energy(self._column_energy())
        self.loads += 1
        if not source_amax.streaming():  # an update waits until every worker has loaded everything: `reload.settle`
            self.share()
            self.roll()
            self.weight.register(layer, self.stem, self.source)  # with the order that it now may have

    def share(self) -> None:
        """After loading, what the masks need of other workers' weights. A collective."""
        if self.compensation is not None and self.shared_mask:
            tp_reduce_(self.compensation.weight_energy, torch.distributed.ReduceOp.SUM)

    def roll(self) -> None:
        """Choose new masks for this layer by itself; `reload.settle` does it for all."""
        if self.compensation is not None:
            self.compensation.end_period()
            self.choose()

    def choose(self, allocated: torch.Tensor | None = None) -> RollReport:
        """Choose masks (`Compensation.choose`), and bring the weight into their order where it has one."""
        if self.compensation is None:
            return RollReport()
        report = self.compensation.choose(allocated)
        if self.operators:
            self.operand()  # now, not in the first step: captured graphs read the weight where it is
        return report

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[M, K] -> [M, N] in the dtype of x, bias added in FP32, rounded once."""
        if self.operators:
            x, stats, _ = self.compensation.prepare(x)
            return gemm.w4a4_linear(x, self.operand(), bias=bias, stats=stats)
        bias = None if bias is None else bias.float()
        return F.linear(self.activation.one(x), self.dense(), bias).to(x.dtype)

    def dense(self) -> torch.Tensor:
        """The dequantized weight, FP32. Cached on the CPU, where memory is cheap and dequantizing is not."""
        return self.weight.dequantized() if self._dense is None else self._dense

    def operand(self) -> CompensatedWeight:
        """What `quads_ops.gemm` multiplies: the kernel tensors in the order of the masks in force.

        Raises:
            ValueError: a mask per token, which the kernels don't have.
        """
        if self._fitted != self.compensation.version:
            self._operand = self._fit()
            self._fitted = self.compensation.version
        return self._operand

    def _fit(self) -> CompensatedWeight:
        compensation, k = self.compensation, self.compensation.k
        residual = compensation.residual()
        if compensation.frozen and compensation.experts is not None:
            residual = compensation.masks
        form = residual_form(residual, k)
        if form.order is not None:
            self.weight.reorder(form.order)
        order = self.weight["order"] if "order" in self.weight else None
        keep = form.keep
        if keep is not None:  # the masks themselves, whose addresses stay
            keep = compensation.mask if compensation.experts is not None else compensation.mask[0]
        return CompensatedWeight(self.weight.ordered, ResidualForm(form.kept, order, keep))

    def _renew_dense(self, device: torch.device) -> None:
        if device.type != "cpu" or self.operators:
            return
        if self._dense is None:
            self._dense = self.weight.dequantized()
        else:
            self._dense.copy_(self.weight.dequantized())

    def _column_energy(self) -> torch.Tensor:
        """Squared norm of each column: FP32 [K], or [E, K]."""
        if self._dense is not None:
            return self._dense.square().sum(-2)
        packed = self.weight.packed
        if packed.packed.dim() == 2:
            return dispatch.dequantize_weight(packed).square().sum(-2)
        experts = (PackedWeight(*(part[e] for part in packed)) for e in range(len(packed.packed)))
        return torch.stack([dispatch.dequantize_weight(expert).square().sum(-2) for expert in experts])


def uses_operators(device: torch.device, mode: str) -> bool:
    """True where the product is one of `quads_ops.gemm`, on packed operands; elsewhere it is an FP32 GEMM in torch."""
    return mode == "w4a4" and device.type != "cpu"


def projections(model: torch.nn.Module) -> Iterator[Projection]:
    """All quantized weights of a vLLM model, in the order of its modules."""
    for module in model.modules():
        yield from getattr(module, "quads_projections", ())
