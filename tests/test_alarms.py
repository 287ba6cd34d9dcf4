"""Alarms: when the log warns, how often, and with which advice."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import yaml

from quads_ops.settings import QuadsSettings, SettingsError
from quads_recipe.alarm_rules import FLOOR, MISMATCH, Watch
from quads_recipe.alarms import FILE, Alarms
from quads_recipe.paths import configs_dir

KL = "quads/logprob_k3_mean"


def settings(**block) -> QuadsSettings:
    return QuadsSettings.from_dict(block)


def curve(mean, noise: float = 0.12, seed: int = 0) -> list[float]:
    """mean: nats, a number per step; noise: relative, as between the steps of the demo (docs/metrics.md)."""
    rng = np.random.default_rng(seed)
    return [float(m * math.exp(noise * rng.standard_normal())) for m in mean]


def said(values, name: str = MISMATCH, alarms: Alarms | None = None, start: int = 1, **fixed) -> list[str]:
    """What the log says over a run in which `name` takes these values."""
    alarms = alarms or Alarms(settings())
    lines = []
    for step, value in enumerate(values, start):
        lines += alarms.step(step, {name: value, **fixed})
    return lines


def steps(lines: list[str]) -> list[tuple[str, int]]:
    """(alarm | alarm, doubled | alarm over, step) of each line."""
    heads = [line.split(": step ") for line in lines]
    return [(kind, int(rest.split(":")[0])) for kind, rest in heads]


# --- curves of mean |d|


@pytest.mark.parametrize("mean", [0.0015, 0.011, 0.03])
def test_a_steady_run_is_silent(mean):
    """BF16, quads, naive: the levels of the demo, with its noise, over 1000 steps and 5 seeds."""
    for seed in range(5):
        assert said(curve([mean] * 1000, seed=seed)) == []


def test_single_bad_steps_are_silent():
    """One routing flip in a step of few tokens; with exp|d| each of these would be an alarm."""
    values = curve([0.011] * 60)
    for step in (2, 14, 15, 30, 45):
        values[step] = 0.4
    assert said(values) == []


def test_a_collapse_is_reported_when_it_begins_each_time_it_doubles_and_not_otherwise():
    """mean |d| as in a run that collapses: flat at 0.012, from step 100 on twice as large every 40 steps, up to 0.7."""
    mean = [0.012] * 100 + [min(0.7, 0.012 * 2 ** (i / 40)) for i in range(300)]
    lines = said(curve(mean))
    growth = [line for line in lines if "times that of the run's first 5 steps" in line]
    error = [line for line in lines if "above log(1.05) = 0.0488" in line]
    assert len(growth) + len(error) == len(lines)
    kinds, at = zip(*steps(growth), strict=True)
    assert kinds == ("alarm",) + ("alarm, doubled",) * 4  # 2, 4, 8, 16 and 32 times the baseline
    assert 130 <= at[0] <= 150  # 0.024 is reached in step 140
    assert np.diff(at) == pytest.approx(40, abs=12)
    kinds, at = zip(*steps(error), strict=True)
    assert kinds == ("alarm", "alarm, doubled", "alarm, doubled", "alarm, doubled")
    assert 175 <= at[0] <= 190  # 0.0488 is reached in step 181


def test_a_run_that_starts_badly_is_reported_at_once_and_once():
    """Outliers in the activations and naive rollouts: 0.07 from the first step on."""
    lines = said(curve([0.07] * 200))
    assert steps(lines) == [("alarm", 3)]
    assert "mean |d| is 0.0" in lines[0] and "above log(1.05) = 0.0488" in lines[0]


def test_a_jump_is_reported_after_three_steps_and_its_end_once():
    lines = said(curve([0.011] * 30 + [0.03] * 30 + [0.011] * 30, noise=0.05))
    assert steps(lines) == [("alarm", 33), ("alarm over", 63)]
    assert float(re.search(r", ([\d.]+) times", lines[0])[1]) == pytest.approx(30 / 11, rel=0.1)
    assert lines[1].endswith("(begun in step 33)")


def test_a_figure_at_its_threshold_does_not_come_and_go():
    lines = said(curve([math.log(1.05)] * 300, noise=0.05))
    assert len(lines) <= 2


@pytest.mark.parametrize(
    ("start", "later", "lines"), [(1e-7, 4e-3, 0), (1e-7, 6e-3, 1), (0.0, 6e-3, 1), (0.004, 7e-3, 0)]
)
def test_growth_counts_from_the_level_of_fp8_on(start, later, lines):
    found = said([start] * 10 + [later] * 10)
    assert len(found) == lines
    assert FLOOR == 0.005
    if start == 0:
        assert "up from that of the run's first 5 steps (0)" in found[0]


def test_other_thresholds_and_none():
    rising = [0.01] * 10 + [0.2] * 10
    assert len(said(rising)) == 2
    assert len(said(rising, alarms=Alarms(settings(alarms={"growth": 0})))) == 1
    assert len(said(rising, alarms=Alarms(settings(alarms={"growth": 0, "error": 1.3})))) == 0
    off = Alarms(settings(alarms={"enabled": False}))
    assert said(rising, alarms=off, **{"quads/logprob_nonfinite_sum": 5.0}) == [] and off.active == 0
    quick = Alarms(settings(alarms={"window": 1, "growth": 0}))
    assert steps(said(rising, alarms=quick)) == [("alarm", 11)]


def test_active_counts_alarms():
    alarms = Alarms(settings())
    said([0.01] * 10, alarms=alarms)
    assert alarms.active == 0
    said([0.2] * 5, alarms=alarms, start=11, **{"quads/logprob_nonfinite_sum": 1.0})
    assert alarms.active == 3
    said([0.01] * 5, alarms=alarms, start=16, **{"quads/logprob_nonfinite_sum": 0.0})
    assert alarms.active == 0


# --- the other figures


def test_kl_above_its_threshold():
    lines = said(curve([0.002] * 20 + [0.03] * 20 + [0.002] * 20), KL)
    assert [kind for kind, _ in steps(lines)] == ["alarm", "alarm over"]
    assert "KL(rollout || actor)" in lines[0] and "above 0.01: the updates are off-policy" in lines[0]
    assert "algorithm.rollout_correction" in lines[0]


def test_an_infinite_kl_is_said_once():
    assert [kind for kind, _ in steps(said([0.001] * 5 + [math.inf] * 20, KL))] == ["alarm"]
    assert said([math.nan] * 20, KL) == []


def test_nonfinite_tokens_at_once():
    lines = said([0, 0, 3, 4, 6, 0, 0], "quads/logprob_nonfinite_sum")
    assert steps(lines) == [("alarm", 3), ("alarm, doubled", 5), ("alarm over", 6)]
    assert "3 tokens have a logprob that is NaN or infinite" in lines[0]


def test_responses_that_are_missing():
    lines = said([0, 64, 0], "quads/sequences_lost_sum")
    assert steps(lines) == [("alarm", 2), ("alarm over", 3)]
    assert "64 responses of this step are missing" in lines[0] and "reward or agent loop" in lines[0]


def test_codes_that_never_change():
    lines = said([0.002] + [0.0] * 10 + [0.001], "quads/changed_codes_mean")
    assert steps(lines) == [("alarm", 6), ("alarm over", 12)]
    assert "no NVFP4 code has changed in 5 weight syncs" in lines[0] and "optim.lr" in lines[0]
    assert said([0.0, 0.0, 0.0, 1e-6] * 20, "quads/changed_codes_mean") == []


def test_masks_from_the_weights_for_long():
    lines = said([1.0] * 30 + [0.0] * 3, "quads/rac_from_prior_mean")
    assert steps(lines) == [("alarm", 20), ("alarm over", 31)]
    assert said([1.0] * 19 + [0.0] * 3, "quads/rac_from_prior_mean") == []


def test_metrics_that_were_not_measured_say_nothing():
    assert said([1.0] * 20, "quads/sync_seconds_max") == []


def test_a_watch_needs_half_of_its_window():
    watch = Watch(5)
    assert [watch.update(step, 1.0, 0.5) for step in (1, 2, 3, 4)] == [None, None, "begun", None]


# --- advice


def probe(weight: float, act: float, num: float) -> dict[str, float]:
    return {f"quads/probe_{n}_abs_mean": v for n, v in (("weight", weight), ("act", act), ("num", num))}


@pytest.mark.parametrize(
    ("block", "parts", "advice"),
    [
        ({"arm": "naive"}, (0.05, 0.03, 0.01), "quads.actor.mode=w4a16"),
        ({"arm": "fp8"}, (0.05, 0.03, 0.01), "the actor can't train with FP8 weights"),
        ({"arm": "quads"}, (0.05, 0.03, 0.01), "please report it"),
        ({"arm": "quads"}, (0.0, 0.05, 0.01), "raise quads.rollout.residual.ratio (now 0.5)"),
        ({"arm": "qat"}, (0.0, 0.05, 0.01), "raise quads.rollout.residual.ratio (now 0)"),
        (
            {"arm": "quads_full"},
            (0.0, 0.05, 0.01),
            "ratio is 1 already; leave out the layers that `quads diagnose` names",
        ),
        ({"arm": "fp8"}, (0.0, 0.05, 0.01), "compare the arms on this model with `quads diagnose`"),
        ({"arm": "quads_full"}, (0.0, 0.01, 0.05), "little to gain by quantization settings"),
        ({"arm": "bf16"}, (0.0, 0.0, 0.05), "nothing to gain by quantization settings"),
        ({"arm": "quads"}, (0.0, 0.01, 0.05), "flips 4-bit codes of activations; ratio 1"),
    ],
)
def test_the_advice_follows_from_the_largest_part_of_the_probe(block, parts, advice):
    alarms = Alarms(settings(**block, probe={"every": 10}))
    alarms.step(1, probe(*parts))
    [line] = said([0.09] * 5, alarms=alarms, start=2)
    assert advice in line
    assert "Probe of step 1: d_weight" in line and f"d_act {parts[1]:.2g}" in line


def test_alarms_of_one_step_do_not_repeat_the_advice():
    alarms = Alarms(settings(arm="naive"))
    alarms.step(1, probe(0.0, 0.05, 0.01))
    lines = said([0.09] * 5, alarms=alarms, start=2, **{KL: 0.02})
    assert steps(lines) == [("alarm", 4), ("alarm", 4)]
    assert "(median of 3 steps)" in lines[0] and "Probe of step 1" in lines[0]
    assert "KL(rollout || actor)" in lines[1] and "Probe of" not in lines[1] and "rollout_correction" in lines[1]


def test_the_latest_probe_counts():
    alarms = Alarms(settings(arm="naive"))
    alarms.step(1, probe(0.05, 0.01, 0.01))
    alarms.step(2, probe(0.01, 0.05, 0.01))
    [line] = said([0.09] * 5, alarms=alarms, start=3)
    assert "Probe of step 2" in line and "raise quads.rollout.residual.ratio" in line


def test_without_a_probe_the_advice_is_to_run_one():
    [line] = said([0.09] * 5)
    assert "No probe has run: quads.probe.every=N" in line


# --- a run that is resumed


@pytest.mark.parametrize("cut", [1, 4, 8, 21, 33, 64])
def test_a_resumed_run_says_what_one_run_would(tmp_path, cut):
    values = curve([0.011] * 20 + [0.03] * 20 + [0.2] * 20 + [0.01] * 10)
    whole = said(values)
    assert len(whole) >= 5
    first = Alarms(settings())
    lines = said(values[:cut], alarms=first, **probe(0.0, 0.1, 0.0))
    first.save(tmp_path / "global_step")
    resumed = Alarms(settings())
    assert resumed.load(tmp_path / "global_step")
    rest = said(values[cut:], alarms=resumed, start=cut + 1)
    assert steps(lines + rest) == steps(whole)
    assert all("Probe of step" in line for line in rest if ". " in line)


def test_nothing_to_continue_from(tmp_path):
    assert not Alarms(settings()).load(tmp_path)


def test_other_settings_after_a_resume(tmp_path):
    first = Alarms(settings())
    said([0.011] * 30, alarms=first)
    first.save(tmp_path)
    assert (tmp_path / FILE).is_file()
    other = Alarms(settings(alarms={"kl": 0, "window": 3, "baseline": 2, "growth": 1.5}))
    other.load(tmp_path)
    assert steps(said([0.02] * 5, alarms=other, start=31)) == [("alarm", 32)]


@pytest.mark.parametrize(
    ("block", "same"),
    [
        ({"arm": "bf16"}, False),
        ({"rollout": {"residual": {"ratio": 1.0}}}, False),
        ({"exclude": ["re:.*o_proj"]}, False),
        ({"alarms": {"kl": 0}, "probe": {"every": 5}, "sync_timeout_s": 30}, True),
        # The same computation under another name.
        ({"arm": "naive", "actor": {"mode": "w4a16"}, "rollout": {"residual": {"ratio": 0.5}}}, True),
    ],
    ids=["arm", "ratio", "exclude", "alarms", "name"],
)
def test_a_run_that_computes_otherwise_takes_a_new_baseline(tmp_path, block, same):
    """0.06 is an alarm against the checkpoint's 0.01, and one that has begun there; it is the level of the new run."""
    quiet = {"error": 0, "kl": 0}
    first = Alarms(settings(alarms=quiet))
    assert steps(said([0.01] * 5 + [0.06] * 5, alarms=first)) == [("alarm", 8)]
    first.save(tmp_path)
    other = Alarms(settings(**(block | {"alarms": quiet | block.get("alarms", {})})))
    assert other.load(tmp_path)
    lines = said([0.06] * 6 + [0.2] * 5, alarms=other, start=11)
    assert steps(lines) == ([("alarm, doubled", 19)] if same else [("alarm", 18)])
    if not same:
        assert "3.33 times that of the run's first 5 steps (0.06)" in lines[0]


