"""Fake quantization must not undo FSDP: no fake-quantized weight lives until backward.

Per kind of engine, a full training step (forward, backward, AdamW) of one of two ranks is measured; see
support_memory.PeakMemory for what counts.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import support_engine
import support_models
from support_memory import PeakMemory

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

# Deep and with many experts a token does not visit, so that weights outweigh activations, as in real models.
MODEL = {"num_hidden_layers": 6, "hidden_size": 128, "moe_intermediate_size": 96, "num_experts": 8}
KINDS = {
    # name -> (strategy, gradient checkpointing, quads block, keep the fake-quantized weights)
    "fsdp2 stock": ("fsdp2", False, None, False),
    "fsdp2 quads": ("fsdp2", False, {"arm": "quads"}, False),
    "fsdp2 naive": ("fsdp2", False, {"arm": "quads"}, True),
    "fsdp2 checkpointing stock": ("fsdp2", True, None, False),
    "fsdp2 checkpointing quads": ("fsdp2", True, {"arm": "quads"}, False),
    "fsdp1 stock": ("fsdp", False, None, False),
    "fsdp1 quads": ("fsdp", False, {"arm": "quads"}, False),
}


def measure(folder: Path, strategy: str, checkpointing: bool, quads: dict | None, keep: bool) -> dict[str, float]:
    """MiB alive: at the peak of the second step, after its forward, and before it."""
    engine = support_engine.build_engine(
        folder / "model", strategy=strategy, quads=quads, param_dtype="bf16", gradient_checkpointing=checkpointing
    )
    if keep:
        engine.fake_quant.recompute = False
    data = support_engine.batch(rows=2, length=24, micro=2)
    support_engine.train_step(engine, data)  # makes the optimizer's state
    memory, after_forward = PeakMemory(), []
    forward_step = engine.forward_step

    def watched(*args, **kwargs):
        result = forward_step(*args, **kwargs)
        after_forward.append(memory.live())
        return result

    engine.forward_step = watched
    with memory:
        for tensor in _resident(engine):
            tensor.view(-1)  # an operation, so that it is counted
        before = memory.live()
        support_engine.train_step(engine, data)
    values = {"peak": memory.peak, "after_forward": after_forward[0], "before": before}
    return {name: value / 2**20 for name, value in values.items()}


def _resident(engine):
    """Parameters and optimizer state, as this rank holds them."""
    tensors = list(engine.module.parameters())
    for state in engine.optimizer.state.values():
        tensors += [value for value in state.values() if value.dim()]
    return [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]


def job(folder: Path) -> dict[str, dict[str, float]]:
    return {name: measure(folder, *kind) for name, kind in KINDS.items()}


@pytest.fixture(scope="module")
def used(tmp_path_factory):
    folder = tmp_path_factory.mktemp("memory")
    support_models.save_checkpoint(folder / "model", "qwen3_moe", **MODEL)
    used = support_engine.run_ranks("test_actor_memory:job", 2, folder, timeout_s=500)[0]
    for name, values in used.items():
        print(f"{name:28}", *(f"{key} {value:6.2f} MiB" for key, value in values.items()))
    return used


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp2 checkpointing", "fsdp1"])
def test_peak_of_a_step_is_within_a_tenth_of_the_stock_engine(used, kind):
    stock, quads = used[f"{kind} stock"], used[f"{kind} quads"]
    assert stock["before"] == quads["before"]
    assert quads["peak"] <= 1.10 * stock["peak"]


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp2 checkpointing", "fsdp1"])
def test_nothing_more_is_alive_between_forward_and_backward(used, kind):
    stock, quads = used[f"{kind} stock"], used[f"{kind} quads"]
    assert quads["after_forward"] <= 1.01 * stock["after_forward"]


def test_the_measurement_sees_weights_that_are_kept(used):
    """Negative control: kept, the fake-quantized weights are a second bf16 model, unsharded."""
    stock, naive = used["fsdp2 stock"], used["fsdp2 naive"]
    hidden, experts = MODEL["hidden_size"], MODEL["num_experts"]
    attention = 2 * 4 * 32 * hidden + 2 * 2 * 32 * hidden  # q and o, k and v
    layer = attention + experts * 3 * MODEL["moe_intermediate_size"] * hidden
    expected = 2 * layer * MODEL["num_hidden_layers"] / 2**20
    assert naive["after_forward"] - stock["after_forward"] == pytest.approx(expected, rel=0.02)
    assert naive["after_forward"] > 1.2 * stock["after_forward"]
