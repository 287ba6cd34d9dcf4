"""Weights in NVFP4: fake quantization, packing, both in one pass, and decoding.

The global scale of each matrix is given, since matrices that the rollout fuses share one. Equal in every bit to
`quads_ops.weights`. One read of the weight, one write of each output; a program takes a tile of one matrix.
"""

import torch
import triton
import triton.language as tl

from quads_kernels import launch
from quads_kernels.rounding import (
    block_amax,
    cast,
    decode_e4m3,
    dequantize_blocks,
    load_tile,
    packed_codes,
    quantize_blocks,
    signed_e2m1,
    store_tile,
    to_fp32,
    unpack_nibbles,
)

MOST_PROGRAMS = 65535
"""Along the second and the third axis of a CUDA grid."""


@triton.jit
def tile_of_matrix(ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """This program's tile: matrix index (int64), row numbers [ROWS], number of its first block."""
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    return tl.program_id(2).to(tl.int64), rows, tl.program_id(0) * BLOCKS


@triton.jit
def weight_qdq_kernel(
    w_ptr,  # [E, N, K] float, any strides
    g_ptr,  # [E] fp32
    values_ptr,  # [E, N, K] float, contiguous, or None
    packed_ptr,  # [E, N, K/2] uint8, contiguous, or None
    scales_ptr,  # [E, N, K/16] uint8, contiguous, or None together with packed
    N,
    K,
    stride_e,
    stride_n,
    stride_k,
    HW: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    matrix, rows, first = tile_of_matrix(ROWS, BLOCKS)
    blocks = first + tl.arange(0, BLOCKS)
    row_ok = rows < N
    block_ok = blocks < K // 16
    ok = row_ok[:, None] & block_ok[None, :]
    source = w_ptr + matrix * stride_e + rows.to(tl.int64)[:, None, None] * stride_n
    source += (blocks.to(tl.int64) * 16 * stride_k)[None, :, None]
    x = to_fp32(load_tile(source, ok[:, :, None], stride_k), HW)
    g = tl.load(g_ptr + matrix) + tl.zeros((ROWS, 1), tl.float32)
    code, scale, byte = quantize_blocks(x, block_amax(x), g, HW)
    line = matrix * N + rows.to(tl.int64)
    block = line[:, None] * (K // 16) + blocks[None, :]
    if values_ptr is not None:
        value = dequantize_blocks(signed_e2m1(code, x, HW), scale, g, HW)
        value = cast(value, values_ptr.dtype.element_ty, HW)
        store_tile(values_ptr + block[:, :, None] * 16, value, ok[:, :, None])
    if packed_ptr is not None:
        words = packed_ptr.to(tl.pointer_type(tl.uint32)) + block[:, :, None] * 2 + tl.arange(0, 2)[None, None, :]
        tl.store(words, packed_codes(code, x, byte, HW), mask=ok[:, :, None])
        tl.store(scales_ptr + block, byte.to(tl.uint8), mask=ok)


@triton.jit
def weight_decode_kernel(
    packed_ptr,  # [E, N, K/2] uint8, contiguous
    scales_ptr,  # [E, N, K/16] uint8, contiguous
    g_ptr,  # [E] fp32
    values_ptr,  # [E, N, K] float, contiguous
    N,
    K,
    HW: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    matrix, rows, first = tile_of_matrix(ROWS, BLOCKS)
    blocks = first + tl.arange(0, BLOCKS)
    pair = first * 8 + tl.arange(0, BLOCKS * 8)
    row_ok = rows < N
    line = matrix * N + rows.to(tl.int64)
    pair_ok = row_ok[:, None] & (pair < K // 2)[None, :]
    packed = tl.load(packed_ptr + line[:, None] * (K // 2) + pair[None, :], mask=pair_ok, other=0)
    ok = row_ok[:, None] & (blocks < K // 16)[None, :]
    byte = tl.load(scales_ptr + line[:, None] * (K // 16) + blocks[None, :], mask=ok, other=0)
    code = tl.reshape(unpack_nibbles(packed, ROWS, BLOCKS * 16), (ROWS, BLOCKS, 16)).to(tl.int32)
    g = tl.load(g_ptr + matrix) + tl.zeros((ROWS, 1), tl.float32)
    value = dequantize_blocks(signed_e2m1(code & 7, code << 28, 0), decode_e4m3(byte), g, 0)
    value = cast(value, values_ptr.dtype.element_ty, HW)
    k = blocks[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(values_ptr + line[:, None, None] * K + k[None, :, :], value, mask=ok[:, :, None])


def tile_shape(n: int, k: int) -> tuple[int, int, int]:
    """(ROWS, BLOCKS, num_warps) for one matrix of n rows: 2048 elements by 4 warps on every GPU tried; in the
    interpreter, where a program costs milliseconds, as much as memory allows."""
    elements = 2**18 if launch.INTERPRETED else 2048
    blocks = min(triton.next_power_of_2(k // 16), elements // 16 if launch.INTERPRETED else 32)
    rows = min(triton.next_power_of_2(max(1, n)), elements // (16 * blocks))
    return rows, blocks, 4


def _grid(n: int, k: int, matrices: int, rows: int, blocks: int) -> tuple[int, int, int]:
    launch.require(
        n <= MOST_PROGRAMS * rows and matrices <= MOST_PROGRAMS,
        f"a weight with K={k} may have {MOST_PROGRAMS * rows} rows and {MOST_PROGRAMS} matrices, got {n} and "
        f"{matrices}; quantize parts of it",
    )
    return triton.cdiv(k // 16, blocks), triton.cdiv(n, rows), matrices


def quantize(w: torch.Tensor, g: torch.Tensor, *, values: bool, packed: bool):
    """Quantize each matrix with its scale, in one pass over it.

    w: [..., N, K], FP32, FP16 or BF16, any strides. g: FP32 [...].
    Returns (values in the dtype of w [..., N, K] or None, packed uint8 [..., N, K/2] or None,
    block_scales uint8 [..., N, K/16] or None), contiguous. Raises ValueError on a wrong dtype, device or shape.
    """
    _check(w, launch.FLOATS, g)
    *lead, n, k = w.shape
    launch.require_k(k)
    matrices = w.reshape(g.numel(), n, k)
    rows, blocks, warps = tile_shape(n, k)
    grid = _grid(n, k, g.numel(), rows, blocks)
    out = launch.empty(w.shape, w.dtype, w.device) if values else None
    codes = launch.empty((*lead, n, k // 2), torch.uint8, w.device) if packed else None
    scales = launch.empty((*lead, n, k // 16), torch.uint8, w.device) if packed else None
    tile = dict(HW=launch.arithmetic(w.device), ROWS=rows, BLOCKS=blocks, num_warps=warps)
    args = (matrices, g.contiguous(), out, codes, scales, n, k, *matrices.stride())
    launch.start(weight_qdq_kernel, grid, w.device, *args, **tile)
    return out, codes, scales


def dequantize(packed: torch.Tensor, block_scales: torch.Tensor, g: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """(e2m1 * s8) * g, rounded once to dtype: [..., N, K], contiguous.

    packed: uint8 [..., N, K/2]. block_scales: uint8 [..., N, K/16]. g: FP32 [...].
    Raises ValueError on a wrong dtype, device or shape.
    """
    _check(packed, torch.uint8, g)
    *lead, n, half = packed.shape
    k = 2 * half
    launch.require_k(k)
    launch.require_tensor("block_scales", block_scales, torch.uint8, packed.device, (*lead, n, k // 16))
    launch.require(dtype in launch.FLOATS, f"weights decode to one of {launch.FLOATS}, not {dtype}")
    rows, blocks, warps = tile_shape(n, k)
    grid = _grid(n, k, g.numel(), rows, blocks)
    out = launch.empty((*lead, n, k), dtype, packed.device)
    tile = dict(HW=launch.arithmetic(packed.device), ROWS=rows, BLOCKS=blocks, num_warps=warps)
    args = (packed.contiguous(), block_scales.contiguous(), g.contiguous(), out, n, k)
    launch.start(weight_decode_kernel, grid, packed.device, *args, **tile)
    return out


def _check(w: torch.Tensor, dtypes, g: torch.Tensor) -> None:
    launch.require(w.dim() >= 2, f"a weight has at least two dimensions [N, K]; got shape {tuple(w.shape)}")
    launch.require_tensor("weight", w, dtypes, w.device)
    launch.require_tensor("global_scale_dec", g, torch.float32, w.device, w.shape[:-2])
