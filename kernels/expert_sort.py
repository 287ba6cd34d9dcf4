"""Sort (token, expert) pairs by expert on the device, and cut them into blocks of one expert each.

Everything has a size that the host knows, and nothing is read back, so a CUDA graph can capture it. Pair p is token
p // topk. Sorting is stable and uses no atomics. Pairs whose expert is not on this rank are left out.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from quads_kernels import launch

BLOCKS_PER_PROGRAM = 64


class SortedPairs(NamedTuple):
    """Pairs of this rank's E experts, sorted; L of the P pairs are, and L is known to the device alone."""

    members: torch.Tensor
    """int32 [P]: the pair in each sorted row; undefined from row L on."""
    place: torch.Tensor
    """int32 [P]: the sorted row of each pair, -1 for a pair left out."""
    offsets: torch.Tensor
    """int32 [E + 1]: expert e has the sorted rows offsets[e] .. offsets[e + 1]; the last entry is L."""
    block_expert: torch.Tensor
    """int32 [blocks]: the expert of each block of rows, -1 for a block not needed."""
    block_row: torch.Tensor
    """int32 [blocks]: its first sorted row."""


@triton.jit
def local_experts(ids_ptr, map_ptr, pair, P, GLOBAL, E):
    """This rank's expert of each pair, or -1."""
    expert = tl.load(ids_ptr + pair, mask=pair < P, other=-1).to(tl.int32)
    if map_ptr is not None:
        known = (expert >= 0) & (expert < GLOBAL)
        expert = tl.load(map_ptr + expert, mask=known, other=-1).to(tl.int32)
    return tl.where((expert >= 0) & (expert < E), expert, -1)


@triton.jit(do_not_specialize=["P"])
def count_kernel(ids_ptr, map_ptr, counts_ptr, P, GLOBAL, E, CHUNK: tl.constexpr, EP: tl.constexpr):
    """counts[chunk, e]: pairs of expert e in a chunk. Grid (chunks,)."""
    pair = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    expert = local_experts(ids_ptr, map_ptr, pair, P, GLOBAL, E)
    hit = (expert[:, None] == tl.arange(0, EP)[None, :]).to(tl.int32)
    tl.store(counts_ptr + tl.program_id(0) * EP + tl.arange(0, EP), tl.sum(hit, 0))


@triton.jit(do_not_specialize=["CHUNKS"])
def sum_chunks_kernel(counts_ptr, totals_ptr, CHUNKS, EP: tl.constexpr, EB: tl.constexpr, CB: tl.constexpr):
    """counts becomes the count in all earlier chunks, totals[e] the count in all. Grid (EP / EB,)."""
    expert = tl.program_id(0) * EB + tl.arange(0, EB)
    total = tl.zeros((EB,), tl.int32)
    for first in range(0, CHUNKS, CB):
        chunk = first + tl.arange(0, CB)
        at = counts_ptr + chunk[:, None] * EP + expert[None, :]
        ok = tl.broadcast_to((chunk < CHUNKS)[:, None], (CB, EB))
        count = tl.load(at, mask=ok, other=0)
        tl.store(at, tl.cumsum(count, 0) - count + total[None, :], mask=ok)
        total += tl.sum(count, 0)
    tl.store(totals_ptr + expert, total)


@triton.jit(do_not_specialize=["P", "BLOCKS"])
def place_kernel(
    ids_ptr,
    map_ptr,
    before_ptr,
    totals_ptr,
    members_ptr,
    place_ptr,
    offsets_ptr,
    block_expert_ptr,
    block_row_ptr,
    P,
    GLOBAL,
    E,
    BLOCKS,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    EP: tl.constexpr,
    BLOCKS_HERE: tl.constexpr,
):
    """Place a chunk of pairs, and describe a share of the blocks. Grid (at least chunks, and blocks / BLOCKS_HERE).

    With totals None there is a single chunk, and every program counts it.
    """
    program = tl.program_id(0)
    e = tl.arange(0, EP)
    pair = program * CHUNK + tl.arange(0, CHUNK)
    if totals_ptr is None:
        pair = tl.arange(0, CHUNK)
    expert = local_experts(ids_ptr, map_ptr, pair, P, GLOBAL, E)
    hit = (expert[:, None] == e[None, :]).to(tl.int32)
    if totals_ptr is None:
        total = tl.sum(hit, 0)
        start = tl.cumsum(total, 0) - total
        base = start
    else:
        total = tl.load(totals_ptr + e)
        start = tl.cumsum(total, 0) - total
        base = start + tl.load(before_ptr + program * EP + e, mask=program * CHUNK + e * 0 < P, other=0)
    if program == 0:
        tl.store(offsets_ptr, 0)
        tl.store(offsets_ptr + 1 + e, start + total, mask=e < E)
    if (totals_ptr is not None) | (program == 0):
        row = tl.sum(hit * (tl.cumsum(hit, 0) - hit + base[None, :]), 1)
        tl.store(members_ptr + row, pair, mask=expert >= 0)
        tl.store(place_ptr + pair, tl.where(expert >= 0, row, -1), mask=pair < P)
    describe_blocks(block_expert_ptr, block_row_ptr, program, total, start, BLOCKS, BLOCK, EP, BLOCKS_HERE)


