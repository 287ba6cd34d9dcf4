"""Residual compensation: what is quantized twice, masks, statistics, and independence of the batch."""

import pytest
import torch
from support_tensors import ODD_INPUTS, ODD_SHAPES, assert_same_bits

from quads_ops import cpu_qdq, nvfp4, residual
from quads_ops.residual import (
    ResidualMask,
    TokenMask,
    compensate,
    compensate_grouped,
    reference_compensate,
    residual_statistics,
    select_mask,
    token_scale,
)


@pytest.fixture(params=["compiled", "torch"])
def _path(request, monkeypatch):
    """Every test runs on both CPU paths."""
    if request.param == "torch":
        monkeypatch.setattr(cpu_qdq, "takes", lambda x: False)
    elif cpu_qdq.path().name != "compiled":
        pytest.skip(f"no compiled path: {cpu_qdq.path().reason}")


pytestmark = pytest.mark.usefixtures("_path")


def passes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(Xq, the residual, Rq), straight from the definition."""
    x = x.float()
    g = token_scale(x)
    first = nvfp4.reference_qdq(x, g)
    return first, x - first, nvfp4.reference_qdq(x - first, g)


def relative_error(x: torch.Tensor, kept) -> float:
    return float((compensate(x, "w4a4", kept) - x).norm() / x.norm())


@pytest.mark.parametrize("name", ODD_INPUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sum_of_two_passes_where_the_mask_is(name, dtype):
    for m, k in ODD_SHAPES:
        x = ODD_INPUTS[name](m, k).to(dtype)
        first, rest, second = passes(x)
        blocks, channels = torch.rand(k // 16) < 0.5, torch.rand(k) < 0.5
        assert_same_bits(compensate(x, "w4a4"), first)
        assert_same_bits(compensate(x, "w4a4", "all"), first + second)
        wide = blocks.repeat_interleave(16)
        by_block = compensate(x, "w4a4", ResidualMask(blocks=blocks))
        assert_same_bits(by_block, torch.where(wide, first + second, first + 0.0))
        kept = nvfp4.reference_qdq(torch.where(channels, rest, 0.0), token_scale(x.float()))
        assert_same_bits(compensate(x, "w4a4", ResidualMask(channels=channels)), first + kept)


@pytest.mark.parametrize(
    "kept", [None, "all", "block", "channel", TokenMask(0.25), TokenMask(0.25, "channel")], ids=str
)
def test_statistics_ride_along_and_add_up(kept):
    x = torch.randn(70, 96)
    if kept in ("block", "channel"):
        kept = select_mask(torch.rand(6 if kept == "block" else 96), 0.5, kept)
    squares = (x - nvfp4.reference_qdq(x, token_scale(x))).double().square().sum(0)
    for size, expected in ((96, squares), (6, squares.reshape(6, 16).sum(-1))):
        stats = torch.zeros(size)
        out = compensate(x[:30], "w4a4", kept, stats=stats)
        assert_same_bits(out, compensate(x[:30], "w4a4", kept))
        compensate(x[30:], "w4a4", kept, stats=stats)
        torch.testing.assert_close(stats, expected.float(), rtol=1e-5, atol=0)


def test_statistics_do_not_depend_on_the_number_of_threads():
    x = torch.randn(500, 512)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(residual_statistics(x))
    finally:
        torch.set_num_threads(before)
    if cpu_qdq.takes(x):
        assert_same_bits(*found)
    torch.testing.assert_close(*found)


def test_statistics_skip_non_finite_tokens_and_keep_infinite_energy():
    x = torch.randn(8, 32)
    clean = residual_statistics(x[[0, 2, 3, 4, 6, 7]])
    x[1, 3], x[5, 30] = torch.nan, torch.inf
    torch.testing.assert_close(residual_statistics(x), clean)
    x[0] = torch.randn(32) * 1e25
    overflowed = residual_statistics(x, "channel")
    assert overflowed.isinf().any() and not overflowed.isnan().any()
    with pytest.raises(ValueError, match="non-finite"):
        select_mask(overflowed, 0.5, "channel")


def test_a_token_does_not_depend_on_its_neighbours():
    x = torch.randn(40, 256)
    mask = select_mask(residual_statistics(x), 0.5)
    for kept in (None, "all", mask, TokenMask(0.5)):
        together = compensate(x, "w4a4", kept)
        x2 = x.clone()
        x2[1:] *= 1000
        assert_same_bits(compensate(x2, "w4a4", kept)[:1], together[:1])
        assert_same_bits(compensate(x[7:8], "w4a4", kept), together[7:8])


def test_error_falls_with_the_ratio_and_a_token_mask_beats_a_frozen_one():
    torch.manual_seed(5)
    x = torch.randn(256, 512) * torch.exp(torch.randn(512))
    score = residual_statistics(x)
    errors = [relative_error(x, select_mask(score, ratio)) for ratio in (0.0, 0.25, 0.5, 0.75, 1.0)]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] == relative_error(x, None) and errors[4] == relative_error(x, "all")
    assert errors[4] < 0.1 * errors[0]
    assert relative_error(x, TokenMask(0.5)) < errors[2] < relative_error(x, select_mask(-score, 0.5))


def test_select_mask_takes_the_largest_and_breaks_ties_by_lower_index():
    score = torch.tensor([3.0, 1.0, 3.0, 0.0, 3.0, 2.0])
    assert select_mask(score, 2 / 6).blocks.tolist() == [True, False, True, False, False, False]
    assert select_mask(score, 4 / 6).blocks.tolist() == [True, False, True, False, True, True]
    assert select_mask(torch.zeros(1000), 0.5).blocks.nonzero().flatten().tolist() == list(range(500))


@pytest.mark.parametrize("ratio, count", [(0.0, 0), (0.001, 1), (0.124, 1), (0.25, 2), (0.3, 2), (0.5, 4), (1.0, 8)])
def test_select_mask_counts(ratio, count):
    assert int(select_mask(torch.rand(8), ratio, "channel").channels.sum()) == count


def test_token_mask_keeps_the_blocks_of_largest_residual_of_each_token():
    x = torch.randn(9, 128)
    first, rest, second = passes(x)
    energy = rest.reshape(9, 8, 16).square().sum(-1)
    keep = torch.zeros(9, 8, dtype=torch.bool).scatter_(1, energy.topk(2).indices, True).repeat_interleave(16, 1)
    assert_same_bits(compensate(x, "w4a4", TokenMask(0.25)), torch.where(keep, first + second, first + 0.0))
    by_channel = torch.zeros(9, 128, dtype=torch.bool).scatter_(1, rest.abs().topk(32).indices, True)
    kept = nvfp4.reference_qdq(torch.where(by_channel, rest, 0.0), token_scale(x))
    assert_same_bits(compensate(x, "w4a4", TokenMask(0.25, "channel")), first + kept)


def test_the_default_dtype_does_not_matter():
    """vLLM sets it to BF16 while a model is built."""
    x = torch.randn(20, 96)
    expected = [compensate(x, "w4a4", TokenMask(0.5)), residual_statistics(x), token_scale(x)]
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = [compensate(x, "w4a4", TokenMask(0.5)), residual_statistics(x), token_scale(x)]
    finally:
        torch.set_default_dtype(torch.float32)
    for a, b in zip(found, expected, strict=True):
        assert_same_bits(a, b)


def test_w4a16_leaves_activations_alone():
    x = torch.randn(3, 32).bfloat16()
    assert_same_bits(compensate(x, "w4a16", "all"), x.float())


@pytest.mark.parametrize("size", [4, 64])
def test_groups_equal_one_call_for_each(size):
    counts = [5, 0, 1, 40, 0, 17]
    x = torch.randn(sum(counts), 64)
    keep = torch.rand(len(counts), size) < 0.5
    stats, expected = torch.ones(len(counts), size), torch.ones(len(counts), size)
    out = compensate_grouped(x, counts, keep, stats=stats)
    assert_same_bits(out, compensate_grouped(x, counts, keep))
    for group, rows in enumerate(x.split(counts)):
        mask = ResidualMask(blocks=keep[group]) if size == 4 else ResidualMask(channels=keep[group])
        assert_same_bits(out.split(counts)[group], reference_compensate(rows, mask, stats=expected[group]))
    torch.testing.assert_close(stats, expected)
    assert (stats[1] == 1).all() and (stats[3] != 1).any()


def test_no_tokens():
    stats = torch.zeros(2)
    assert compensate(torch.empty(0, 32), "w4a4", "all", stats=stats).shape == (0, 32)
    assert compensate_grouped(torch.empty(0, 32), [0, 0], torch.ones(2, 2, dtype=torch.bool)).shape == (0, 32)
    assert (stats == 0).all()


X = torch.ones(4, 32)
TRUE = torch.ones(2, dtype=torch.bool)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: compensate(X, "fp8"), "mode 'fp8'.*w4a16"),
        (lambda: compensate(X[0], "w4a4"), r"\[M, K\], got \(32,\)"),
        (lambda: compensate(torch.ones(4, 24), "w4a4"), r"\(4, 24\)"),
        (lambda: compensate(X, "w4a4", "some"), "got 'some'"),
        (lambda: compensate(X, "w4a4", 0.5), "got 0.5"),
        (lambda: compensate(X, "w4a4", ResidualMask(blocks=TRUE.repeat(2))), "4 entries; activations of K=32 need 2"),
        (lambda: compensate(X, "w4a4", stats=torch.zeros(3)), r"\[2\] or \[32\]"),
        (lambda: compensate(X, "w4a4", stats=torch.zeros(2).double()), "float64"),
        (lambda: compensate_grouped(X, [4], TRUE), r"\[1, 2\] or \[1, 32\]"),
        (lambda: compensate_grouped(X, [3], TRUE[None]), "do not add up to the 4 rows"),
        (lambda: compensate_grouped(X, [5, -1], TRUE.expand(2, 2)), "do not add up"),
        (lambda: compensate_grouped(X, [4], TRUE[None], stats=torch.zeros(1, 32)), "shape of keep"),
        (lambda: ResidualMask(), "either blocks"),
        (lambda: ResidualMask(blocks=TRUE, channels=TRUE), "either blocks"),
        (lambda: ResidualMask(blocks=TRUE.float()), "bool tensor, got torch.float32"),
        (lambda: TokenMask(1.5), "1.5"),
        (lambda: TokenMask(0.5, "row"), "'row'"),
        (lambda: select_mask(torch.ones(4), -0.1), "-0.1"),
        (lambda: select_mask(torch.ones(4), 0.5, "row"), "'row'"),
        (lambda: select_mask(torch.ones(2, 2), 0.5), r"shape \(2, 2\)"),
        (lambda: residual_statistics(X, "row"), "'row'"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_reference_is_used_where_compiled_cannot(monkeypatch):
    """TokenMask always runs in torch; its two passes still go through qdq."""
    calls = []
    monkeypatch.setattr(residual.nvfp4, "qdq", lambda x, g: calls.append(x.shape) or nvfp4.reference_qdq(x, g))
    compensate(torch.randn(3, 32), "w4a4", TokenMask(0.5))
    assert calls == [(3, 32), (3, 32)]
