"""One fused weight of the rollout in NVFP4: kernel tensors that keep their addresses, digests, and what changed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quads_ops import dispatch, nvfp4, receipt
from quads_ops.residual_layout import reorder_weight
from quads_ops.vllm_method import source_amax
from quads_ops.vllm_method.compat_vllm import tp_reduce_
from quads_ops.vllm_method.kernel_tensors import KernelTensors
from quads_ops.vllm_method.shards import Shard
from quads_ops.weights import PackedWeight, weight_amax

_CHUNK_ELEMENTS = 1 << 24  # bounds the FP32 temporaries while quantizing a stack of experts
_SAMPLE_BYTES = 2048  # per matrix; 36 MiB for the 18432 of Qwen3-30B-A3B's experts


class Nvfp4Weight(KernelTensors):
    """[N, K], or [E, N, K] with one global scale per expert. The matrices of one group share a global scale.

    Args:
        shards: the matrices that lie in it, of this worker.
    """

    KEPT_ASLEEP = ("order",)

    def __init__(self, shards: Sequence[Shard]):
        super().__init__()
        self.shards = tuple(shards)
        self._stacks = _stacks(self.shards)
        self.changed: dict[str, tuple[int, int]] = {}
        """Matrix -> (codes that the last load changed, codes in all), of this worker's counted shards. Estimated from a
        sample where a sleep discarded the codes before; empty at the first load."""
        self._written = 0
        self._sample: list[torch.Tensor] | None = None
        """Some of the codes, on the host, for what is left to compare with after a sleep."""

    @staticmethod
    def observe(matrix: torch.Tensor) -> torch.Tensor:
        """What a weight update must remember of a whole matrix [N, K] in compute dtype: its amax."""
        return weight_amax(matrix)

    @property
    def ordered(self) -> PackedWeight:
        """The kernel tensors, with the blocks of K in the order that `reorder` gave them."""
        return PackedWeight(self["packed"], self["block_scales"], self["global_scale_dec"])

    @property
    def packed(self) -> PackedWeight:
        """With the blocks of K in their own order; a copy if the kernel tensors have another."""
        if "order" not in self:
            return self.ordered
        return reorder_weight(self.ordered, torch.argsort(self["order"], dim=-1))

    def reorder(self, order: torch.Tensor) -> None:
        """Permute the blocks of K in place: int32 [K/16] or [E, K/16], the source block of each. Later loads follow."""
        self._store_ordered(reorder_weight(self.packed, order))
        self.store("order", order)

    def load(self, w: torch.Tensor) -> None:
        """Quantize `w` (compute dtype) into the kernel tensors.

        Raises:
            ValueError: NaN or Inf in the weights, with the names of the matrices.
        """
        g = nvfp4.global_scale_dec(self._group_amax(w))
        if not bool(g.isfinite().all()):
            bad = sorted({s.name for s in self.shards if not bool(g[... if s.expert is None else s.expert].isfinite())})
            raise ValueError(f"quads_nvfp4: weights hold NaN or Inf: {', '.join(bad[:8])}")
        new = _quantize(w, g)
        parts = self._parts(new.packed)
        sample = [_sample(part) for part in parts]
        if "packed" in self and _sum_of_codes(self["packed"]) == self._written:
            self.changed = self._count_changed(self._parts(self.packed.packed), parts)
        else:
            self.changed = {} if self._sample is None else self._count_changed(self._sample, sample)
        self._sample = sample
        self._store_ordered(reorder_weight(new, self["order"]) if "order" in self else new)

    def _store_ordered(self, weight: PackedWeight) -> None:
        for name, tensor in weight._asdict().items():
            self.store(name, tensor)
        self._written = _sum_of_codes(self["packed"])

    def dequantized(self) -> torch.Tensor:
        """FP32 [.., N, K], exact."""
        return dispatch.dequantize_weight(self.packed)

    def receipts(self) -> dict[str, receipt.Entry]:
        """Digests of this worker's counted shards. Sum over workers gives those of the whole matrices."""
        entries: dict[str, receipt.Entry] = {}
        packed, block_scales, g = self.packed
        for stack in self._stacks:
            first = stack[0]
            digests = receipt.digest(
                packed[..., first.rows, :],
                block_scales[..., first.rows, :],
                row0=first.row0,
                col0=first.col0,
                full_shape=first.full_shape,
            )
            stacked = receipt.entries([shard.name for shard in stack], digests, g)
            entries |= {shard.name: stacked[shard.name] for shard in stack if shard.counted}
        return entries

    def _group_amax(self, w: torch.Tensor) -> torch.Tensor:
        """FP32 [] or [E]: over all matrices that share the scale, whole."""
        if not source_amax.streaming():
            amax = weight_amax(w)
            return (
                amax if all(shard.whole for shard in self.shards) else tp_reduce_(amax, torch.distributed.ReduceOp.MAX)
            )
        observed = source_amax.from_stream(self.shards)
        groups: dict[int | None, list[torch.Tensor]] = {}
        for shard, amax in zip(self.shards, observed, strict=True):
            groups.setdefault(shard.expert, []).append(amax)
        amaxes = [torch.stack(groups[expert]).amax() for expert in sorted(groups, key=lambda e: -1 if e is None else e)]
        return (amaxes[0] if w.dim() == 2 else torch.stack(amaxes)).to(w.device)

    def _parts(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """The codes of each stack of shards, two a byte: uint8 [n] or [E, n]."""
        return [packed[..., stack[0].rows, :].flatten(-2) for stack in self._stacks]

    def _count_changed(self, before: list[torch.Tensor], now: list[torch.Tensor]) -> dict[str, tuple[int, int]]:
        """before, now: of each stack of shards all codes, or the same sample of them: uint8 [n] or [E, n]."""
        counts: dict[str, tuple[int, int]] = {}
        for stack, old, new in zip(self._stacks, before, now, strict=True):
            differs = old ^ new
            changed = (((differs & 0xF) != 0).sum(-1) + ((differs >> 4) != 0).sum(-1)).flatten().tolist()
            size = (stack[0].rows.stop - stack[0].rows.start) * 2 * self["packed"].shape[-1]
            share = size / (2 * differs.shape[-1])
            counts |= {s.name: (round(n * share), size) for s, n in zip(stack, changed, strict=True) if s.counted}
        return counts


def _quantize(w: torch.Tensor, g: torch.Tensor) -> PackedWeight:
    if w.dim() == 2:
        return dispatch.quantize_weight(w, g)
    step = max(1, _CHUNK_ELEMENTS // w[0].numel())
    chunks = [dispatch.quantize_weight(w[e : e + step], g[e : e + step]) for e in range(0, w.shape[0], step)]
    return PackedWeight(*(torch.cat(parts) for parts in zip(*chunks, strict=True)))


def _sum_of_codes(packed: torch.Tensor) -> int:
    """Of the blocks' 8 bytes as integers, modulo 2^64: tells codes from what memory holds that was given back."""
    return int(packed.view(torch.int64).sum())


def _sample(codes: torch.Tensor) -> torch.Tensor:
    """At most _SAMPLE_BYTES of each row, always the same and spread evenly, on the host: uint8 [n] or [E, n]."""
    size = codes.shape[-1]
    if size > _SAMPLE_BYTES:
        steps = torch.arange(1, _SAMPLE_BYTES + 1, dtype=torch.float64)
        # Multiples of the golden ratio, which no period of rows or columns meets.
        codes = codes[..., (steps * ((5**0.5 - 1) / 2) % 1 * size).long().to(codes.device)]
    return codes.to("cpu", copy=True)


def _stacks(shards: Sequence[Shard]) -> list[list[Shard]]:
    """Shards that lie in the same place of each expert, so that one call digests them all."""
    stacks: dict[tuple, list[Shard]] = {}
    for shard in shards:
        key = (shard.rows.start, shard.rows.stop, shard.row0, shard.col0, shard.full_shape)
        stacks.setdefault(key if shard.expert is not None else (shard.name,), []).append(shard)
    return list(stacks.values())
