"""Settings of a study: presets, stress settings, what may change between two starts, and the commands of the runs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from support_models import save_checkpoint
from support_study import make_plan

from quads_ops.settings import ARMS
from quads_recipe.paths import policy_dir
from quads_recipe.policy.outliers import OutlierSettings
from quads_recipe.study import cli, command, data, estimate, plan, prepare
from quads_recipe.study import policy as policies
from quads_recipe.study.plan import StudyError
from quads_recipe.study.presets import ALL_ARMS, PRESETS, STRESSES, combine

FILES = command.Files(Path("policy"), Path("train.parquet"), Path("heldout.parquet"))


def arguments(*given):
    return cli.parser().parse_args(list(given))


@pytest.fixture
def policy(tmp_path):
    """What a study looks at of a policy before anything is started."""
    folder = tmp_path / "policy"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


# --- presets


def test_presets_are_about_arms_that_exist():
    assert tuple(ARMS) == ALL_ARMS
    for preset in PRESETS.values():
        assert set(preset.arms) <= set(ARMS) and "bf16" in preset.arms


def test_stress_settings_are_ones_that_outliers_know():
    for stress in STRESSES.values():
        OutlierSettings(**stress.outliers)


@pytest.mark.parametrize("names", [("stale16",), ("long",), tuple(STRESSES)])
def test_stress_settings_are_ones_that_hydra_knows_and_that_fit_together(names):
    asked = make_plan(overrides=combine(names).overrides)
    config = command.compose(asked, "quads", 1, FILES, Path("run"))
    assert config.quads.arm == "quads" and config.actor_rollout_ref.rollout.seed == 1
    actor = config.actor_rollout_ref.actor
    sequences = actor.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n
    assert sequences % actor.ppo_micro_batch_size_per_gpu == 0
    room = config.data.max_prompt_length + config.data.max_response_length
    assert room <= config.actor_rollout_ref.rollout.max_model_len


def test_combined_stress_is_all_of_them_and_the_later_one_counts():
    both = combine(("outliers4", "long", "outliers-many", "outliers64"))
    assert both.outliers == {"strength": 64.0, "norm_channels": 16, "mlp_channels": 8} and both.terms == (4, 5)
    assert combine(()).overrides == () and combine(("lr3e-4", "lr1e-3")).overrides[-1].endswith("=1e-3")


def of_preset(name):
    p = PRESETS[name]
    return make_plan(arms=p.arms, seeds=tuple(range(p.seeds)), steps=p.steps, heldout=p.heldout, samples=p.samples)


def test_estimates_match_what_the_presets_promise(monkeypatch):
    """As measured: quick in 13 min 20 s, paper-mini two runs at a time in 74 min; and 90, as its help says."""
    for name, jobs, minutes in (("quick", 1, 13.3), ("paper-mini", 2, 74), ("paper-mini", 1, 90)):
        asked = of_preset(name)
        assert sum(estimate.seconds(asked, jobs)) / 60 == pytest.approx(minutes, rel=0.04)
        monkeypatch.setattr(estimate, "_capability", lambda: "AVX512")
        assert "this CPU" not in estimate.describe(asked)[0]
        monkeypatch.setattr(estimate, "_capability", lambda: "AVX2")
        assert "no AVX-512" in estimate.describe(asked)[0]


def test_more_runs_at_a_time_than_there_are_change_nothing():
    asked = make_plan(arms=("bf16",), seeds=(0,))
    assert estimate.seconds(asked, 2) == estimate.seconds(asked, 1)
    two = make_plan(arms=("bf16", "quads"), seeds=(0,))
    assert 0.5 < estimate.seconds(two, 2)[0] / estimate.seconds(two, 1)[0] < 1


@pytest.mark.parametrize(
    ("changes", "jobs", "named"),
    [
        ({"overrides": ("a=b",)}, 1, "--set"),
        ({"stress": ("lr1e-3",), "overrides": combine(("lr1e-3",)).overrides}, 1, "--stress lr1e-3"),
        ({"data": {"train": "x"}}, 1, "--data"),
        ({"config": "quads", "preset": "gpu"}, 1, "--preset gpu"),
        ({"policy": "mine"}, 1, "--policy mine"),
        ({}, 3, "--jobs 3"),
        ({"data": {"train": "x"}, "overrides": ("a=b",)}, 4, "--data, --set, --jobs 4"),
    ],
)
def test_where_nothing_was_timed_there_is_no_estimate(changes, jobs, named, policy):
    asked = dataclasses.replace(of_preset("paper-mini"), **changes)
    folder = policy if asked.policy == "mine" else policy_dir("outlier")
    assert estimate.describe(asked, folder, jobs) == [f"no estimate of the time: nothing was timed with {named}"]


def test_outliers_do_not_change_what_a_step_takes(tmp_path):
    asked = dataclasses.replace(of_preset("quick"), stress=("outliers64",), outliers={"strength": 64.0})
    for folder in (None, tmp_path, policy_dir("natural")):
        assert estimate.describe(asked, folder)[0].startswith("about 13 min")


# --- the plan


def test_a_plan_survives_being_written(tmp_path):
    asked = make_plan(terms=(5, 7), stress=("long",), overrides=("a=1",), outliers={"strength": 4.0})
    assert plan.settle(tmp_path / "s", asked) == asked == plan.read(tmp_path / "s")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"steps": 30}, "steps: 24 there, 30 asked for"),
        ({"policy_digest": "0" * 64}, "policy_digest: "),
        ({"overrides": ("actor_rollout_ref.actor.optim.lr=1e-3",)}, "overrides: [] there"),
        ({"outliers": {"strength": 64.0}}, "outliers.strength: none there, 64.0 asked for"),
        ({"versions": {"python": "3.11.1", "torch": "2.14.0", "verl": "0.9.1"}}, "versions.torch: 2.13.0 there"),
        ({"terms": (5, 7)}, "terms: none there, [5, 7] asked for"),
        ({"data": {"a.parquet": "12"}}, "data.a.parquet: none there"),
        ({"seeds": (0, 1)}, "seeds: the study has [2], not asked for now"),
        ({"arms": ("bf16", "quads")}, "arms: the study has ['fp8', 'naive', 'qat', 'symmetric', 'quads_full']"),
    ],
)
def test_other_settings_are_refused_by_name(tmp_path, change, said):
    plan.settle(tmp_path, make_plan())
    with pytest.raises(StudyError) as error:
        plan.settle(tmp_path, make_plan(**change))
    assert said in str(error.value) and str(tmp_path) in str(error.value)
    assert plan.read(tmp_path) == make_plan()


def test_a_study_may_grow(tmp_path):
    plan.settle(tmp_path, make_plan(seeds=(0,), arms=("bf16", "quads")))
    grown = make_plan(seeds=(0, 1), keep_weights=False)
    assert plan.settle(tmp_path, grown) == plan.read(tmp_path) == grown
    assert len(grown.runs()) == 14 and grown.runs()[0] == ("bf16", 0) and grown.runs()[7] == ("bf16", 1)


def test_a_folder_with_other_things_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(StudyError, match="not empty"):
        plan.settle(tmp_path, make_plan())
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_folder_that_is_none(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(StudyError, match="--out: .*file is a file; give a folder"):
        plan.settle(tmp_path / "file", make_plan())
    for given, said in ((str(tmp_path / "file"), "file is a file; give a folder"), (" ", "' ' names no folder")):
        with pytest.raises(SystemExit) as ended:
            cli.main(["--out", given])
        assert ended.value.code == cli.WRONG
        err = capsys.readouterr().err
        assert "argument --out: " in err and said in err


def test_a_plan_of_another_version_is_refused(tmp_path):
    (tmp_path / "plan.json").write_text(json.dumps({"format": 1, "steps": 3}))
    with pytest.raises(StudyError, match="another version"):
        plan.read(tmp_path)
    with pytest.raises(StudyError, match="holds no plan.json"):
        plan.read(tmp_path / "none")


@pytest.mark.parametrize("content", [b"", b'{"format": 1', b"[1, 2]", b"null", b"\xff\xfe\x00"])
def test_a_broken_plan_is_named(tmp_path, content, capsys):
    (tmp_path / "plan.json").write_bytes(content)
    (tmp_path / "about.json").write_text("{}")
    with pytest.raises(StudyError, match="is broken"):
        plan.settle(tmp_path, make_plan())
    assert cli.main(["--report", "--out", str(tmp_path)]) == cli.WRONG
    err = capsys.readouterr().err
    assert f"{tmp_path / 'plan.json'}: is broken" in err and len(err.splitlines()) == 1
    assert (tmp_path / "plan.json").read_bytes() == content


def test_a_broken_card_of_a_policy_is_named(tmp_path, capsys):
    policy = save_checkpoint(tmp_path / "policy", "qwen3_moe")
    (policy / "policy.json").write_text("{")
    capsys.readouterr()  # a progress bar
    assert cli.main(["--policy", str(policy), "--dry-run"]) == cli.WRONG
    err = capsys.readouterr().err
    assert f"{policy / 'policy.json'}: is broken, no JSON" in err and "remove it" in err and len(err.splitlines()) == 1


def test_the_digest_of_a_policy_sees_weights_and_configuration(policy):
    first = plan.policy_digest(policy)
    assert plan.policy_digest(policy) == first
    (policy / "config.json").write_text('{"a": 1}')
    second = plan.policy_digest(policy)
    (policy / "model.safetensors").write_bytes(b"other weights")
    assert len({first, second, plan.policy_digest(policy)}) == 3
    (policy / "model.safetensors").unlink()
    with pytest.raises(StudyError, match="no \\*.safetensors"):
        plan.policy_digest(policy)


# --- arguments


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--arms", "bf16,fp4"], "--arms: 'fp4' is no arm"),
        (["--seeds", "0"], "--seeds: 0 is too few"),
        (["--steps", "0"], "--steps: 0 is too few"),
        (["--set", "trainer.nnodes"], "--set: 'trainer.nnodes' has no '='"),
        (["--set", "data.no_such_thing=1"], "no_such_thing"),
        (["--set", "quads.rollout.residual.ratio=2"], "quads.rollout.residual.ratio"),
        (["--policy", "/no/such/policy"], "--policy: '/no/such/policy' is no folder"),
        (["--data", "/no/a.parquet", "/no/b.parquet"], "--data: /no/a.parquet: no such file"),
        (["--outlier-strength", "64"], "can't be given other outliers"),
        (["--report"], "--report: needs --out"),
        (["--compare", "/no/such/study"], "/no/such/study has no report"),
    ],
)
def test_wrong_arguments_end_before_anything_starts(policy, tmp_path, capsys, monkeypatch, given, said):
    monkeypatch.chdir(tmp_path)
    given = given if given[0] in ("--policy", "--report", "--compare") else ["--policy", str(policy), *given]
    assert cli.main(given) == cli.WRONG
    assert said in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_the_gpu_preset_needs_gpus(capsys, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["--preset", "gpu"]) == cli.WRONG
    assert "--preset gpu: needs CUDA GPUs" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    assert cli.main(["--preset", "gpu"]) == cli.WRONG
    assert "needs --policy DIR" in capsys.readouterr().err


def test_a_dry_run_shows_the_gpu_plan_anywhere(tmp_path, capsys, monkeypatch):
    """With a policy and data: tests/test_study_preflight.py."""
    import torch

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    assert cli.main(["--preset", "gpu", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "7 arms" in out and "3 seeds x 260 steps of 256 prompts with 16 responses" in out
    assert "can't start here: --preset gpu: needs CUDA GPUs" in out
    assert "can't start here: --preset gpu: needs --policy" in out
    assert cli.main(["--preset", "gpu", "--seeds", "0", "--dry-run"]) == cli.WRONG
    assert not list(tmp_path.iterdir())


def test_the_gpu_preset_is_a_configuration_that_hydra_knows():
    preset = PRESETS["gpu"]
    asked = make_plan(config=preset.config, overrides=preset.overrides, save_every=preset.save_every, data={"a": "b"})
    config = command.compose(asked, "quads_full", 2, FILES, Path("run"))
    assert config.trainer.device == "cuda" and config.quads.arm == "quads_full" and config.trainer.resume_mode == "auto"
    assert list(config.actor_rollout_ref.actor.checkpoint.save_contents)[-1] == "hf_model"
    assert "VERL_PLATFORM" not in command.environment(asked, Path("run"), Path("m"))


def test_a_dry_run_says_what_would_be_done_and_writes_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["--preset", "paper-mini", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "7 arms (bf16, fp8, naive, qat, symmetric, quads, quads_full) x 3 seeds" in out and " min on 2 cores" in out
    assert not list(tmp_path.iterdir())


def test_the_same_command_finds_its_folder_again():
    one, other = arguments("--stress", "long"), arguments("--stress", "long", "--outlier-strength", "64")
    assert prepare.default_folder(one, "outlier") == prepare.default_folder(arguments("--stress", "long"), "outlier")
    assert prepare.default_folder(other, "outlier").name == "study-quick-outlier-long-x64"


def test_the_shown_command_holds_no_folders():
    given = arguments("--policy", "/home/me/secret/policy", "--out", "/home/me/out", "--steps", "3", "--set", "a=1")
    assert prepare.command_line(given) == "quads study --preset quick --policy policy --steps 3 --set a=1"


def test_a_policy_with_other_outliers_is_made_once_and_the_study_can_start(tmp_path):
    study = tmp_path / "study"
    asked = arguments("--outlier-strength", "64", "--out", str(study))
    prepare.commit(prepared := prepare.prepare(asked))
    assert prepared.policy == study / "policy" and policies.outliers_of(prepared.policy)["strength"] == 64
    made = (prepared.policy / "model.safetensors").stat().st_mtime_ns
    prepare.commit(prepare.prepare(asked))  # goes on with the study
    assert (prepared.policy / "model.safetensors").stat().st_mtime_ns == made
    with pytest.raises(StudyError, match="--out: .*policy is a policy with other outliers"):
        prepare.prepare(arguments("--outlier-strength", "4", "--out", str(study)))
    (study / "plan.json").unlink()
    with pytest.raises(StudyError, match="is not empty"):  # data are there
        prepare.prepare(asked)


# --- the commands of the runs


def test_runs_differ_in_arm_and_seed_only():
    asked = make_plan(overrides=("trainer.nnodes=1",))
    one = command.overrides(asked, "naive", 0, FILES, Path("x"))
    other = command.overrides(asked, "quads", 2, FILES, Path("x"))
    differing = {line.split("=")[0] for line in set(one) ^ set(other)}
    assert differing == {
        "quads.arm",
        "actor_rollout_ref.rollout.seed",
        "actor_rollout_ref.actor.data_loader_seed",
        "actor_rollout_ref.actor.fsdp_config.seed",
    }
    assert one[-1] == "trainer.nnodes=1"


def test_a_run_saves_its_final_weights_for_hugging_face():
    config = command.compose(make_plan(steps=7), "qat", 0, FILES, Path("run"))
    assert config.trainer.save_freq == config.trainer.total_training_steps == 7
    assert list(config.actor_rollout_ref.actor.checkpoint.save_contents) == ["hf_model"]
    assert config.trainer.resume_mode == "disable" and config.quads.probe.every == 5


# --- data


def test_arms_share_prompts_and_seeds_do_not(tmp_path):
    import pandas

    from quads_recipe.policy.task import is_heldout

    data.write(tmp_path, (0, 1), train=48, heldout=16, terms=None)
    prompts = {f.name: [p[0]["content"] for p in pandas.read_parquet(f).prompt] for f in tmp_path.glob("*.parquet")}
    assert {name: len(found) for name, found in prompts.items()} == {
        "train-seed0.parquet": 48,
        "train-seed1.parquet": 48,
        "heldout.parquet": 16,
    }
    assert set(prompts["train-seed0.parquet"]) != set(prompts["train-seed1.parquet"])
    assert all(is_heldout(p) for p in prompts["heldout.parquet"])
    assert not any(is_heldout(p) for p in prompts["train-seed0.parquet"] + prompts["train-seed1.parquet"])
    before = (tmp_path / "train-seed0.parquet").stat().st_mtime_ns
    data.write(tmp_path, (0, 1, 2), train=48, heldout=16, terms=None)
    assert (tmp_path / "train-seed0.parquet").stat().st_mtime_ns == before


def test_longer_problems_have_the_terms_asked_for(tmp_path):
    import re

    import pandas

    data.write(tmp_path, (0,), train=32, heldout=8, terms=(5, 7))
    for file in tmp_path.glob("*.parquet"):
        rows = pandas.read_parquet(file)
        counts = {len(re.findall(r"\d+", p[0]["content"])) for p in rows.prompt}
        assert counts <= {5, 6, 7} and len(counts) > 1
        for prompt, truth in zip(rows.prompt, rows.reward_model, strict=True):
            assert eval(prompt[0]["content"].rstrip("=")) == int(truth["ground_truth"])
