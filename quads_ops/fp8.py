"""FP8 (E4M3) with a scale per row: per output channel of a weight, per token of an activation. Plain torch, any device.

    scale = amax / 448     1 where amax is 0
    x'    = e4m3(clamp(x / scale, -448, 448)) * scale

The accuracy reference of mode `fp8`. All arithmetic is FP32.
"""

import torch

from quads_ops.formats import E4M3_MAX


def fp8_qdq(x: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """Quantize and dequantize: FP32, shape of x. Arguments as for `fp8_quantize`."""
    codes, scale = fp8_quantize(x, amax)
    return codes.float() * scale.unsqueeze(-1)


def fp8_quantize(x: torch.Tensor, amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 codes [..., K] and FP32 scales [...].

    x: [..., K], any float dtype. amax: x.shape[:-1], not negative, from `row_amax` of x or of what x is a part of.
    """
    amax = amax.float()
    # By a tensor: see nvfp4.global_scale_dec.
    scale = torch.where(amax == 0, 1.0, amax / amax.new_full((), E4M3_MAX))
    scaled = x.float() / scale.unsqueeze(-1)
    return scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale


def row_amax(x: torch.Tensor) -> torch.Tensor:
    """Largest magnitude over the last dimension, FP32: [..., K] -> [...]. NaN propagates."""
    low, high = torch.aminmax(x, dim=-1)
    return torch.maximum(-low, high).float()
