"""What every launcher needs: the device's kind, checked arguments, outputs, and one way to start a kernel."""

import functools
from contextlib import nullcontext

import torch
import triton

INTERPRETED = triton.knobs.runtime.interpret
"""Whether Triton's interpreter runs the kernels (TRITON_INTERPRET=1). Fixed when this module is imported."""

HW = not INTERPRETED
"""The constexpr of the same name: see `quads_kernels.rounding`. The quantizers' is `arithmetic`."""

CONVERTS_E2M1 = (100, 103, 120)
"""Compute capabilities with instructions that convert to and from E2M1, of those that are compiled and inspected."""

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@functools.cache
def capability(device: torch.device) -> int:
    """Compute capability as one number: 90 for Hopper, 100 and 103 for Blackwell, 120 for consumer Blackwell; 0 on a
    device without CUDA."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def arithmetic(device: torch.device) -> int:
    """HW of a quantizer's kernel: see `quads_kernels.rounding`."""
    return int(HW) if INTERPRETED else arithmetic_of(capability(device))


def arithmetic_of(compute_capability: int) -> int:
    return 3 if compute_capability in CONVERTS_E2M1 else 2


def can_launch(device: torch.device) -> tuple[bool, str]:
    """Whether Triton kernels run on tensors of this device, and why (not)."""
    if INTERPRETED:
        if device.type == "cpu":
            return True, "Triton's interpreter (TRITON_INTERPRET=1)"
        return False, "TRITON_INTERPRET=1 is set, and the interpreter takes CPU tensors only; unset it"
    if device.type != "cuda":
        return False, f"Triton kernels need a CUDA device, the tensor is on {device}"
    found = capability(device)
    if found < 80:
        return False, f"the kernels need compute capability 8.0 or newer, {device} has {found / 10}"
    return True, f"Triton on sm_{found}"


def start(kernel, grid: tuple[int, ...], device: torch.device, *args, **constants) -> None:
    """Launch on the tensors' device, without contraction of a*b+c: it would change bits. An empty grid does nothing."""
    if not all(grid):
        return
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[grid](*args, **constants, enable_fp_fusion=False)


def empty(shape, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Where every output of a kernel comes from, so that a test can poison them all."""
    return torch.empty(shape, dtype=dtype, device=device)


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def require_tensor(name: str, x: torch.Tensor, dtypes, device: torch.device, shape=None) -> None:
    """One clear error where a tensor has the wrong dtype, device or shape. `None` in shape stands for any size."""
    dtypes = dtypes if isinstance(dtypes, tuple) else (dtypes,)
    require(x.dtype in dtypes, f"{name} must be {' or '.join(str(d) for d in dtypes)}, got {x.dtype}; cast it")
    require(x.device == device, f"{name} is on {x.device}, the kernel runs on {device}; move it there")
    if shape is not None:
        fits = x.dim() == len(shape) and all(want in (None, have) for want, have in zip(shape, x.shape, strict=True))
        require(fits, f"{name} must have shape {tuple(shape)}, got {tuple(x.shape)}")


def require_contiguous(name: str, x: torch.Tensor) -> None:
    """One clear error where a kernel would read another tensor's bytes: it is told no strides."""
    require(x.is_contiguous(), f"{name} must be contiguous, got strides {x.stride()}; call .contiguous()")


def require_k(k: int) -> None:
    require(
        k > 0 and k % 16 == 0,
        f"NVFP4 needs a last dimension (K) that is a positive multiple of 16; got {k}. "
        "Leave this tensor unquantized, or choose a sharding that keeps K a multiple of 16.",
    )
