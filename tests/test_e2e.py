"""Whole runs through `python -m verl.trainer.main_ppo`, as the demo makes them. Each costs a minute of start-up."""

import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from quads_ops.settings import ARMS

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

MATRICES = 4 * (4 + 3 * 8)
"""Of the demo's policy: four attention matrices and three per expert in each of four layers."""


PROBE = "quads.probe.every=3"


class Run:
    """The outcome of one `quads demo`."""

    def __init__(self, folder: Path):
        self.log = (folder / "log.txt").read_text()
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        self.steps = {row["step"]: row["data"] for row in rows if "critic/score/mean" in row["data"]}

    def checksums(self) -> dict[int, str]:
        """Step -> checksum of the weights that both sides held after the sync that followed it."""
        return {int(s): c for s, c in re.findall(r"weights of step (\d+) synced .*checksum (\w+)", self.log)}

    def values(self, name: str) -> list[float]:
        return [data[name] for _, data in sorted(self.steps.items())]


def demo(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "quads_recipe.cli", "demo", "--run-dir", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=850)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    @cache
    def start(arm: str, steps: int, *overrides: str) -> Run:
        folder = tmp_path_factory.mktemp(arm) / "run"
        sets = [argument for override in overrides for argument in ("--set", override)]
        result = demo(folder, "--arm", arm, "--steps", str(steps), *sets)
        assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
        return Run(folder)

    return start


@pytest.mark.parametrize("arm", ["quads", "naive"])
def test_three_steps(run, arm):
    outcome = run(arm, 3, PROBE)
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


def test_quads_has_a_smaller_mismatch_than_naive(run):
    """Before any difference in training can matter: the first step, from the same weights and prompts."""
    quads, naive = run("quads", 3, PROBE), run("naive", 3, PROBE)
    for name in ("quads/logprob_abs_diff_mean", "quads/logprob_abs_diff_p99"):
        assert quads.values(name)[0] < 0.7 * naive.values(name)[0]


@pytest.mark.parametrize("arm", ["quads", "naive"])
def test_probe_splits_the_mismatch(run, arm):
    step = run(arm, 3, PROBE).steps[3]
    assert step["quads/probe_sum_error_max"] <= 1e-5
    assert step["quads/probe_tokens_sum"] > 300
    # The actor of arm quads multiplies with the rollout's very weights. In bf16 the engine's part is of the size of the
    # others: rounding noise of its kernels flips activation codes and routing.
    if arm == "quads":
        assert step["quads/probe_weight_abs_max"] == 0
    else:
        assert step["quads/probe_weight_abs_mean"] > 1e-3
    assert step["quads/probe_act_abs_mean"] > 1e-3
    assert "quads/probe_d_abs_mean" not in run(arm, 3, PROBE).steps[2]


def test_two_ranks_with_tensor_parallel_rollout_hold_the_same_weights(run):
    """A matrix's global scale depends neither on the FSDP sharding nor on the rollout's."""
    two = run(
        "quads",
        1,
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=64",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=64",
    )
    assert two.values("quads/receipts_equal_min") == [1.0]
    assert two.checksums()[0] == run("quads", 3, PROBE).checksums()[0]


def test_resumed_run_continues_with_the_same_weights(run, tmp_path):
    checkpoints = tmp_path / "checkpoints"
    keep = (f"trainer.default_local_dir={checkpoints}", "trainer.save_freq=1", "trainer.resume_mode=auto")
    first = run("quads", 1, *keep)
    resumed = run("quads", 2, *keep)
    assert sorted(resumed.steps) == [2]
    assert resumed.checksums()[1] == first.checksums()[1]
    assert resumed.values("quads/receipts_equal_min") == [1.0]


def test_broken_weights_end_the_run_with_the_cause(tmp_path):
    """An error on the receiving side must not hang the trainer: NaN in one weight."""
    import torch
    from safetensors.torch import load_file, save_file

    from quads_recipe.paths import policy_dir

    policy = tmp_path / "policy"
    policy.mkdir()
    for file in policy_dir("natural").iterdir():
        (policy / file.name).write_bytes(file.read_bytes())
    weights = load_file(policy / "model.safetensors")
    weights["model.layers.1.self_attn.o_proj.weight"][3, 5] = torch.nan
    save_file(weights, policy / "model.safetensors", metadata={"format": "pt"})
    result = demo(tmp_path / "run", "--policy", str(policy), "--steps", "1")
    assert result.returncode == 1
    assert "model.layers.1.self_attn.o_proj" in result.stderr and "NaN" in result.stderr
