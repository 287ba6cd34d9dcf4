"""Receipts: do trainer and rollout hold the same NVFP4 bytes?

Each side digests the codes and the block scales of every matrix; equal digests and an equal global scale mean equal
weights. A digest is a sum, modulo 2^64, over the blocks of 16 elements, of a mixed 64-bit number that depends on the
block's bytes and on its place in the full matrix. So digests of disjoint shards add up to the digest of the matrix,
however it is cut along N and (between blocks) along K, and no shard is gathered. The mixing is a bijection of the
block's 8 code bytes, so a change within one block always changes the digest; changes in several blocks are missed with
probability 2^-64. It guards against mistakes, not against an adversary.
Source of the mixing: Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators (2014), as SplitMix64.
"""

import zlib
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from quads_ops import cpu_qdq
from quads_ops.formats import BLOCK_SIZE
from quads_ops.listing import first_names

_GOLDEN = 0x9E3779B97F4A7C15
_CHUNK_BLOCKS = 1 << 22  # bounds the temporaries: 32 MiB each


class ReceiptMismatch(RuntimeError):
    """Trainer and rollout hold different weights; the message names the matrices."""


class Entry(NamedTuple):
    """The receipt of one matrix: signed 64-bit digests, and the FP32 bit pattern of global_scale_dec."""

    codes: int
    scales: int
    global_scale_bits: int


