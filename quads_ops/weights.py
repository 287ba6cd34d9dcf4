"""NVFP4 weights: amax, packed codes, and the fake-quantized matrix that the trainer multiplies with.

The source is always the weight in the dtype it is multiplied in (`compute dtype`: BF16 or FP32); quantizing an FP32
master instead gives other codes. Matrices that the rollout fuses (q, k and v; gate and up) share one global scale:
take the maximum of their amaxes before `global_scale_dec`. Leading dimensions are experts, each with its own scale.
"""

from typing import NamedTuple

import torch

from quads_ops import cpu_qdq, nvfp4


class PackedWeight(NamedTuple):
    """An NVFP4 weight: 4.5 bits an element."""

    packed: torch.Tensor
    """uint8 [..., N, K/2]: two E2M1 codes a byte, the even k in the low nibble."""
    block_scales: torch.Tensor
    """uint8 [..., N, K/16]: E4M3 bytes."""
    global_scale_dec: torch.Tensor
    """FP32 [...]: one per matrix."""


def weight_amax(w: torch.Tensor) -> torch.Tensor:
    """Largest magnitude of each matrix, over the last two dimensions: [..., N, K] -> FP32 [...]. NaN propagates."""
    _check_matrix(w)
    w = w.detach().flatten(-2)
    if cpu_qdq.takes(w):
        return cpu_qdq.amax(w)
    # Two reductions and no |w|: a temporary of the size of all experts is dear.
    return torch.maximum(w.amax(-1), -w.amin(-1)).float()


def quantize_weight(w: torch.Tensor, g: torch.Tensor) -> PackedWeight:
    """Quantize each matrix with its scale.

    w: [..., N, K] in compute dtype. g: FP32 [...], from `global_scale_dec(weight_amax(w))`, or of the group's amax.
    Raises ValueError where K is not a multiple of 16 or the shape of g is not w.shape[:-2].
    """
    per_row = _per_row(w, g)
    if cpu_qdq.takes(w):
        nvfp4.check_k(w.shape)
        return PackedWeight(*cpu_qdq.quantize_packed(w, nvfp4.broadcast_scale(per_row, w.shape)), g)
    codes, block_scales = nvfp4.quantize(w, per_row)
    return PackedWeight(nvfp4.pack(codes), block_scales, g)


def dequantize_weight(weight: PackedWeight) -> torch.Tensor:
    """FP32 [..., N, K]."""
    g = _per_row(weight.packed, weight.global_scale_dec)
    return nvfp4.dequantize(nvfp4.unpack(weight.packed), weight.block_scales, g)


def fake_quantize_weight(w: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """`dequantize_weight(quantize_weight(w, g))`, rounded once from FP32 to the dtype of w."""
    per_row = _per_row(w, g)
    if cpu_qdq.takes(w):
        nvfp4.check_k(w.shape)
        return cpu_qdq.qdq(w, nvfp4.broadcast_scale(per_row, w.shape), w.dtype)
    return nvfp4.reference_qdq(w, per_row).to(w.dtype)


def _per_row(w: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    _check_matrix(w)
    if g.shape != w.shape[:-2]:
        raise ValueError(
            f"global_scale_dec has shape {tuple(g.shape)}; weights of shape {tuple(w.shape)} need one per matrix, "
            f"shape {tuple(w.shape[:-2])}"
        )
    return g.unsqueeze(-1)


def _check_matrix(w: torch.Tensor) -> None:
    if w.dim() < 2:
        raise ValueError(f"a weight has at least two dimensions [N, K]; got shape {tuple(w.shape)}")
