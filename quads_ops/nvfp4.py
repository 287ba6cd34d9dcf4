"""NVFP4 in plain torch: the definition that every other implementation in this project must equal, bit for bit.

All arithmetic is FP32 with IEEE division and round-to-nearest-even:

    g    = amax / 2688                                   1 if amax is 0, NaN if it is not finite, never below 2^-117
    s8   = e4m3(min(amax_block / (6 * g), 448))          0x7F (NaN) if the block holds NaN or Inf, or if g is NaN
    y    = |x| / (s8 * g)                                0 where s8 * g is 0
    code = e2m1(y), with the sign of x                   ties to the even code, saturating at 6; 0 where s8 is NaN
    x'   = (e2m1 * s8) * g

`g` is `global_scale_dec`: multiply by it to decode. Weights have one per matrix, activations one per token.
"""

import torch

from quads_ops import cpu_qdq
from quads_ops.formats import (
    BLOCK_SIZE,
    E2M1_SIGN,
    E4M3_MAX,
    E4M3_NAN,
    GLOBAL_SCALE_DIVISOR,
    GLOBAL_SCALE_MIN,
)


def global_scale_dec(amax: torch.Tensor) -> torch.Tensor:
    """Decode scale g for a tensor whose largest magnitude is `amax`.

    amax: any float dtype and shape, not negative. Returns FP32 of the same shape: amax / 2688, but 1 where amax is 0,
    NaN where amax is not finite, and not below 2^-117.
    """
    amax = amax.float()
    # By a tensor: CUDA multiplies with the reciprocal of a plain number, and misses a fifth of the quotients by a bit.
    g = (amax / amax.new_full((), GLOBAL_SCALE_DIVISOR)).clamp(min=GLOBAL_SCALE_MIN)
    g = torch.where(amax == 0, 1.0, g)
    return torch.where(amax.isfinite(), g, torch.nan)


def quantize(x: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize along the last dimension.

    x: [..., K], any float dtype. g: FP32, broadcastable to x.shape[:-1].
    Returns codes (uint8 [..., K], 4 bits used) and block_scales (uint8 [..., K/16], E4M3 bytes).
    Raises ValueError where K is not a multiple of 16 or g does not broadcast.
    """
    blocks, g = _blocks_and_scale(x, g)
    block_scales = _block_scales(blocks, g)
    divisor = decode_e4m3(block_scales) * g
    y = blocks.abs() / divisor.unsqueeze(-1)
    y = torch.where((divisor == 0).unsqueeze(-1), 0.0, y)
    codes = _e2m1_magnitude(y) | blocks.signbit().to(torch.uint8) * E2M1_SIGN
    codes = torch.where(divisor.isnan().unsqueeze(-1), 0, codes)
    return codes.reshape(x.shape), block_scales


def dequantize(codes: torch.Tensor, block_scales: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """(e2m1 * s8) * g as FP32 [..., K].

    codes: uint8 [..., K]. block_scales: uint8 [..., K/16]. g: FP32, broadcastable to codes.shape[:-1].
    """
    g = broadcast_scale(g, codes.shape)
    return unscaled(codes, block_scales) * g.unsqueeze(-1)


def unscaled(codes: torch.Tensor, block_scales: torch.Tensor) -> torch.Tensor:
    """e2m1 * s8 as FP32 [..., K], without the global scale. Exact: at most 6 significant bits, at most 2688."""
    check_k(codes.shape)
    blocks = decode_e2m1(codes).unflatten(-1, (-1, BLOCK_SIZE))
    return (blocks * decode_e4m3(block_scales).unsqueeze(-1)).flatten(-2)


def qdq(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """Quantize and dequantize: FP32 [..., K], equal in every bit to `dequantize(*quantize(x, g), g)`.

    x, g: as for `quantize`. Not differentiable. On a CPU it runs compiled where it can: see `cpu_qdq.path()`.
    """
    if not cpu_qdq.takes(x):
        return reference_qdq(x, g)
    check_k(x.shape)
    return cpu_qdq.qdq(x, broadcast_scale(g, x.shape))


def reference_qdq(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """`qdq` by the definition above, in torch on any device."""
    return dequantize(*quantize(x, g), g)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Two codes a byte: uint8 [..., K] -> uint8 [..., K/2], the even k in the low nibble."""
    check_k(codes.shape)
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack`: uint8 [..., K/2] -> uint8 [..., K]."""
    return torch.stack((packed & 0xF, packed >> 4), -1).flatten(-2)


def decode_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Value of each 4-bit code, FP32, same shape. Code 8 is -0.0.

    By arithmetic: a table would have to be copied to the device, which ends the capture of a CUDA graph.
    """
    bits = codes.int()
    mantissa, exponent = bits & 1, (bits >> 1) & 3
    halves = torch.where(exponent == 0, mantissa, (mantissa + 2) << (exponent - 1).clamp(min=0))
    magnitude = halves * 0.5
    return torch.where(bits >= 8, -magnitude, magnitude)


def decode_e4m3(block_scales: torch.Tensor) -> torch.Tensor:
    """Value of each E4M3 byte, FP32, same shape."""
    return block_scales.view(torch.float8_e4m3fn).float()


def check_k(shape: torch.Size) -> None:
    """Raise ValueError unless the last dimension is a positive multiple of the block size."""
    if not shape or shape[-1] % BLOCK_SIZE or not shape[-1]:
        raise ValueError(
            f"NVFP4 needs a last dimension (K) that is a positive multiple of {BLOCK_SIZE}; got shape {tuple(shape)}. "
            "Leave this tensor unquantized, or choose a sharding that keeps K a multiple of the block size."
        )


def broadcast_scale(g: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """g expanded to shape[:-1], detached. Raises ValueError on another dtype than FP32 or a shape that doesn't fit."""
    if g.dtype != torch.float32:
        raise ValueError(f"global_scale_dec must be float32, got {g.dtype}; take it from global_scale_dec(amax)")
    try:
        return g.detach().expand(shape[:-1])
    except RuntimeError:
        raise ValueError(
            f"global_scale_dec of shape {tuple(g.shape)} does not broadcast to {tuple(shape[:-1])}, the leading "
            f"dimensions of the tensor of shape {tuple(shape)}"
        ) from None


def _blocks_and_scale(x: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x as FP32 [..., K/16, 16], and g as [..., 1] against the block scales."""
    check_k(x.shape)
    return x.detach().float().unflatten(-1, (-1, BLOCK_SIZE)), broadcast_scale(g, x.shape).unsqueeze(-1)


def _block_scales(blocks: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    amax = blocks.abs().amax(-1)
    amax = torch.where(amax.isfinite(), amax, torch.nan)
    # Clamp before the cast: whether a cast saturates depends on the library and its version.
    scale = (amax / (6.0 * g)).clamp(max=E4M3_MAX)
    code = scale.to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(scale.isnan(), E4M3_NAN, code).to(torch.uint8)


def _e2m1_magnitude(y: torch.Tensor) -> torch.Tensor:
    """3-bit code of y >= 0: the count of midpoints passed, where a tie passes only towards an even code."""
    code = (y > 0.25).to(torch.uint8)
    for passed in (y >= 0.75, y > 1.25, y >= 1.75, y > 2.5, y >= 3.5, y > 5.0):
        code += passed
    return code
