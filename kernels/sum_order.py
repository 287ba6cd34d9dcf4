"""The order in which FP16 sums of activation and residual lie in memory, for `quads_kernels.gemm_sums`.

A word of eight E2M1 codes is expanded two codes at a time, those at k and k + 4, and the tensor core wants a thread's
two values side by side. So K is permuted within each pair of blocks, which is 32 channels or, at the end of an odd
number of blocks, 16. With a pair's channels numbered block * 16 + four * 4 + q, they lie in the order of
q * 8 + block * 4 + four (in a single block q * 4 + four): the four channels of each q that a block has stay together.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def sum_columns(blocks, K):
    """Numbers of blocks, int32 [B] -> (begin, step), int32 [B]: channel 4 * four + q of a block lies in column
    begin + q * step + four. K: of the row."""
    single = (blocks == K // 16 - 1) & (blocks % 2 == 0)
    # No select: Triton must see that both are multiples of four.
    return blocks // 2 * 32 + blocks % 2 * 4, 8 - 4 * single.to(tl.int32)


def in_sum_order(x: torch.Tensor) -> torch.Tensor:
    """[M, K] in the order of channels -> the same values in the order of sums, contiguous. K: a multiple of 16."""
    m, k = x.shape
    whole = k // 32 * 32
    pairs = x[:, :whole].reshape(m, whole // 32, 2, 4, 4).permute(0, 1, 4, 2, 3).reshape(m, whole)
    if k == whole:
        return pairs.contiguous()
    single = x[:, whole:].reshape(m, (k - whole) // 16, 4, 4).transpose(2, 3).reshape(m, k - whole)
    return torch.cat([pairs, single], dim=1)