# --- in the trainer


@pytest.fixture
def trainer(monkeypatch):
    """A QuadsTrainer without Ray: verl's own hooks do nothing but note that they ran."""
    from omegaconf import OmegaConf
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

    from quads_recipe.trainer import QuadsTrainer

    ran = []
    for name in ("_compute_metrics", "_save_checkpoint", "_load_checkpoint", "on_train_begin"):
        monkeypatch.setattr(PPOTrainerSync, name, lambda self, *args, name=name: ran.append(name))

    def make(folder, **block):
        made = QuadsTrainer.__new__(QuadsTrainer)
        made.settings, made.global_steps, made.ran = settings(**block), 0, ran
        made.alarms = Alarms(made.settings)
        made.config = OmegaConf.create({"trainer": {"default_local_dir": str(folder), "resume_mode": "auto"}})
        return made

    return make


def train(trainer, values, start: int = 1) -> list[float]:
    logged = []
    for step, value in enumerate(values, start):
        trainer.global_steps = step
        metrics = {MISMATCH: value}
        trainer._compute_metrics(None, metrics, {}, global_steps=step, epoch=0)
        logged.append(metrics.get("quads/alarms_sum"))
    return logged


def test_the_trainer_prints_alarms_and_logs_their_number(trainer, tmp_path, capsys):
    made = trainer(tmp_path)
    assert train(made, [0.011] * 10 + [0.03] * 6 + [0.01] * 6) == [0.0] * 12 + [1.0] * 6 + [0.0] * 4
    begun, over = capsys.readouterr().out.splitlines()
    assert begun.startswith("quads: alarm: step 13: mean |d| is 0.03 nats (median of 5 steps), 2.73 times that of")
    assert over.startswith("quads: alarm over: step 19: mean |d| is 0.01 nats")
    assert made.ran == ["_compute_metrics"] * 22


