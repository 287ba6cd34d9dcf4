"""Whole runs through `python -m verl.trainer.main_ppo`, as the demo makes them.

A run takes a minute, most of it start-up in one process after the other. So there are few of them, several tests look
at each, and two go side by side where memory allows.
"""

import csv
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from support_models import save_checkpoint
from support_run import EXACT, Killed, Run, finished, quads_demo, run_and_kill

from quads_ops.settings import ARMS

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

MATRICES = 4 * (4 + 3 * 8)
"""Of the demo's policy: four attention matrices and three per expert in each of four layers."""
SITES = 4 * 4
"""Quantized activations: of qkv, o, gate with up, and down in each layer."""

PROBE = "quads.probe.every=3"
LAYERS = (PROBE, "quads.probe.layers=true")
BROKEN = "model.layers.1.self_attn.o_proj"
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
SIDE_BY_SIDE_BYTES = 18 << 30
"""Two runs take 17 GiB, one of them with two ranks."""


def run_quads(folder: Path) -> Run:
    """Three steps of arm quads, with two FSDP ranks and a rollout of two workers."""
    ranks = ("trainer.n_gpus_per_node=2", "actor_rollout_ref.rollout.tensor_model_parallel_size=2")
    halves = [f"actor_rollout_ref.{name}_micro_batch_size_per_gpu=64" for name in ("actor.ppo", "rollout.log_prob")]
    return finished(folder / "run", "--arm", "quads", "--steps", "3", overrides=(*LAYERS, *ranks, *halves))


def run_naive(folder: Path) -> Killed:
    """Three steps of arm naive on one rank; then its rollout worker is killed."""
    arguments = ("--arm", "naive", "--steps", "100", "--set", PROBE)
    with tempfile.TemporaryDirectory(prefix="q", dir="/tmp", ignore_cleanup_errors=True) as short:
        return run_and_kill(folder / "run", Path(short), *arguments, after_step=3)


def run_exact(folder: Path) -> tuple[Run, Run]:
    """A step in FP32 whose rollout quantizes weights alone; and one from its checkpoint without fake quantization."""
    keep = (f"trainer.default_local_dir={folder / 'checkpoints'}", "trainer.save_freq=1", "trainer.resume_mode=auto")
    overrides = (*EXACT, *keep)
    first = finished(folder / "first", "--arm", "qat", "--steps", "1", overrides=overrides)
    overrides += ("quads.actor.mode=none",)
    return first, finished(folder / "resumed", "--arm", "qat", "--steps", "2", overrides=overrides)


def run_mixtral(folder: Path) -> Run:
    """Two steps of arm quads with another model and another reward."""
    policy = save_checkpoint(folder / "policy", "mixtral", **HEADS)
    reward = f"reward.custom_reward_function.path={Path(__file__).parent / 'support_reward.py'}"
    return finished(folder / "run", "--steps", "2", "--policy", str(policy), overrides=(reward,))


def run_broken(folder: Path) -> subprocess.CompletedProcess:
    """A dense model with NaN in one weight."""
    policy = save_checkpoint(folder / "policy", "qwen3", **HEADS)
    weights = load_file(policy / "model.safetensors")
    weights[f"{BROKEN}.weight"][3, 5] = torch.nan
    save_file(weights, policy / "model.safetensors", metadata={"format": "pt"})
    return quads_demo(folder / "run", "--policy", str(policy), "--steps", "1")


RUNS = {"quads": run_quads, "killed": run_naive, "exact": run_exact, "mixtral": run_mixtral, "broken": run_broken}


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    """Name -> future, of the runs that the selected tests need."""
    needed = {name for item in request.session.items if item.path == request.path for name in item.fixturenames}
    pool = ThreadPoolExecutor(2 if psutil.virtual_memory().available > SIDE_BY_SIDE_BYTES else 1)
    try:
        yield {name: pool.submit(run, tmp_path_factory.mktemp(name)) for name, run in RUNS.items() if name in needed}
    finally:
        pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="module")
def quads(runs) -> Run:
    return runs["quads"].result()


@pytest.fixture(scope="module")
def killed(runs) -> Killed:
    return runs["killed"].result()


@pytest.fixture(scope="module")
def naive(killed) -> Run:
    return killed.run


@pytest.fixture(scope="module")
def exact(runs) -> tuple[Run, Run]:
    return runs["exact"].result()


@pytest.fixture(scope="module")
def mixtral(runs) -> Run:
    return runs["mixtral"].result()


@pytest.fixture(scope="module")
def broken(runs) -> subprocess.CompletedProcess:
    return runs["broken"].result()


