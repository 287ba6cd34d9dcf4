"""Which implementation of an operator runs: decided by device, dtype and shape, said once, or demanded.

    torch      `quads_ops` itself, on any device; on a CPU it quantizes in compiled C++ (`quads_ops.cpu_qdq`)
    emulated   Triton kernels; products on FP16 tensor cores of exactly dequantized values (Ampere, Ada, Hopper)
    native     Triton kernels; products on NVFP4 tensor cores (Blackwell)

They agree in every bit wherever something is quantized or decoded; products and statistics differ by the order of
their sums. The quantizers are the same kernels in `emulated` and `native`.

By default a GPU takes the last of the three that can run, a CPU torch. The environment variable QUADS_BACKEND, or
`set_backend`, demands one: what it cannot run is then an error. Each choice is printed once per operator and device, to
stderr.

`sums_residual` decides how `emulated` multiplies a residual; QUADS_EXACT_RESIDUAL=1 demands the exact way. `takes_sums`
is the same for a product with or without one.
"""

import functools
import os
import sys

import torch

from quads_ops import cpu_qdq

BACKENDS = ("torch", "emulated", "native")
QUANTIZERS = ("fake_quantize_weight", "quantize_weight", "dequantize_weight", "compensate", "quantize_activation")
COMPILED_ON_CPU = ("fake_quantize_weight", "quantize_weight", "compensate")
"""Those that backend torch runs in C++ on a CPU, where that could be compiled."""
GEMM = "w4a4_gemm"
NATIVE_CAPABILITIES = (100, 103, 120, 121)
"""Compute capabilities whose NVFP4 tensor cores Triton uses."""

EXACT_RESIDUAL = "QUADS_EXACT_RESIDUAL"

_demanded: str | None = None
_said: set[tuple[str, torch.device]] = set()


def set_backend(backend: str | None) -> None:
    """Demand a backend in this process; None: as QUADS_BACKEND says. What torch.compile has compiled already keeps its
    backend. Raises ValueError on an unknown name."""
    global _demanded
    _demanded = None if backend is None else _known(backend)


def can_run(
    backend: str,
    op: str,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    k: int | None = None,
    token_mask: bool = False,
) -> tuple[bool, str]:
    """Whether a backend runs an operator, and why (not).

    op: one of QUANTIZERS, or GEMM. dtype, k: of the weight or activation. token_mask: whether the residual's mask is
    chosen per token. Raises ValueError on an unknown backend or operator.
    """
    _known(backend)
    if op not in (*QUANTIZERS, GEMM):
        raise ValueError(f"unknown operator {op!r}; there are {', '.join((*QUANTIZERS, GEMM))}")
    if backend == "torch":
        return True, "runs everywhere"
    if k is not None and k % 16:
        return False, f"K={k} is not a multiple of 16"
    if token_mask:
        return False, "a mask per token is chosen in torch"
    from quads_kernels import launch

    if op != "dequantize_weight" and dtype not in launch.FLOATS:
        return False, f"the kernels take {', '.join(map(str, launch.FLOATS))}, not {dtype}"
    possible, reason = launch.can_launch(device)
    if not possible or backend == "emulated":
        return possible, reason
    found = launch.capability(device)
    if device.type == "cuda" and found not in NATIVE_CAPABILITIES:
        return False, f"sm_{found} has no NVFP4 tensor cores"
    if device.type != "cuda" and op == GEMM:
        return False, "Triton's interpreter decodes NVFP4 products wrongly"
    return True, reason


def choose(
    op: str,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    k: int | None = None,
    token_mask: bool = False,
    backend: str | None = None,
) -> str:
    """The backend that runs an operator; printed the first time on a device.

    backend: demand this one; None: what `set_backend` or QUADS_BACKEND demands, else the best. Other arguments as for
    `can_run`. Raises ValueError where the demanded one is unknown or cannot run, with the reason.
    """
    # torch.compile keeps the result as a constant, and K may be symbolic there: only whether it fits matters.
    whole_blocks = None if k is None or k % 16 == 0 else int(k)
    return _choose(op, device, dtype, whole_blocks, token_mask, backend)


@torch.compiler.assume_constant_result
def _choose(op, device, dtype, k, token_mask, backend) -> str:
    demanded = backend or _demanded or os.environ.get("QUADS_BACKEND") or "auto"
    chosen, reason = _decide(op, device, dtype, k, token_mask, demanded)
    if chosen == "torch" and device.type == "cpu":
        _say(op, device, _on_cpu(op, token_mask, reason))
    else:
        _say(op, device, f"{chosen} ({reason})")
    return chosen