def test_a_trainer_without_alarms(trainer, tmp_path, capsys):
    assert train(trainer(tmp_path, alarms={"enabled": False}), [0.3] * 10) == [None] * 10
    assert not capsys.readouterr().out


@pytest.mark.parametrize("mode", ["auto", "resume_path"])
def test_the_trainer_keeps_the_baseline_in_its_checkpoints(trainer, tmp_path, capsys, mode):
    first = trainer(tmp_path)
    train(first, [0.011] * 10)
    first._save_checkpoint()
    second = trainer(tmp_path if mode == "auto" else tmp_path / "elsewhere")
    second.config.trainer.update({"resume_mode": mode, "resume_from_path": str(tmp_path / "global_step_10")})
    second.global_steps = 10  # verl's own part sets it
    second._load_checkpoint()
    train(second, [0.03] * 6, start=11)
    assert "2.73 times that of the run's first 5 steps (0.011)" in capsys.readouterr().out
    assert (first.ran[10:12], second.ran.count("_load_checkpoint")) == (["_save_checkpoint", "_load_checkpoint"], 1)


def test_a_checkpoint_without_alarms_is_told(trainer, tmp_path, capsys):
    made = trainer(tmp_path)
    made.global_steps = 7
    made._load_checkpoint()
    assert "global_step_7 has no state of the alarms" in capsys.readouterr().out


