"""Every entry point of `quads_ops.dispatch` gives the same bits from torch and from the Triton kernels."""

import pytest
import support_interpreter
import torch
from support_interpreter import DEVICE, same_bits

from quads_ops import backends, dispatch, nvfp4, weights
from quads_ops.packed_activation import ExpertRows
from quads_ops.residual import ResidualMask, TokenMask
from quads_ops.residual_layout import ResidualForm

in_interpreter = support_interpreter.fixture()


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """The kernels run unless a call says otherwise."""
    monkeypatch.setenv("QUADS_BACKEND", "emulated")
    backends._decide.cache_clear()
    yield
    backends._decide.cache_clear()


def both(function, *args, **options):
    """The results of the kernels, and of torch on the CPU."""

    def moved(value, device):
        if isinstance(value, torch.Tensor):
            return value.clone().to(device)
        if isinstance(value, ResidualForm):
            return ResidualForm(value.kept, *(moved(line, device) for line in (value.order, value.keep)))
        return type(value)(*(moved(v, device) for v in value)) if isinstance(value, ExpertRows) else value

    here, there = (
        ([moved(a, device) for a in args], {name: moved(o, device) for name, o in options.items()})
        for device in (DEVICE, "cpu")
    )
    actual, expected = function(*here[0], **here[1]), function(*there[0], **there[1], backend="torch")
    stats = [options_of.get("stats") for options_of in (here[1], there[1])]
    return actual, expected, stats


def test_it_is_the_kernels_that_run(capsys, monkeypatch):
    monkeypatch.setattr(backends, "_said", set())
    dispatch.fake_quantize_weight(torch.randn(4, 32, device=DEVICE), torch.tensor(0.01, device=DEVICE))
    assert "emulated (demanded; Triton" in capsys.readouterr().err


@pytest.mark.parametrize("shape", [(7, 48), (2, 5, 64)], ids=str)
def test_weights(shape):
    w = torch.randn(shape).bfloat16()
    g = nvfp4.global_scale_dec(weights.weight_amax(w))
    actual, expected, _ = both(dispatch.fake_quantize_weight, w, g)
    same_bits(actual, expected)
    actual, expected, _ = both(dispatch.quantize_weight, w, g)
    for a, b in zip(actual, expected, strict=True):
        same_bits(a, b)
    for dtype in (torch.float32, torch.bfloat16):
        same_bits(
            dispatch.dequantize_weight(actual, dtype), dispatch.dequantize_weight(expected, dtype, backend="torch")
        )


def modes(k: int) -> dict:
    blocks, channels = torch.rand(k // 16) < 0.5, torch.rand(k) < 0.5
    return {
        "none": None,
        "all": "all",
        "blocks": ResidualMask(blocks=blocks),
        "channels": ResidualMask(channels=channels),
    }


@pytest.mark.parametrize("mode", ["none", "all", "blocks", "channels"])
def test_compensate(mode):
    x, residual = torch.randn(9, 96).bfloat16(), modes(96)[mode]
    x[4, 7] = float("inf")
    stats = torch.ones(96 if mode == "channels" else 6)
    there = residual
    if isinstance(residual, ResidualMask):
        there = ResidualMask(**{f"{residual.granularity}s": residual.flags.to(DEVICE)})
    own, expected_stats = stats.to(DEVICE), stats.clone()
    actual = dispatch.compensate(x.to(DEVICE), there, stats=own)
    expected = dispatch.compensate(x, residual, stats=expected_stats, backend="torch")
    same_bits(actual, expected)
    torch.testing.assert_close(own.cpu(), expected_stats, rtol=1e-5, atol=0.0)


def test_a_mask_per_token_is_refused_with_the_reason():
    with pytest.raises(ValueError, match="a mask per token is chosen in torch"):
        dispatch.compensate(torch.randn(2, 32, device=DEVICE), TokenMask(0.5))


@pytest.mark.parametrize("size", [6, 96])
def test_compensate_grouped(size):
    x, counts, keep = torch.randn(9, 96).bfloat16(), [4, 0, 5], torch.rand(3, size) < 0.5
    actual, expected, stats = both(dispatch.compensate_grouped, x, counts, keep, stats=torch.zeros(3, size))
    same_bits(actual, expected)
    torch.testing.assert_close(stats[0].cpu(), stats[1], rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("counts", [[4, 0, 6], [4, 0, 4], [12, 0, -3]], ids=str)
def test_counts_that_are_not_the_rows_are_refused(counts):
    """Before a kernel reads, and writes, rows that do not exist."""
    x, keep = torch.randn(9, 96, device=DEVICE), torch.ones(3, 6, dtype=torch.bool, device=DEVICE)
    with pytest.raises(ValueError, match="do not add up to the 9 rows"):
        dispatch.compensate_grouped(x, counts, keep)


@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize("with_experts", [False, True])
def test_quantize_activation(with_experts, swiglu):
    lead = (3,) if with_experts else ()
    rows = ExpertRows(torch.tensor([0, 4, 4, 9]).int(), torch.randperm(9).int()) if with_experts else None
    order = torch.rand(*lead, 6).argsort(-1).int()
    stats = dispatch.new_statistics(96, "block", "cpu", 3 if with_experts else None)
    # silu differs in its last bits between libraries; of numbers this small it is half the gate, in all of them.
    x = torch.randn(9, 192) * 1e-9 if swiglu else torch.randn(9, 96)
    for form in (
        ResidualForm(),
        ResidualForm(kept=4, order=order),
        ResidualForm(kept=6, keep=torch.rand(*lead, 96) < 0.5),
    ):
        actual, expected, totals = both(
            dispatch.quantize_activation, x.bfloat16(), form, experts=rows, stats=stats, swiglu=swiglu
        )
        for a, b in zip(actual, expected, strict=True):
            if b is None:
                assert a is None
            else:
                same_bits(a, b)
        torch.testing.assert_close(totals[0].cpu(), totals[1], rtol=1e-5, atol=0.0)
