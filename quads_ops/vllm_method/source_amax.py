"""The amax of whole matrices, whatever part of them this worker loads.

While the trainer sends weights, every worker sees whole matrices go by, so it takes their amax from the stream. That
needs no collective in the middle of a load: a worker that fails there would leave the others waiting. In a plain load
(start-up, vLLM's own reload) there is no such stream, and the workers reduce their shards' amax over the group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from quads_ops.vllm_method.shards import Shard

_stream: dict[str, torch.Tensor] | None = None


@contextmanager
def amaxes_of_stream(amaxes: dict[str, torch.Tensor]) -> Iterator[None]:
    """Within it, `from_stream` answers from `amaxes` (matrix name -> amax of the whole matrix, filled as it goes)."""
    global _stream
    if _stream is not None:
        raise RuntimeError("a weight update is already in progress in this worker")
    _stream = amaxes
    try:
        yield
    finally:
        _stream = None


def streaming() -> bool:
    """True while a weight update from the trainer is loading layers."""
    return _stream is not None


def from_stream(shards: Sequence[Shard]) -> list[torch.Tensor]:
    """What the stream observed for each shard's matrix.

    Raises:
        KeyError: a matrix that was not sent; a complete layer without all its matrices is a defect.
    """
    assert _stream is not None, "no weight update in progress"
    return [_stream[shard.name] for shard in shards]