# --- settings

WRONG = [
    ({"enabled": "yes"}, "quads.alarms.enabled", "true or false"),
    ({"error": 0.95}, "quads.alarms.error", "above 1"),
    ({"growth": -2}, "quads.alarms.growth", "above 1"),
    ({"growth": 1}, "quads.alarms.growth", "above 1"),
    ({"kl": "low"}, "quads.alarms.kl", "in nats"),
    ({"baseline": 0}, "quads.alarms.baseline", "1 or more"),
    ({"window": 2.5}, "quads.alarms.window", "1 or more"),
    ({"stuck": True}, "quads.alarms.stuck", "1 or more"),
    ({"level": 2}, "quads.alarms.level", "no such setting"),
]


@pytest.mark.parametrize(("block", "field", "part"), WRONG, ids=[w[1] for w in WRONG])
def test_wrong_values_name_field_value_and_remedy(block, field, part):
    with pytest.raises(SettingsError) as caught:
        settings(alarms=block)
    assert str(caught.value).startswith(field + " = ") and part in str(caught.value)


def test_layers_are_part_of_the_probe():
    with pytest.raises(SettingsError, match=r"quads.probe.layers = True: .*quads.probe.every"):
        settings(probe={"layers": True})
    with pytest.raises(SettingsError, match=r"quads.probe.layers = 'all': must be true or false"):
        settings(probe={"layers": "all", "every": 1})
    assert settings(probe={"layers": True, "every": 1}).probe.layers


def test_the_base_config_lists_every_setting_with_its_default():
    block = yaml.safe_load((configs_dir() / "quads_base.yaml").read_text())["quads"]
    defaults = QuadsSettings().to_dict()

    def names(tree, prefix=""):
        return {
            n for k, v in tree.items() for n in (names(v, f"{prefix}{k}.") if isinstance(v, dict) else [prefix + k])
        }

    assert names(block) == names(defaults)
    assert QuadsSettings.from_dict(block) == QuadsSettings.from_dict({})
    assert block["alarms"] == defaults["alarms"] and block["probe"] == defaults["probe"]
