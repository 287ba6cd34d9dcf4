"""One fused weight in FP8 (E4M3), the accuracy reference of mode `fp8`: a scale per output channel."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quads_ops import receipt
from quads_ops.fp8 import fp8_quantize, row_amax
from quads_ops.vllm_method import source_amax
from quads_ops.vllm_method.compat_vllm import tp_reduce_
from quads_ops.vllm_method.kernel_tensors import KernelTensors
from quads_ops.vllm_method.shards import Shard


class Fp8Weight(KernelTensors):
    """[N, K] or [E, N, K], a scale per output channel over the whole K. Interface of Nvfp4Weight, but no receipts."""

    def __init__(self, shards: Sequence[Shard]):
        super().__init__()
        self.shards = tuple(shards)
        self.changed: dict[str, tuple[int, int]] = {}

    @staticmethod
    def observe(matrix: torch.Tensor) -> torch.Tensor:
        """amax of each output channel of a whole matrix: [N, K] -> FP32 [N]."""
        return row_amax(matrix)

    def load(self, w: torch.Tensor) -> None:
        """Quantize `w` into the kernel tensors. Raises ValueError on NaN or Inf."""
        amax = self._channel_amax(w)
        if not bool(amax.isfinite().all()):
            raise ValueError(f"quads_nvfp4: weights hold NaN or Inf in {self.shards[0].name} or a matrix joined to it")
        stack = [fp8_quantize(*one) for one in zip(w, amax, strict=True)] if w.dim() == 3 else [fp8_quantize(w, amax)]
        for name, parts in zip(("codes", "scales"), zip(*stack, strict=True), strict=True):
            self.store(name, torch.stack(parts) if w.dim() == 3 else parts[0])

    def dequantized(self) -> torch.Tensor:
        """FP32 [.., N, K]."""
        return self["codes"].float() * self["scales"].unsqueeze(-1)

    def receipts(self) -> dict[str, receipt.Entry]:
        return {}

    def _channel_amax(self, w: torch.Tensor) -> torch.Tensor:
        if not source_amax.streaming():
            amax = row_amax(w)
            split_k = any(shard.full_shape[1] != shard.columns for shard in self.shards)
            return tp_reduce_(amax, torch.distributed.ReduceOp.MAX) if split_k else amax
        amax = torch.empty(w.shape[:-1], dtype=torch.float32, device=w.device)
        for shard, observed in zip(self.shards, source_amax.from_stream(self.shards), strict=True):
            part = amax if shard.expert is None else amax[shard.expert]
            size = shard.rows.stop - shard.rows.start
            part[shard.rows] = observed[shard.row0 : shard.row0 + size].to(w.device)
        return amax