@triton.jit
def describe_blocks(
    block_expert_ptr,
    block_row_ptr,
    program,
    total,
    start,
    BLOCKS,
    BLOCK: tl.constexpr,
    EP: tl.constexpr,
    BLOCKS_HERE: tl.constexpr,
):
    """Expert and first row of this program's share of the blocks: each expert has cdiv(total, BLOCK) of them."""
    mine = tl.cdiv(total, BLOCK)
    after = tl.cumsum(mine, 0)
    block = program * BLOCKS_HERE + tl.arange(0, BLOCKS_HERE)
    expert = tl.sum((after[None, :] <= block[:, None]).to(tl.int32), 1)
    own = (expert[:, None] == tl.arange(0, EP)[None, :]).to(tl.int32)
    row = tl.sum(own * (start[None, :] + (block[:, None] - (after - mine)[None, :]) * BLOCK), 1)
    ok = block < BLOCKS
    tl.store(block_expert_ptr + block, tl.where(expert < EP, expert, -1), mask=ok)
    tl.store(block_row_ptr + block, row, mask=ok)


def sort_by_expert(
    topk_ids: torch.Tensor, experts: int, block: int, expert_map: torch.Tensor | None = None
) -> SortedPairs:
    """Sort the pairs of topk_ids by expert.

    topk_ids: int32 or int64 [M, topk]; an id below 0 is left out.
    experts: E, experts on this rank. block: rows in a block.
    expert_map: int32 [global experts], the number on this rank of each expert, or -1; None: ids are local already.
    Raises ValueError on a wrong dtype, device or shape.
    """
    device = topk_ids.device
    integers = (torch.int32, torch.int64)
    launch.require_tensor("topk_ids", topk_ids, integers, device, (None, None))
    topk_ids = topk_ids.contiguous()
    if expert_map is not None:
        launch.require_tensor("expert_map", expert_map, integers, device, (None,))
        expert_map = expert_map.contiguous()
    pairs, width = topk_ids.numel(), triton.next_power_of_2(experts)
    chunk = min(max(16, 2**14 // width), 128)
    chunks, blocks = triton.cdiv(pairs, chunk), most_blocks(pairs, experts, block)
    plan = SortedPairs(
        *(launch.empty((size,), torch.int32, device) for size in (pairs, pairs, experts + 1, blocks, blocks))
    )
    if not pairs:
        plan.offsets.zero_()
        return plan
    sizes = (pairs, 0 if expert_map is None else expert_map.numel(), experts)
    counts = totals = None
    if chunks > 1:
        counts, totals = launch.empty((chunks, width), torch.int32, device), launch.empty((width,), torch.int32, device)
        tile = dict(CHUNK=chunk, EP=width, num_warps=4)
        launch.start(count_kernel, (chunks,), device, topk_ids, expert_map, counts, *sizes, **tile)
        columns = min(width, 32)
        tile = dict(EP=width, EB=columns, CB=64, num_warps=4)
        launch.start(sum_chunks_kernel, (width // columns,), device, counts, totals, chunks, **tile)
    launch.start(
        place_kernel,
        (max(chunks, triton.cdiv(blocks, BLOCKS_PER_PROGRAM)),),
        device,
        topk_ids, expert_map, counts, totals, *plan, *sizes, blocks,
        BLOCK=block, CHUNK=chunk, EP=width, BLOCKS_HERE=BLOCKS_PER_PROGRAM, num_warps=4,
    )  # fmt: skip
    return plan


def most_blocks(pairs: int, experts: int, block: int) -> int:
    """The most blocks that any routing of this many pairs can need: every expert may end in a part of a block."""
    used = min(pairs, experts)
    return (pairs + used * (block - 1)) // block
