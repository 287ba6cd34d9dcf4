"""Evaluations of a study: which are needed, what happens when an engine breaks, and what the engine's process does."""

from __future__ import annotations

import io
import json
import re
import sys
import tempfile
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from support_study import make_plan

from quads_ops.settings import ARMS, QuadsSettings
from quads_recipe.study import evaluate, evaluate_worker, plan, policy
from quads_recipe.study.layout import Layout
from quads_recipe.study.plan import StudyError
from quads_recipe.study.progress import StudyDisplay

BLOCKS = {arm: QuadsSettings.from_dict({"arm": arm}).to_dict() for arm in ARMS}
SETTINGS = evaluate.Settings("heldout.parquet", "train.parquet", 8, 2, 40, 24, "bfloat16", None, "compute_score")

WORKER = """
    import json, os, sys, tempfile
    print("temporary", tempfile.mkdtemp(), flush=True)
    request = json.load(open(sys.argv[1]))
    for job in request["jobs"]:
        if job["name"] in sys.argv[2:]:
            raise ValueError("no room for " + job["name"])
        found = {"pass_at_1": 0.5, "per_problem": [0.0, 1.0], "samples": request["settings"]["samples"]}
        found |= {name: job["engine"][name] for name in ("mode", "ratio")}
        with open(job["result"] + ".part", "w") as file:
            json.dump(found, file)
        os.replace(job["result"] + ".part", job["result"])
"""


@pytest.fixture
def study(tmp_path):
    asked = make_plan()
    plan.settle(tmp_path, asked)
    layout = Layout(tmp_path)
    display = StudyDisplay(asked, layout, Console(file=io.StringIO(), width=140, highlight=False))
    return layout, asked, display


def worker(*breaking):
    return lambda request: [sys.executable, "-c", textwrap.dedent(WORKER), str(request), *breaking]


def names(jobs):
    return [job.name for job in jobs]


def test_arms_with_the_same_engine_share_the_evaluation_of_the_starting_policy(study):
    layout, _, _ = study
    jobs = evaluate.start_jobs(layout, Path("p"), evaluate.engines(BLOCKS))
    assert names(jobs) == ["start-bf16", "start-fp8", "start-w4a4", "start-w4a4-0.5", "start-w4a4-1"]
    only = evaluate.engines({"quads": BLOCKS["quads"]})
    assert names(evaluate.start_jobs(layout, Path("p"), only)) == ["start-bf16", "start-w4a4-0.5"]


def test_weights_are_evaluated_in_their_own_engine_and_in_bf16(study):
    layout, _, _ = study
    engines = evaluate.engines(BLOCKS)
    own, plain = evaluate.run_jobs(layout, layout.run("quads_full", 2), engines)
    assert (own.name, own.engine["mode"], own.engine["ratio"]) == ("quads_full-seed2-own", "w4a4", 1.0)
    assert (plain.name, plain.engine["mode"]) == ("quads_full-seed2-bf16", "bf16") and plain.weights == own.weights
    assert names(evaluate.run_jobs(layout, layout.run("bf16", 0), engines)) == ["bf16-seed0-own"]


def test_overrides_reach_the_engine(study):
    layout, _, _ = study
    block = QuadsSettings.from_dict({"arm": "quads", "rollout": {"residual": {"ratio": 0.25}}}).to_dict()
    [_, job] = evaluate.start_jobs(layout, Path("p"), evaluate.engines({"quads": block}))
    assert job.name == "start-w4a4-0.25"


def test_a_broken_evaluation_does_not_stop_the_others(study):
    layout, _, display = study
    jobs = evaluate.start_jobs(layout, Path("p"), evaluate.engines(BLOCKS))
    failed = evaluate.evaluate(jobs, SETTINGS, layout, display, worker("start-fp8", "start-w4a4-1"))
    assert sorted(failed) == ["start-fp8", "start-w4a4-1"]
    assert "ValueError: no room for start-fp8" in failed["start-fp8"]
    assert evaluate.result(layout, "start-w4a4-0.5")["samples"] == 2
    assert names(evaluate.pending(jobs)) == ["start-fp8", "start-w4a4-1"]
    text = display.console.file.getvalue()
    assert "evaluated start-w4a4: pass@1 0.500" in text and "evaluation start-fp8 FAILED" in text
    assert evaluate.evaluate(jobs, SETTINGS, layout, display, worker()) == {} and not evaluate.pending(jobs)


def test_temporary_files_of_an_evaluation_end_with_it(study):
    layout, _, display = study
    jobs = evaluate.start_jobs(layout, Path("p"), evaluate.engines(BLOCKS))
    evaluate.evaluate(jobs, SETTINGS, layout, display, worker())
    [folder] = re.findall("temporary (.*)", (layout.evaluations / "log.txt").read_text())
    assert Path(folder).parent.parent == Path(tempfile.gettempdir()) and not Path(folder).parent.exists()