def _on_cpu(op: str, token_mask: bool, reason: str) -> str:
    """What backend torch comes to for an operator on a CPU, and why."""
    if op not in COMPILED_ON_CPU or token_mask:
        return f"torch ({reason})"
    found = cpu_qdq.path()
    if found.name == "compiled":
        return f"compiled C++ (backend torch, {reason})"
    return f"torch ({reason}; not compiled: {found.reason})"


def _say(subject: str, device: torch.device, what: str) -> None:
    if (subject, device) not in _said:
        _said.add((subject, device))
        print(f"quads: {subject} on {device}: {what}", file=sys.stderr, flush=True)


@functools.cache
def _decide(op, device, dtype, k, token_mask, demanded: str) -> tuple[str, str]:
    if demanded != "auto":
        possible, reason = can_run(_known(demanded), op, device, dtype, k, token_mask)
        if not possible:
            raise ValueError(
                f"backend {demanded!r} is demanded (argument, set_backend or QUADS_BACKEND), and cannot run {op} on "
                f"{device}: {reason}. Leave the choice to the program (QUADS_BACKEND=auto), or take "
                f"{_best(op, device, dtype, k, token_mask)[0]!r}."
            )
        return demanded, f"demanded; {reason}"
    return _best(op, device, dtype, k, token_mask)


def _best(op, device, dtype, k, token_mask) -> tuple[str, str]:
    """The best backend, and the reason, which tells why no better one runs."""
    if device.type == "cpu":
        # The interpreter could run kernels here, but nobody wants that unless asked for.
        return "torch", "the choice on a CPU"
    refused = []
    for backend in reversed(BACKENDS):
        possible, reason = can_run(backend, op, device, dtype, k, token_mask)
        if possible:
            return backend, "; ".join((reason, *refused))
        refused.append(f"not {backend}: {reason}")
    raise AssertionError("torch runs everywhere")


def sums_residual(backend: str, device: torch.device, out_dtype: torch.dtype, demanded: bool | None = None) -> bool:
    """Whether a product adds activation and residual in FP16 and multiplies once, instead of multiplying twice.

    Chosen for backend emulated and 16-bit output: a sum is rounded by at most 2^-11 of itself, BF16 output by up to
    2^-8. FP32 output and QUADS_EXACT_RESIDUAL=1 get the exact form, two products. demanded: not None decides.
    Raises ValueError where it is demanded of another backend, and on a QUADS_EXACT_RESIDUAL other than 0 or 1.
    """
    if demanded and backend != "emulated":
        raise ValueError(
            f"sum_residual=True adds in FP16, which only backend emulated does; this product runs on {backend!r}. "
            "Leave sum_residual out"
        )
    if demanded is not None or backend != "emulated":
        return bool(demanded)
    exact = os.environ.get(EXACT_RESIDUAL, "0")
    if exact not in ("", "0", "1"):
        raise ValueError(f"{EXACT_RESIDUAL}={exact!r}; set it to 1 (multiply residuals apart), or leave it out")
    if exact == "1" or out_dtype == torch.float32:
        return False
    _say("residual", device, f"added in FP16 before one product ({EXACT_RESIDUAL}=1: two products)")
    return True


def takes_sums(
    backend: str, device: torch.device, residual: bool, out_dtype: torch.dtype, demanded: bool | None = None
) -> bool:
    """Whether a product takes activations as FP16 sums (`quads_kernels.gemm_sums`) instead of codes.

    With a residual as `sums_residual` says, arguments and errors too. Without one on backend emulated: sums of one
    term, which are exact.
    """
    return sums_residual(backend, device, out_dtype, demanded) if residual else backend == "emulated"


def describe(device: torch.device | str) -> str:
    """The path that NVFP4 takes on a device, for people: "cpu: torch emulated, quantized in compiled C++",
    "hopper: triton emulated", "blackwell: triton native".

    Raises ValueError where QUADS_BACKEND (or `set_backend`) demands what cannot run, and what `cpu_qdq.path` raises.
    """
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    chosen = _decide(GEMM, device, torch.bfloat16, None, False, _demanded or os.environ.get("QUADS_BACKEND") or "auto")
    if chosen[0] != "torch":
        return f"{_family(device)}: triton {chosen[0]}"
    compiled = device.type == "cpu" and cpu_qdq.path().name == "compiled"
    return f"{_family(device)}: torch emulated, quantized in {'compiled C++' if compiled else 'torch'}"


def _family(device: torch.device) -> str:
    if device.type != "cuda":
        return device.type
    from quads_kernels import launch

    found = launch.capability(device)
    names = {80: "ampere", 86: "ampere", 87: "ampere", 89: "ada", 90: "hopper"}
    return "blackwell" if found >= 100 else names.get(found, f"sm_{found}")


def _known(backend: str) -> str:
    if backend not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r} (QUADS_BACKEND); choose one of auto, {', '.join(BACKENDS)}")
    return backend
