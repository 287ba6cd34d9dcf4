"""The fast path of NVFP4 on a CPU: cpu_qdq.cpp, compiled for this machine at first use (1 to 2 s, then cached on disk).

Results equal the definition in nvfp4.py in every bit, checked whenever the library is loaded. Without a C++ compiler
the definition itself runs, in torch, many times slower; that is said once, and `path()` tells which of the two it is.
The environment variable QUADS_CPU_QDQ chooses: `auto` (default), `compiled` (an error if impossible), `torch`.
"""

import ctypes
import functools
import logging
import os
from collections.abc import Sequence
from typing import NamedTuple

import torch

from quads_ops import cpu_build
from quads_ops.formats import BLOCK_SIZE

logger = logging.getLogger(__name__)

CHOICES = ("auto", "compiled", "torch")
KEEP_NONE, KEEP_ALL, KEEP_BLOCKS, KEEP_CHANNELS = range(4)
_ELEMENTS_PER_THREAD = 1 << 15  # about 12 us of work; less does not pay for waking a thread

_pointer, _int, _long = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
_SIGNATURES = {
    "quads_qdq": [_pointer, _int, _pointer, _int, _pointer, _long, _long, _int],
    "quads_quantize": [_pointer, _int, _pointer, _pointer, _pointer, _long, _long, _int],
    "quads_amax": [_pointer, _int, _pointer, _long, _long, _int],
    "quads_compensate": [_pointer, _int, _pointer, _int, _pointer, _pointer, _long, _pointer, _long, _long, _int],
    "quads_digest": [_pointer, _pointer, _pointer, _pointer, _long, _long, _long, _long, _long, _long],
}


class Path(NamedTuple):
    """Which implementation runs on the CPU."""

    name: str
    """`compiled` or `torch`"""
    reason: str
    """The compiler and the library, or why there is none."""


def path() -> Path:
    """Which implementation quantizes CPU tensors in this process. Builds the library if need be.

    Raises ValueError on an unknown QUADS_CPU_QDQ, BuildError where it is `compiled` and the library can't be built.
    """
    return _load()[1]


def takes(x: torch.Tensor) -> bool:
    """Whether the compiled path handles `x`: a plain CPU tensor, and outside of torch.compile, which traces torch."""
    if x.device.type != "cpu" or type(x) not in (torch.Tensor, torch.nn.Parameter) or torch.compiler.is_compiling():
        return False
    return _load()[0] is not None