@pytest.mark.parametrize("arm", ["quads", "naive"])
def test_three_steps(arm, quads, naive):
    outcome = {"quads": quads, "naive": naive}[arm]
    assert sorted(outcome.steps) == [1, 2, 3]
    assert outcome.values("quads/receipts_equal_min") == [1.0] * 3
    assert outcome.values("quads/receipts_matrices_min") == [MATRICES] * 3
    assert outcome.values("quads/logprob_nonfinite_sum") == [0.0] * 3
    assert all(0 < share < 1 for share in outcome.values("quads/changed_codes_mean"))
    assert len(set(outcome.checksums().values())) == 4  # the initial weights, and those after each step
    ratio = ARMS[arm][2]
    assert outcome.values("quads/rac_ratio_mean") == [ratio] * 3
    if ratio:
        covered = outcome.values("quads/rac_energy_covered_mean")
        assert all(ratio < share < 1 for share in covered), "a mask should cover more than its share of channels"


def test_quads_has_a_smaller_mismatch_than_naive(quads, naive):
    """Before any difference in training can matter: the first step, from the same weights and prompts."""
    for name in ("quads/logprob_abs_diff_mean", "quads/logprob_abs_diff_p99"):
        assert quads.values(name)[0] < 0.7 * naive.values(name)[0]


@pytest.mark.parametrize("arm", ["quads", "naive"])
def test_probe_splits_the_mismatch(arm, quads, naive):
    outcome = {"quads": quads, "naive": naive}[arm]
    step = outcome.steps[3]
    assert step["quads/probe_sum_error_max"] <= 1e-5
    assert step["quads/probe_tokens_sum"] > 300
    # The actor of arm quads multiplies with the rollout's very weights. In bf16 the engine's part is of the size of the
    # others: rounding noise of its kernels flips activation codes and routing.
    if arm == "quads":
        assert step["quads/probe_weight_abs_max"] == 0
    else:
        assert step["quads/probe_weight_abs_mean"] > 1e-3
    assert step["quads/probe_act_abs_mean"] > 1e-3
    assert "quads/probe_d_abs_mean" not in outcome.steps[2]


def test_the_probe_measures_every_quantized_product(quads):
    with next(quads.folder.rglob("quads_layers.csv")).open() as file:
        rows = list(csv.DictReader(file))
    assert {row["step"] for row in rows} == {"3"} and len(rows) == len({row["site"] for row in rows}) == SITES
    assert quads.values("quads/alarms_sum")[0] == 0


def test_two_ranks_with_tensor_parallel_rollout_hold_the_same_weights(quads, naive):
    """A matrix's global scale depends neither on the FSDP sharding nor on the rollout's, nor on the arm."""
    assert quads.checksums()[0] == naive.checksums()[0]


def test_a_killed_rollout_worker_ends_the_run_with_the_cause(killed):
    assert killed.status == 1, "None: still running after a minute"
    assert killed.seconds < 60
    assert any("RolloutDeadError: the vLLM engine of rollout replica 0 is dead" in line for line in killed.errors)
    assert killed.left == [], "processes that outlived their run"


def test_the_weight_error_is_zero(exact):
    """Without quantized activations, trainer and rollout agree; the same without fake quantization is the control."""
    first, control = exact
    assert first.values("quads/receipts_matrices_min") == [MATRICES]
    [largest] = first.values("quads/logprob_abs_diff_max")
    assert largest <= 1e-5
    assert control.values("quads/logprob_abs_diff_max")[0] > 1e4 * largest


def test_resumed_run_continues_with_the_same_weights(exact):
    """Although its actor computes with other weights: a checkpoint holds nothing of the quantization."""
    first, resumed = exact
    assert sorted(resumed.steps) == [2]
    assert resumed.checksums()[1] == first.checksums()[1]
    assert len({*first.checksums().values(), *resumed.checksums().values()}) == 3
    assert resumed.values("quads/receipts_equal_min") == [1.0]


def test_another_model_and_reward(mixtral):
    """Mixtral: the checkpoint and vLLM name its experts otherwise than transformers does."""
    assert mixtral.values("quads/receipts_matrices_min") == [2 * (4 + 3 * 4)] * 2
    assert mixtral.values("quads/receipts_equal_min") == [1.0] * 2
    assert all(0 < share < 1 for share in mixtral.values("quads/changed_codes_mean"))
    assert all(0 < difference < 0.5 for difference in mixtral.values("quads/logprob_abs_diff_mean"))


def test_broken_weights_end_the_run_with_the_cause(broken):
    """An error on the receiving side must not hang the trainer."""
    assert broken.returncode == 1
    assert BROKEN in broken.stderr and "NaN" in broken.stderr
