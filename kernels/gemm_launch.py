"""What the launchers of all W4A4 products share: checks of the operands, and the check that `native` is native."""

import functools
import math
from contextlib import nullcontext

import torch
import triton

from quads_kernels.activation import Quantized
from quads_kernels.configs import check_native
from quads_kernels.launch import FLOATS, HW, capability, require, require_contiguous, require_k, require_tensor

NATIVE_INSTRUCTION = "mxf4nvf4"
"""In the PTX of every kernel that multiplies NVFP4 in the tensor core."""


def check_rows(rows: Quantized) -> tuple[int, int, int, torch.device]:
    """(M, K, blocks whose residual is kept, device) of quantized activations, or a ValueError naming what is wrong.

    Sums have their residual in them: they keep 0 blocks."""
    if rows.sums is not None:
        require(rows.packed is None, "activations hold both sums and packed codes; ask quantize for one of them")
        require(rows.sums.dim() == 2, f"sums must have shape [M, K], got {tuple(rows.sums.shape)}")
        (m, k), device = rows.sums.shape, rows.sums.device
        require_k(k)
        require_tensor("sums", rows.sums, torch.float16, device)
        require_contiguous("sums", rows.sums)
        _scales("global_scale_dec of the activations", rows.global_scale_dec, (m,), device)
        return m, k, 0, device
    require(rows.packed is not None, "the product needs packed codes or sums; quantize with packed=True or sums=True")
    device = rows.packed.device
    require(rows.packed.dim() == 2, f"packed codes must have shape [M, K/2], got {tuple(rows.packed.shape)}")
    m, k = rows.packed.shape[0], 2 * rows.packed.shape[1]
    require_k(k)
    _bytes("packed codes of the activations", rows.packed, (m, k // 2), device)
    _bytes("block_scales of the activations", rows.block_scales, (m, k // 16), device)
    _scales("global_scale_dec of the activations", rows.global_scale_dec, (m,), device)
    if rows.residual_packed is None:
        return m, k, 0, device
    kept = rows.residual_packed.shape[-1] // 8
    require(0 < kept <= k // 16, f"the residual must keep 1 to K/16 = {k // 16} blocks, got {kept}; or pass None")
    _bytes("residual_packed", rows.residual_packed, (m, kept * 8), device)
    _bytes("residual_block_scales", rows.residual_block_scales, (m, kept), device)
    return m, k, kept, device


def kept_units(kept: int) -> tuple[int, int]:
    """Blocks of the residual as (units, blocks in a unit). The unit (16, 8, 4, 2 or 1) is a constant of the kernel,
    which tells how rows of the residual are aligned."""
    unit = math.gcd(kept, 16)
    return kept // unit, unit


def check_weight(weight, lead: tuple[int, ...], k: int, device: torch.device) -> int:
    """N of a weight with `packed` [*lead, N, K/2] and `block_scales` [*lead, N, K/16], or a ValueError."""
    shape = weight.packed.shape
    want = f"{(*lead, 'N', k // 2)}, as K of the activations is {k}"
    fits = len(shape) == len(lead) + 2 and shape[:-2] == lead and shape[-1] == k // 2
    require(fits, f"packed weight must have shape {want}; got {tuple(shape)}")
    _bytes("packed weight", weight.packed, tuple(shape), device)
    _bytes("block_scales of the weight", weight.block_scales, (*shape[:-1], k // 16), device)
    return shape[-2]


def check_form(tile, capability: int, native: bool, sums: bool) -> None:
    """Raise ValueError where a tile does not fit what is multiplied, or how."""
    require(not (native and sums), "sums need the emulated form; native multiplies codes: quantize with packed=True")
    require(tile.weights_on_m or not sums, f"sums need a tile with weights on the M side, not {tile}")
    if native and capability:
        check_native(tile, capability)


def check_out_dtype(dtype: torch.dtype) -> None:
    require(dtype in FLOATS, f"out_dtype must be one of {FLOATS}, got {dtype}")


def run(kernel, grid: tuple[int, ...], device: torch.device, native: bool, *args, **constants) -> None:
    """Start a kernel. Raises RuntimeError where `native` compiles to something else, before anything runs.

    Triton falls back to BF16 in silence, and makes a lone trap of a tile that exceeds tensor memory.
    """
    if not all(grid):
        return
    options = dict(constants, HW=HW, enable_fp_fusion=False)
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        if native and device.type == "cuda":
            _require_native(kernel, grid, device, args, options)
        kernel[grid](*args, **options)


_known_native: set[tuple] = set()


def _require_native(kernel, grid: tuple[int, ...], device: torch.device, args: tuple, options: dict) -> None:
    """Compile without launching, and look into the PTX; once for each set of constants and dtypes."""
    kinds = tuple(arg.dtype if isinstance(arg, torch.Tensor) else type(arg) for arg in args)
    key = (kernel.fn.__name__, device, kinds, tuple(sorted(options.items())))
    if key in _known_native:
        return
    ptx = kernel.warmup(*args, grid=grid, **options).asm["ptx"]
    if NATIVE_INSTRUCTION not in ptx:
        raise RuntimeError(
            f"{kernel.fn.__name__} compiles for sm_{capability(device)} without {NATIVE_INSTRUCTION}: Triton "
            f"{triton.__version__} multiplies in BF16, or not at all, with {options}. Use backend emulated, or a tile "
            "from quads_kernels.configs."
        )
    _known_native.add(key)


def converts_e4m3(device: torch.device) -> bool:
    """Whether the GPU has an instruction that converts E4M3 to FP16; False in the interpreter."""
    return capability(device) >= 89


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 in the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@functools.cache
def gpu_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def _bytes(name: str, x: torch.Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    require_tensor(name, x, torch.uint8, device, shape)
    require_contiguous(name, x)
    # Codes are read in words of 4 bytes, and an address between them ends the process on a GPU.
    require(x.data_ptr() % 4 == 0, f"{name} must begin at an address divisible by 4; call .clone()")


def _scales(name: str, x: torch.Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    require_tensor(name, x, torch.float32, device, shape)
    require_contiguous(name, x)