def qdq(x: torch.Tensor, g: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """`nvfp4.qdq(x, g)`, rounded to `dtype`. x: [..., K], K a multiple of 16; g: FP32 of shape x.shape[:-1].

    A BF16 result from FP32 input, or the other way round, is rounded once.
    """
    x = _source(x)
    direct = dtype in (torch.float32, torch.bfloat16)
    out = torch.empty(x.shape, dtype=dtype if direct else torch.float32)
    rows, k = _rows(x)
    g = g.contiguous()
    _load()[0].quads_qdq(
        x.data_ptr(), _is_bf16(x), out.data_ptr(), _is_bf16(out), g.data_ptr(), rows, k, _threads(rows * k)
    )
    return out if direct else out.to(dtype)


def quantize_packed(x: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed codes, uint8 [..., K/2], and block scales, uint8 [..., K/16]. Arguments as for `qdq`."""
    x = _source(x)
    rows, k = _rows(x)
    g = g.contiguous()
    packed = torch.empty((*x.shape[:-1], k // 2), dtype=torch.uint8)
    scales = torch.empty((*x.shape[:-1], k // BLOCK_SIZE), dtype=torch.uint8)
    _load()[0].quads_quantize(
        x.data_ptr(), _is_bf16(x), packed.data_ptr(), scales.data_ptr(), g.data_ptr(), rows, k, _threads(rows * k)
    )
    return packed, scales


def amax(x: torch.Tensor) -> torch.Tensor:
    """Largest magnitude over the last dimension, FP32: [..., n] -> [...]. NaN propagates."""
    x = _source(x)
    rows, n = _rows(x)
    out = torch.empty(x.shape[:-1], dtype=torch.float32)
    _load()[0].quads_amax(x.data_ptr(), _is_bf16(x), out.data_ptr(), rows, n, _threads(n))
    return out


def compensate(
    x: torch.Tensor,
    keep_kind: int,
    keep: torch.Tensor | None = None,
    stats: torch.Tensor | None = None,
    counts: Sequence[int] | None = None,
) -> torch.Tensor:
    """`residual.compensate` of [M, K], each token with its own scale: FP32 [M, K].

    keep: bool [K/16] for KEEP_BLOCKS, [K] for KEEP_CHANNELS; with counts, [groups, K/16] or [groups, K].
    stats: FP32 [K/16] or [K], or one for each group; the sums of r^2 are added in place.
    counts: rows of each group, in order; they add up to M. Shapes are the caller's business.
    """
    x = _source(x)
    rows, k = _rows(x)
    out = torch.empty(x.shape, dtype=torch.float32)
    keep = keep.contiguous() if keep is not None else None
    sums = stats.contiguous() if stats is not None else None
    counts = (rows,) if counts is None else counts
    failed = _load()[0].quads_compensate(
        x.data_ptr(),
        _is_bf16(x),
        out.data_ptr(),
        keep_kind,
        None if keep is None else keep.data_ptr(),
        None if sums is None else sums.data_ptr(),
        0 if sums is None else sums.shape[-1],
        (_long * len(counts))(*counts),
        len(counts),
        k,
        _threads(rows * k),
    )
    if failed:
        raise MemoryError(f"residual statistics of {rows} tokens with K={k}")
    if sums is not stats:
        stats.copy_(sums)
    return out


def digest(
    packed: torch.Tensor, block_scales: torch.Tensor, row0: int, block0: int, full_blocks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`receipt.digest` of [..., N, K/2] and [..., N, K/16], which lie at (row0, block0) of full_blocks blocks a row."""
    packed, block_scales = packed.contiguous(), block_scales.contiguous()
    codes, scales = (torch.empty(packed.shape[:-2], dtype=torch.int64) for _ in range(2))
    _load()[0].quads_digest(
        packed.data_ptr(),
        block_scales.data_ptr(),
        codes.data_ptr(),
        scales.data_ptr(),
        codes.numel(),
        *block_scales.shape[-2:],
        row0,
        block0,
        full_blocks,
    )
    return codes, scales


def _source(x: torch.Tensor) -> torch.Tensor:
    return (x if x.dtype in (torch.float32, torch.bfloat16) else x.float()).contiguous()


def _is_bf16(x: torch.Tensor) -> bool:
    return x.dtype == torch.bfloat16


def _rows(x: torch.Tensor) -> tuple[int, int]:
    k = x.shape[-1]
    return (x.numel() // k if k else 0), k


def _threads(elements: int) -> int:
    return max(1, min(torch.get_num_threads(), elements // _ELEMENTS_PER_THREAD))


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, Path]:
    choice = os.environ.get("QUADS_CPU_QDQ", "auto")
    if choice not in CHOICES:
        raise ValueError(f"QUADS_CPU_QDQ={choice!r}; choose one of {', '.join(CHOICES)}")
    if choice == "torch":
        return None, Path("torch", "QUADS_CPU_QDQ=torch")
    try:
        library, origin = cpu_build.build()
        for name, signature in _SIGNATURES.items():
            getattr(library, name).argtypes = signature
        _verify(library)
        return library, Path("compiled", origin)
    except cpu_build.BuildError as error:
        if choice == "compiled":
            raise
        logger.warning("NVFP4 runs in torch on this CPU, many times slower than compiled: %s", error)
        return None, Path("torch", str(error))


def _verify(library: ctypes.CDLL) -> None:
    """Raise BuildError unless the library equals the definition on numbers of every kind (about 6 ms)."""
    from quads_ops import nvfp4  # not above: nvfp4 imports this module

    rows, k = 8, 1328  # a tile of cpu_qdq.cpp, a vector of scales of the next, and a part of another
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-(2**31), 2**31, (rows, k), generator=generator).int().view(torch.float32)
    x[::2] = torch.randn(rows // 2, k, generator=generator) * 2.0 ** torch.arange(-40, 40, 20).unsqueeze(-1)
    for source in (x, x.bfloat16()):
        g = nvfp4.global_scale_dec(source.nan_to_num(0.0, 0.0, 0.0).abs().amax(-1))
        expected = nvfp4.reference_qdq(source, g)
        for out in (torch.empty_like(expected), torch.empty_like(expected, dtype=torch.bfloat16)):
            library.quads_qdq(
                source.data_ptr(), _is_bf16(source), out.data_ptr(), _is_bf16(out), g.data_ptr(), rows, k, 1
            )
            if not torch.equal(out.nan_to_num(7.0), expected.to(out.dtype).nan_to_num(7.0)):
                raise cpu_build.BuildError(
                    "the compiled library does not equal the definition of NVFP4 on this machine; please report the "
                    "compiler and processor, and set QUADS_CPU_QDQ=torch meanwhile"
                )
