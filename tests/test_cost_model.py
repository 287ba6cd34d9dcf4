"""The counted cost of residual compensation."""

import importlib.util
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).resolve().parent.parent / "benchmarks" / "cost_model.py"


@pytest.fixture(scope="module")
def cost():
    spec = importlib.util.spec_from_file_location("cost_model", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules["cost_model"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["cost_model"]


def test_experts_touched(cost):
    model = cost.Model()
    assert cost.touched(model, 1) == pytest.approx(8)
    # Two tokens: 8 + 8 * 120/128.
    assert cost.touched(model, 2) == pytest.approx(15.5)
    assert cost.touched(model, 4096) == pytest.approx(128)


def test_blocks_of_an_expert(cost):
    # One token with probability p makes one block.
    assert cost.expected_blocks(1, 0.25, 16) == pytest.approx(0.25)
    # Two tokens, blocks of one: as many blocks as tokens.
    assert cost.expected_blocks(2, 0.25, 1) == pytest.approx(0.5)
    # Two tokens, blocks of two: one block unless there are none.
    assert cost.expected_blocks(2, 0.25, 2) == pytest.approx(1 - 0.75**2)
    assert cost.expected_blocks(4096, 8 / 128, 128) == pytest.approx(2.5, abs=0.1)


def test_weights_are_counted_to_the_byte(cost):
    """One token: the weights of q|k|v, o and eight experts at 4.5 bits, and little else."""
    model = cost.Model()
    weights = (5120 * 2048 + 2048 * 4096 + 8 * 3 * 768 * 2048) * 4.5 / 8
    total = sum(kernel.bytes for kernel in cost.layer(model, cost.B200, 1, 0.0))
    assert weights < total < 1.02 * weights


def test_compensation_reads_no_weight_twice(cost):
    model = cost.Model()
    for tokens in cost.TOKENS:
        plain, full = (cost.layer(model, cost.B200, tokens, ratio) for ratio in (0.0, 1.0))
        for before, after in zip(plain, full, strict=True):
            # Only codes grow: at most by one written and one read copy of each activation.
            rows = tokens * model.topk if "experts" in before.name or "SwiGLU" in before.name else tokens
            assert after.bytes - before.bytes <= rows * 4096 * cost.CODE
            assert after.operations == pytest.approx(2 * before.operations)


@pytest.mark.parametrize("tokens", [64, 256, 4096])
def test_operations_follow_the_ratio(cost, tokens):
    """Half as much again at ratio 0.5, but nothing where products add the residual first."""

    def more(device, which):
        half, plain = (
            sum(kernel.operations for kernel in cost.layer(cost.Model(), device, tokens, ratio) if which in kernel.name)
            for ratio in (0.5, 0.0)
        )
        return half / plain - 1

    for which in ("q|k|v", "experts down"):
        assert more(cost.B200, which) == pytest.approx(0.5)
        assert more(cost.H200_EXACT, which) == pytest.approx(0.5)
        assert more(cost.H200, which) == pytest.approx(0.0)


def test_a_launch_takes_its_slowest_resource(cost):
    device = cost.Device("test", 10.0, 100.0, 1000.0, 90, 1)
    assert cost.seconds(cost.Kernel("", 50, 100, 100), device) == 5
    assert cost.bound(cost.Kernel("", 50, 1000, 100), device) == "tensor cores"
    assert cost.seconds(cost.Kernel("", 50, 100, 7000), device) == 7


@pytest.mark.parametrize("ratio", [0.5, 1.0])
def test_goals_at_decode(cost, ratio):
    """The goal of the kernels: at most 5% at ratio 0.5 and 9% at ratio 1, up to 64 tokens."""
    for device in (cost.B200, cost.H200):
        for tokens in (1, 16, 64):
            assert 0 <= cost.overhead(cost.Model(), device, tokens, ratio) <= cost.LIMITS[ratio]


def test_the_report_says_where_the_goal_is_missed(cost):
    model = cost.Model()
    slow = cost.Device("slow tensor cores", 8e12, 1e12, None, 100, 148)
    assert cost.above_limits(model, cost.B200) == []
    assert "ratio 1" in " ".join(cost.above_limits(model, slow))
    assert "is not met: 1 tokens, ratio 0.5" in cost._verdict(model, slow)


def test_the_committed_report_is_current(cost):
    assert (cost.RESULTS / "cost_model.md").read_text() == cost.report(cost.Model())