def test_more_evaluations_than_one_process_makes(study, monkeypatch):
    layout, _, display = study
    monkeypatch.setattr(evaluate, "PER_PROCESS", 2)
    started = []

    def counted(request):
        started.append(len(json.loads(request.read_text())["jobs"]))
        return worker()(request)

    jobs = evaluate.start_jobs(layout, Path("p"), evaluate.engines(BLOCKS))
    assert evaluate.evaluate(jobs, SETTINGS, layout, display, counted) == {}
    assert started == [2, 2, 1]


def test_weights_are_dropped_only_after_their_evaluations(study):
    layout, _, display = study
    run = layout.run("naive", 0)
    run.weights.mkdir(parents=True)
    jobs = evaluate.run_jobs(layout, run, evaluate.engines(BLOCKS))
    evaluate.drop_weights(jobs, run)
    assert run.weights.exists()
    evaluate.evaluate(jobs, SETTINGS, layout, display, worker())
    evaluate.drop_weights(jobs, run)
    assert not run.weights.exists()


# --- scoring


@pytest.fixture
def problems(tmp_path):
    from quads_recipe.study import data

    data.write(tmp_path, (0,), train=16, heldout=8, terms=None)
    reward = {"reward_path": "pkg://quads_recipe.reward", "reward_name": "compute_score"}
    files = {"heldout": str(tmp_path / data.HELDOUT), "calibration": str(data.train_file(tmp_path, 0))}
    sizes = {"calibration_prompts": 4, "samples": 2, "max_new": 40, "max_prompt": 24, "dtype": "bfloat16"}
    return evaluate_worker.Problems(evaluate.Settings(**files, **sizes, **reward))


def test_responses_are_scored_by_the_runs_own_reward(problems):
    assert len(problems.prompts) == len(problems.rows) == 8 and len(problems.calibration) == 4
    for index, row in enumerate(problems.rows):
        truth = row["reward_model"]["ground_truth"]
        assert problems.score(index, f"1+1=2;x={truth}") == 1.0
        assert problems.score(index, f"{truth}") == 0.0 and problems.score(index, "1+1=99999") == 0.0


def test_a_reward_that_is_no_finite_number_ends_the_evaluation(problems):
    problems._score = lambda **_: {"score": float("nan")}
    with pytest.raises(ValueError, match="reward of held-out problem 3 is nan.*must return a finite number"):
        problems.score(3, "1+1=2")


def test_scores_are_means_over_each_problems_responses(problems):
    truths = [row["reward_model"]["ground_truth"] for row in problems.rows]
    texts = [f"={truths[2]}", "=no", f"={truths[5]}", f"={truths[5]}"]
    generated = [SimpleNamespace(sample=SimpleNamespace(response=(i,))) for i in range(4)]
    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: texts[ids[0]])
    assert evaluate_worker._scores(generated, [2, 5], 2, tokenizer, problems) == [0.5, 1.0]


def test_rewards_of_verl_are_used_where_none_is_given():
    found = evaluate_worker.reward_function(SETTINGS)
    score = found(data_source="openai/gsm8k", solution_str="#### 42", ground_truth="42")
    assert score == 1.0


# --- the starting policy


def test_other_outliers_make_a_policy_once(tmp_path, monkeypatch):
    made = []

    def make(folder, variant, outliers, source, force, report):
        made.append((variant, outliers.strength, outliers.norm_channels, force))
        folder.mkdir(parents=True)
        from dataclasses import asdict

        (folder / "policy.json").write_text(json.dumps({"outliers": asdict(outliers)}))

    monkeypatch.setattr("quads_recipe.policy.make.make_policy", make)
    shipped = tmp_path / "shipped"
    for name, strength in (("natural", None), ("outlier", 16.0)):
        (shipped / name).mkdir(parents=True)
        card = {"strength": strength, "norm_channels": 4, "mlp_channels": 2, "seed": 3} if strength else None
        (shipped / name / "policy.json").write_text(json.dumps({"outliers": card}))
    monkeypatch.setattr(policy, "policy_dir", lambda name: shipped / name)

    study = tmp_path / "study"
    assert policy.find("outlier", {}, study) == shipped / "outlier"
    assert policy.find("outlier", {"strength": 16.0}, study) == shipped / "outlier"
    assert policy.find("outlier", {"strength": 64.0}, study) is None and not made and not study.exists()
    assert policy.make(study, {"strength": 64.0}, print) == study / "policy"
    assert policy.find("outlier", {"strength": 64.0}, study) == study / "policy"
    assert made == [("outlier", 64.0, 4, True)]
    assert policy.outliers_of(shipped / "natural") is None
    with pytest.raises(StudyError, match="use --policy outlier"):
        policy.find("natural", {"strength": 64.0}, study)
