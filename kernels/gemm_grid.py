"""Which tile of the output a program of a dense product computes."""

import triton
import triton.language as tl

GROUP = 8
"""Tiles of tokens that run side by side through the columns, so that they share weights in the L2 cache."""


@triton.jit
def tile_of_program(M, N: tl.constexpr, TM: tl.constexpr, TN: tl.constexpr, GROUP: tl.constexpr):
    """(rows m, columns n) of this program's tile: int32 [TM] and [TN], which may end outside the matrix."""
    tiles_n = tl.cdiv(N, TN)
    program = tl.program_id(0)
    first = program // (GROUP * tiles_n) * GROUP
    height = min(tl.cdiv(M, TM) - first, GROUP)
    m = (first + program % (GROUP * tiles_n) % height) * TM + tl.arange(0, TM)
    n = program % (GROUP * tiles_n) // height * TN + tl.arange(0, TN)
    return m, n
