"""Values of a checkpoint's tensors, read from safetensors files piece by piece: little memory, at the disk's pace."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

PIECE = 1 << 23
"""Values that are read at once."""


@dataclass(frozen=True)
class StoredTensor:
    """Where the values of a tensor lie."""

    file: Path
    dtype: torch.dtype
    count: int
    """Values."""
    offset: int
    """Bytes from the beginning of the file."""


def stored_tensors(file: Path) -> dict[str, StoredTensor]:
    """All tensors of a file by name, in the order of their bytes. The file is one that safetensors can open."""
    from transformers.modeling_utils import str_to_torch_dtype

    with open(file, "rb") as data:
        (length,) = struct.unpack("<Q", data.read(8))
        header = json.loads(data.read(length))
    found = {}
    for name, about in header.items():
        if name != "__metadata__":
            dtype, (first, end) = str_to_torch_dtype[about["dtype"]], about["data_offsets"]
            found[name] = StoredTensor(file, dtype, (end - first) // dtype.itemsize, 8 + length + first)
    return dict(sorted(found.items(), key=lambda item: item[1].offset))


def pieces(tensor: StoredTensor) -> Iterator[torch.Tensor]:
    """Its values, [<= PIECE] at a time. A piece is overwritten by the next.

    Raises:
        OSError: the file can't be read, or has become shorter.
    """
    buffer = bytearray(min(PIECE, tensor.count) * tensor.dtype.itemsize)
    with open(tensor.file, "rb") as data:
        data.seek(tensor.offset)
        for first in range(0, tensor.count, PIECE):
            count = min(PIECE, tensor.count - first)
            view = memoryview(buffer)[: count * tensor.dtype.itemsize]
            if data.readinto(view) != len(view):
                raise OSError(f"{tensor.file} has become shorter")
            yield torch.frombuffer(view, dtype=tensor.dtype)


def not_finite(tensor: StoredTensor, dtype: torch.dtype) -> bool:
    """Whether a value is NaN or infinite, or becomes so when it is rounded to `dtype`. Integers never are."""
    if not tensor.dtype.is_floating_point:
        return False
    for piece in pieces(tensor):
        # NaN propagates through both, and rounding keeps the order. There is no minimum of FP8.
        ends = torch.stack((piece if piece.dtype.itemsize > 1 else piece.float()).aminmax())
        if not ends.to(dtype).isfinite().all():
            return True
    return False


def equal(a: StoredTensor, b: StoredTensor) -> bool:
    """Whether both hold the same values; NaN equals NaN."""
    if a.count != b.count:
        return False
    for here, there in zip(pieces(a), pieces(b), strict=True):
        if a.dtype == b.dtype and torch.equal(here.view(torch.uint8), there.view(torch.uint8)):
            continue  # the usual case, and quicker
        here, there = here.double(), there.double()
        if not ((here == there) | (here.isnan() & there.isnan())).all():
            return False
    return True