def digest(
    packed: torch.Tensor,
    block_scales: torch.Tensor,
    *,
    row0: int = 0,
    col0: int = 0,
    full_shape: tuple[int, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Digests of a matrix, or of the shard of it that starts at element (row0, col0).

    packed: uint8 [..., N, K/2]. block_scales: uint8 [..., N, K/16]. full_shape: (N, K) of the full matrix, in
    elements; needed for a shard. Returns (codes, scales), int64 [...], on the device of `packed`.
    Raises ValueError where shapes disagree, the shard lies outside the matrix, or cuts a block.
    """
    n, blocks = block_scales.shape[-2:]
    _check_bytes(packed, block_scales)
    full_n, full_k = full_shape or (n, blocks * BLOCK_SIZE)
    if col0 % BLOCK_SIZE or full_k % BLOCK_SIZE:
        raise ValueError(f"a shard must not cut a block of {BLOCK_SIZE}: got col0={col0}, full_shape={full_shape}")
    if row0 < 0 or col0 < 0 or row0 + n > full_n or col0 + blocks * BLOCK_SIZE > full_k:
        raise ValueError(
            f"a shard of shape ({n}, {blocks * BLOCK_SIZE}) at ({row0}, {col0}) lies outside the matrix of shape "
            f"({full_n}, {full_k})"
        )
    if cpu_qdq.takes(packed):
        return cpu_qdq.digest(packed, block_scales, row0, col0 // BLOCK_SIZE, full_k // BLOCK_SIZE)
    # A block's 8 code bytes are one 64-bit number (the byte order of the machines this runs on is little-endian).
    lanes = packed.contiguous().view(torch.int64)
    codes = torch.zeros(packed.shape[:-2], dtype=torch.int64, device=packed.device)
    scales = codes.clone()
    rows = max(1, _CHUNK_BLOCKS // max(1, blocks * codes.numel()))
    for start in range(0, n, rows):
        part = slice(start, min(n, start + rows))
        keys = _keys(row0 + start, part.stop - start, col0 // BLOCK_SIZE, blocks, full_k // BLOCK_SIZE, packed.device)
        codes += _mix(lanes[..., part, :] + keys).sum((-2, -1))
        scales += _mix(block_scales[..., part, :] + keys).sum((-2, -1))
    return codes, scales


def entries(
    names: Iterable[str], digests: tuple[torch.Tensor, torch.Tensor], global_scale_dec: torch.Tensor
) -> dict[str, Entry]:
    """Receipt entries of the matrices of one (possibly stacked) weight, in the order of its leading dimensions.

    digests: from `digest`, int64 [...]. global_scale_dec: FP32 [...].
    """
    codes, scales = (d.flatten().tolist() for d in digests)
    bits = global_scale_dec.detach().float().flatten().view(torch.int32).tolist()
    return {name: Entry(*row) for name, *row in zip(names, codes, scales, bits, strict=True)}


def combine(shards: Iterable[Entry], name: str = "a matrix") -> Entry:
    """The entry of a matrix from those of its disjoint shards. Raises ReceiptMismatch if their global scales differ."""
    shards = list(shards)
    bits = {shard.global_scale_bits for shard in shards}
    if len(bits) != 1:
        raise ReceiptMismatch(f"{name}: its shards have different global scales {sorted(map(_scale_text, bits))}")
    return Entry(_wrap(sum(s.codes for s in shards)), _wrap(sum(s.scales for s in shards)), bits.pop())


def compare(trainer: Mapping[str, Entry], rollout: Mapping[str, Entry], *, show: int = 8) -> None:
    """Raise ReceiptMismatch unless both sides hold the same matrices with the same codes, block scales and scale.

    show: how many matrices of each kind the message names.
    """
    problems = []
    for kind, names in (
        ("missing in the rollout", trainer.keys() - rollout.keys()),
        ("unknown to the trainer", rollout.keys() - trainer.keys()),
    ):
        if names:
            problems.append(_listing(kind, sorted(names), show))
    different = [
        f"{name} ({_difference(trainer[name], rollout[name])})"
        for name in sorted(trainer.keys() & rollout.keys())
        if Entry(*trainer[name]) != Entry(*rollout[name])
    ]
    if different:
        problems.append(_listing("different", different, show))
    if problems:
        raise ReceiptMismatch("trainer and rollout hold different NVFP4 weights after the sync. " + "; ".join(problems))


def checksum(receipt: Mapping[str, Entry]) -> int:
    """One number for all weights, in [0, 2^24), so that a float32 metric holds it: equal receipts, equal checksums."""
    text = repr(sorted((name, *entry) for name, entry in receipt.items()))
    return zlib.crc32(text.encode()) & 0xFFFFFF


def _difference(a: Entry, b: Entry) -> str:
    a, b = Entry(*a), Entry(*b)
    parts = [part for part in ("codes", "scales") if getattr(a, part) != getattr(b, part)]
    if a.global_scale_bits != b.global_scale_bits:
        parts.append(f"global_scale_dec {_scale_text(a.global_scale_bits)} against {_scale_text(b.global_scale_bits)}")
    return ", ".join(parts)


def _listing(kind: str, items: list[str], show: int) -> str:
    return f"{kind} ({len(items)}): {first_names(items, show)}"


def _scale_text(bits: int) -> str:
    return f"{torch.tensor(bits, dtype=torch.int32).view(torch.float32).item():.9g}"


def _keys(row0: int, rows: int, block0: int, blocks: int, full_blocks: int, device: torch.device) -> torch.Tensor:
    """A 64-bit key for each block of the shard, from its index in the full matrix: int64 [rows, blocks]."""
    row = torch.arange(row0, row0 + rows, device=device).unsqueeze(-1)
    column = torch.arange(block0, block0 + blocks, device=device)
    return _mix((row * full_blocks + column + 1) * _signed(_GOLDEN))


def _mix(z: torch.Tensor) -> torch.Tensor:
    """A bijection of 64-bit numbers in which every input bit reaches every output bit."""
    z = (z ^ _shift_right(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift_right(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shift_right(z, 31)


def _shift_right(z: torch.Tensor, bits: int) -> torch.Tensor:
    # torch shifts int64 arithmetically; the mask drops the copies of the sign bit.
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _wrap(value: int) -> int:
    """Python integer to signed 64 bits, as the sums in torch do."""
    return _signed(value & ((1 << 64) - 1))


def _check_bytes(packed: torch.Tensor, block_scales: torch.Tensor) -> None:
    shape = (*block_scales.shape[:-1], block_scales.shape[-1] * BLOCK_SIZE // 2)
    if packed.dtype != torch.uint8 or block_scales.dtype != torch.uint8 or packed.shape != shape:
        raise ValueError(
            f"digest needs uint8 codes [..., N, K/2] and block scales [..., N, K/16]; got {packed.dtype} "
            f"{tuple(packed.shape)} and {block_scales.dtype} {tuple(block_scales.shape)}"
        )
