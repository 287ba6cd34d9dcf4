"""Which part of which matrix a rollout worker holds.

vLLM joins matrices (q, k, v; gate, up) and cuts them over the tensor parallel group, along N or along K. Receipts and
global scales belong to whole matrices, so every weight comes with the list of its shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quads_ops.formats import BLOCK_SIZE
from quads_ops.vllm_method import names


@dataclass(frozen=True)
class Shard:
    """This worker's part of one matrix."""

    name: str
    """Canonical name of the matrix."""
    rows: slice
    """Where it lies in the worker's joined weight [N, K]."""
    expert: int | None
    """Index in the worker's stack of experts, None for a linear layer."""
    row0: int
    col0: int
    """Where it begins in the whole matrix, in elements."""
    columns: int
    """This worker's K."""
    full_shape: tuple[int, int]
    """[N, K] of the whole matrix."""
    counted: bool = True
    """False for a copy of what another worker holds too, so that sums over workers count it once."""

    @property
    def whole(self) -> bool:
        return self.full_shape == (self.rows.stop - self.rows.start, self.columns)


def linear_shards(
    layer: torch.nn.Module,
    matrices: Sequence[str],
    sizes: Sequence[int],
    input_size_per_partition: int,
    input_size: int,
    output_size: int,
    worker: int,
) -> list[Shard]:
    """Shards of a vLLM linear layer.

    matrices, sizes: names and this worker's N of each matrix, in the order of rows. worker: rank in the tensor
    parallel group. Replicated layers are counted on worker 0 alone.
    """
    rank, parallel = layer.tp_rank, layer.tp_size
    split_k = input_size_per_partition < input_size
    split_n = sum(sizes) < output_size
    heads = _kv_replicas(layer)
    shards, start = [], 0
    for index, (name, size) in enumerate(zip(matrices, sizes, strict=True)):
        copies = heads if index > 0 else 1
        full_n = size * parallel // copies if split_n else size
        shards.append(
            Shard(
                name=name,
                rows=slice(start, start + size),
                expert=None,
                row0=(rank // copies) * size if split_n else 0,
                col0=rank * input_size_per_partition if split_k else 0,
                columns=input_size_per_partition,
                full_shape=(full_n, input_size),
                counted=rank % copies == 0 if split_n or split_k else worker == 0,
            )
        )
        start += size
    return shards


def expert_shards(
    module: str, experts: Sequence[int], hidden_size: int, intermediate: int, rank: int, parallel: int
) -> tuple[list[Shard], list[Shard]]:
    """Shards of the two weights of fused experts: gate and up joined, and down.

    experts: global index of each local expert. intermediate: this worker's part of the intermediate size.
    rank, parallel: of the tensor parallelism inside an expert (1 under expert parallelism).
    """
    gate_up, down = [], []
    full = intermediate * parallel
    for local, expert in enumerate(experts):
        gate_name, up_name, down_name = names.expert_matrices(module, expert)
        for name, rows in (
            (gate_name, slice(0, intermediate)),
            (up_name, slice(intermediate, 2 * intermediate)),
        ):
            gate_up.append(Shard(name, rows, local, rank * intermediate, 0, hidden_size, (full, hidden_size)))
        rows, col0 = slice(0, hidden_size), rank * intermediate
        down.append(Shard(down_name, rows, local, 0, col0, intermediate, (hidden_size, full)))
    return gate_up, down


def check_k(module: str, size: int, parallel: int) -> None:
    """Raise ValueError where this worker's part of K does not consist of whole blocks."""
    if size % BLOCK_SIZE:
        raise ValueError(
            f"quads_nvfp4: {module} has K = {size} on each worker with tensor parallel size {parallel}, not a multiple "
            f"of {BLOCK_SIZE}, the NVFP4 block size. Choose a tensor parallel size that cuts K = {size * parallel} "
            f"into multiples of {BLOCK_SIZE}, or leave {module} out with quads.exclude"
        )


def _kv_replicas(layer: torch.nn.Module) -> int:
    """How many workers hold the same key and value heads (1 unless there are more workers than such heads)."""
    return getattr(layer, "num_kv_head_replicas", 1)
