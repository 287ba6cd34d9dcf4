"""Runs of a study with a stand-in for the trainer: done, failed, killed, hung, and continued."""

from __future__ import annotations

import io
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from rich.console import Console
from support_study import make_plan, step_line
from support_wait import eventually

from quads_recipe.demo_process import alive
from quads_recipe.demo_report import Step
from quads_recipe.ending_signals import ENDING
from quads_recipe.study import cli, collect, plan, runner
from quads_recipe.study.layout import Layout
from quads_recipe.study.plan import StudyError
from quads_recipe.study.progress import StudyDisplay, describe

TRAINER = """
    import json, os, sys, tempfile, time
    print("temporary", tempfile.mkdtemp(), flush=True)
    metrics, folder, steps, what = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
    if what == "meet":  # the run of the other arm, which must be at work at the same time
        runs = os.path.dirname(folder)
        while not all(os.path.isfile(os.path.join(runs, arm + "-seed0", "log.txt")) for arm in ("bf16", "quads")):
            time.sleep(0.05)
    for step in range(1, steps + 1):
        if what == "crash" and step == 2:
            raise RuntimeError("the rollout fell over")
        data = {"critic/score/mean": 0.1 * step, "quads/logprob_abs_diff_mean": 0.01, "timing_s/step": 0.1}
        with open(metrics, "a") as file:
            file.write(json.dumps({"step": step, "data": data}) + chr(10))
        print("step", step, flush=True)
        if what == "hang" and step == 2:
            time.sleep(600)
        if what == "short" and step == 2:
            sys.exit(0)
    saved = os.path.join(folder, f"checkpoints/global_step_{steps}/actor/huggingface")
    if what != "no weights":
        os.makedirs(saved)
        open(os.path.join(saved, "model.safetensors"), "w").write(what)
"""


def study(tmp_path, terminal=False, what=lambda run: "train", stall=600.0, **changes):
    """(runner, layout, plan, output): a study whose runs of 4 steps do what `what` says."""
    asked = make_plan(**({"steps": 4, "arms": ("bf16", "quads"), "seeds": (0, 1)} | changes))
    layout = Layout(tmp_path)
    plan.settle(tmp_path, asked)

    def build(run, metrics):
        arguments = [str(metrics), str(run.folder), str(asked.steps), what(run)]
        return [sys.executable, "-c", textwrap.dedent(TRAINER), *arguments], {"NOTED": "1"}

    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=140, highlight=False)
    display = StudyDisplay(asked, layout, console)
    return (
        runner.Runner(asked, layout, Path("p"), display, "c0de", build=build, stall_seconds=stall),
        layout,
        asked,
        out,
    )


def train_all(one, layout, asked, jobs=1):
    with one.display:
        return [done for _, done in one.train(layout.runs(asked), jobs)]


def test_every_run_ends_with_weights_metrics_and_a_marker(tmp_path):
    one, layout, asked, out = study(tmp_path)
    assert train_all(one, layout, asked) == [True] * 4
    run = layout.run("quads", 1)
    done = run.done()
    assert (done["arm"], done["seed"], done["steps"], done["attempt"], done["code"]) == ("quads", 1, 4, 1, "c0de")
    assert (run.weights / "model.safetensors").read_text() == "train" and not (run.folder / "checkpoints").exists()
    assert [step["reward"] for step in collect.steps(run.metrics_files())] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert "export NOTED=1" in (run.folder / "command.sh").read_text()
    text = out.getvalue()
    assert "run 3/4: arm bf16, seed 1" in text and "quads-seed1 done in" in text and "reward 0.100 -> 0.400" in text
    assert "step 1/4  reward 0.100  |d| 0.0100  0.1 s" in text and "\x1b[" not in text


@pytest.mark.parametrize("what", ["train", "crash", "hang"])
def test_temporary_files_of_a_run_end_with_it(tmp_path, what):
    patience = 10.0 if what == "hang" else 600.0  # on a busy machine the stand-in takes seconds to say its first word
    one, layout, asked, _ = study(tmp_path, what=lambda run: what, stall=patience, seeds=(0,))
    train_all(one, layout, asked, jobs=2)
    folders = {re.search("temporary (.*)", run.log.read_text())[1] for run in layout.runs(asked)}
    assert len({Path(folder).parent for folder in folders}) == 2
    for folder in folders:
        assert Path(folder).parent.parent == Path(tempfile.gettempdir()) and not Path(folder).parent.exists()


def test_two_runs_at_a_time(tmp_path):
    one, layout, asked, out = study(tmp_path, what=lambda run: "meet" if run.seed == 0 else "train")
    assert train_all(one, layout, asked, jobs=2) == [True] * 4
    text = out.getvalue()
    assert "quads-seed0: step 1/4" in text and "bf16-seed0: step 1/4" in text
    assert [len(collect.steps(run.metrics_files())) for run in layout.runs(asked)] == [4] * 4


def test_a_study_that_ends_early_ends_all_its_trainers(tmp_path):
    one, layout, asked, _ = study(tmp_path, what=lambda run: "hang" if run.arm == "quads" else "train")
    with one.display, closing(one.train(layout.runs(asked), 3)) as ended:
        assert next(ended)[1]
        hung = json.loads((layout.run("quads", 0).folder / "trainer.json").read_text())["pid"]
        assert psutil.pid_exists(hung)
    assert not psutil.pid_exists(hung) and not list(tmp_path.glob("runs/*/trainer.json"))


def test_more_signals_while_its_trainers_are_ended(tmp_path, monkeypatch):
    """A second Ctrl-C between two of them: all are ended, and the study can go on later."""
    end, ended = runner.Attempt.end, []

    def ended_and_interrupted(attempt):
        result = end(attempt)
        ended.append(attempt.run.name)
        os.kill(os.getpid(), signal.SIGINT)
        return result

    monkeypatch.setattr(runner.Attempt, "end", ended_and_interrupted)
    one, layout, asked, _ = study(tmp_path, what=lambda run: "hang")
    handler = signal.getsignal(signal.SIGINT)
    with one.display, closing(one.train(layout.runs(asked), 3)) as runs:
        monkeypatch.setattr(one.display, "update", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            next(runs)
    assert len(ended) == 3 and not list(tmp_path.glob("runs/*/trainer.json"))
    assert signal.getsignal(signal.SIGINT) is handler


def test_an_interruption_while_one_is_closed_ends_it_too(tmp_path, monkeypatch):
    """A run that hung is being closed: nobody else would end it."""
    one, layout, asked, _ = study(tmp_path, what=lambda run: "hang", stall=0.5, arms=("bf16",), seeds=(0,))
    pids = []

    def interrupted(attempt):
        pids.append(attempt._trainer.process.pid)
        raise KeyboardInterrupt

    monkeypatch.setattr(one, "_close", interrupted)
    with one.display, pytest.raises(KeyboardInterrupt):
        next(one.train(layout.runs(asked)))
    assert len(pids) == 1 and not psutil.pid_exists(pids[0])


def test_a_second_signal_to_the_command_is_ignored(monkeypatch):
    """It would end the ending of the trainers, or the report."""
    before = [signal.getsignal(name) for name in ENDING]
    survived = []

    def interrupted(args):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        finally:
            for name in ENDING:
                os.kill(os.getpid(), name)
                survived.append(name)

    monkeypatch.setattr(cli, "run", interrupted)
    assert cli.main([]) == cli.INTERRUPTED
    assert tuple(survived) == ENDING and [signal.getsignal(name) for name in ENDING] == before


def test_a_start_beside_a_running_study_changes_nothing(tmp_path, monkeypatch, capsys):
    prepared = SimpleNamespace(layout=SimpleNamespace(study=tmp_path / "new"), plan=None, policy=None)
    monkeypatch.setattr("quads_recipe.study.prepare.prepare", lambda args: prepared)
    monkeypatch.setattr("quads_recipe.study.prepare.describe", lambda prepared: [])
    monkeypatch.setattr("quads_recipe.study.estimate.describe", lambda plan, policy, jobs: [])
    monkeypatch.setattr("quads_recipe.study.prepare.commit", lambda prepared: pytest.fail("the plan was written"))
    with runner.lock(tmp_path / "new"):
        assert cli.main(["--out", str(tmp_path / "new")]) == cli.WRONG
    assert "another `quads study` is running" in capsys.readouterr().err
    plan.require_ours(tmp_path / "new")


def test_what_is_ignored_stays_ignored(monkeypatch):
    """As SIGHUP is under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        monkeypatch.setattr(cli, "run", lambda args: os.kill(os.getpid(), signal.SIGHUP) or 0)
        assert cli.main([]) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_what_is_done_is_not_done_again(tmp_path):
    one, layout, asked, _ = study(tmp_path, seeds=(0,))
    train_all(one, layout, asked)
    marks = {run.name: (run.folder / "done.json").stat().st_mtime_ns for run in layout.runs(asked)}
    again, layout, grown, _ = study(tmp_path, seeds=(0, 1))
    train_all(again, layout, grown)
    for name, mark in marks.items():
        assert (tmp_path / "runs" / name / "done.json").stat().st_mtime_ns == mark
    assert layout.run("quads", 1).done()


@pytest.mark.parametrize(
    ("what", "cause"),
    [
        ("crash", "RuntimeError: the rollout fell over"),
        ("short", "the trainer logged 2 of 4 steps"),
        ("no weights", "the trainer left no weights in checkpoints/global_step_4/actor/huggingface"),
    ],
)
def test_a_failed_run_leaves_its_cause_and_the_next_one_is_tried(tmp_path, what, cause):
    one, layout, asked, out = study(tmp_path, what=lambda run: what if run.name == "bf16-seed0" else "train")
    assert train_all(one, layout, asked) == [False, True, True, True]
    failed = layout.run("bf16", 0)
    assert any(cause in line for line in failed.failure()["cause"]) and failed.done() is None
    assert "bf16-seed0 FAILED" in out.getvalue() and cause in out.getvalue()
    # Started again, only this one is tried again; its old steps do not count.
    again, layout, asked, _ = study(tmp_path)
    assert train_all(again, layout, asked) == [True] * 4
    assert failed.failure() is None and failed.done()["attempt"] == 1 and len(failed.metrics_files()) == 1


def test_a_hung_run_is_ended_and_counts_as_failed(tmp_path):
    one, layout, asked, _ = study(tmp_path, what=lambda run: "hang", stall=1.0, arms=("bf16",), seeds=(0,))
    assert train_all(one, layout, asked) == [False]
    assert layout.run("bf16", 0).failure()["cause"][0] == "nothing was logged for 1 s, so it was ended"


def test_a_run_with_checkpoints_resumes_and_keeps_its_steps(tmp_path):
    """Presets with `save_every`: the trainer resumes by itself, and its later log counts where both have a step."""
    one, layout, asked, _ = study(tmp_path, save_every=1, arms=("bf16",), seeds=(0,), steps=6)
    run = layout.run("bf16", 0)
    (run.folder / "checkpoints" / "global_step_2").mkdir(parents=True)
    old = [{"step": s, "data": {"critic/score/mean": 0.9, "actor/entropy": 1.0}} for s in (1, 2, 6, 7)]
    (run.folder / "metrics-1.jsonl").write_text("\n".join(map(json.dumps, old)) + '\n{"step": 8, "da')
    one._prepare(run)
    assert len(run.metrics_files()) == 1
    (run.folder / "metrics-2.jsonl").write_text(step_line(6, "bf16", random.Random(0)))
    steps = {int(step["step"]): step for step in collect.steps(run.metrics_files())}
    assert sorted(steps) == [1, 2, 6, 7]
    assert steps[2]["reward"] == 0.9 and steps[6]["reward"] != 0.9 and steps[6]["entropy"] < 0.2


KILLED = """
    import sys
    sys.path.insert(0, {tests!r})
    from pathlib import Path
    import test_study_runner as t
    one, layout, asked, _ = t.study(Path({folder!r}), what=lambda run: "train" if run.arm == "bf16" else "hang")
    t.train_all(one, layout, asked)
"""


@pytest.mark.parametrize("guarded", [True, False])
def test_killed_in_the_middle_and_started_again(tmp_path, guarded):
    """SIGKILL gives the study no chance to end its trainer: a guard does, and without one the next start of the study.

    The next start trains what is missing.
    """
    script = textwrap.dedent(KILLED.format(tests=str(Path(__file__).parent), folder=str(tmp_path)))
    process = subprocess.Popen([sys.executable, "-c", script])
    hung = Layout(tmp_path).run("quads", 0)
    assert eventually(lambda: hung.log.is_file() and "step 2" in hung.log.read_text(), seconds=90)
    trainer = psutil.Process(json.loads((hung.folder / "trainer.json").read_text())["pid"])
    if not guarded:
        for child in psutil.Process(process.pid).children():
            if "quads_recipe.demo_guard" in child.cmdline():
                child.kill()
    process.kill()
    process.wait()
    if guarded:
        assert eventually(lambda: not alive(trainer), seconds=30)
    else:
        assert trainer.is_running()
    mark = (tmp_path / "runs" / "bf16-seed0" / "done.json").stat().st_mtime_ns

    one, layout, asked, out = study(tmp_path)
    assert train_all(one, layout, asked) == [True] * 4
    if not guarded:
        assert not trainer.is_running()
        assert f"ended the trainer {trainer.pid} of an earlier start of quads-seed0" in out.getvalue()
    assert (tmp_path / "runs" / "bf16-seed0" / "done.json").stat().st_mtime_ns == mark
    assert len(collect.steps(hung.metrics_files())) == 4 and hung.done()["attempt"] == 1


def test_an_interrupted_study_ends_its_trainer(tmp_path):
    script = textwrap.dedent(KILLED.format(tests=str(Path(__file__).parent), folder=str(tmp_path)))
    process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True)
    hung = Layout(tmp_path).run("quads", 0)
    assert eventually(lambda: hung.log.is_file() and "step 2" in hung.log.read_text(), seconds=90)
    trainer = psutil.Process(json.loads((hung.folder / "trainer.json").read_text())["pid"])
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in err and not trainer.is_running()
    assert hung.done() is None and hung.failure() is None


def test_a_pid_that_was_given_to_another_process_is_left_alone(tmp_path):
    from quads_recipe.study import leftover

    bystander = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        leftover.remember(tmp_path, bystander.pid)
        facts = json.loads((tmp_path / leftover.FILE).read_text())
        (tmp_path / leftover.FILE).write_text(json.dumps(facts | {"started": facts["started"] - 100}))
        assert leftover.end(tmp_path) is None and bystander.poll() is None
        leftover.remember(tmp_path, bystander.pid)
        assert leftover.end(tmp_path) == bystander.pid and bystander.poll() is not None
    finally:
        bystander.kill()
        bystander.wait()


def test_one_study_at_a_time_in_a_folder(tmp_path):
    with runner.lock(tmp_path):
        with pytest.raises(StudyError, match="another `quads study` is running"):
            runner.lock(tmp_path)
        assert runner.working(tmp_path)
    assert not runner.working(tmp_path)
    runner.lock(tmp_path).close()


def test_whether_a_study_works_is_asked_without_a_trace(tmp_path):
    assert not runner.working(tmp_path) and not runner.working(tmp_path / "none")
    assert not list(tmp_path.iterdir())


def test_a_terminal_shows_the_grid_and_the_time_left(tmp_path):
    one, layout, asked, out = study(tmp_path, terminal=True, what=lambda run: "crash" if run.seed else "train")
    train_all(one, layout, asked)
    shown = Console(file=io.StringIO(), width=140)
    with shown.capture() as capture:
        shown.print(one.display.render())
    lines = capture.get().splitlines()
    assert lines[0].split() == ["arm", "seed", "0", "seed", "1"]
    assert "bf16" in lines[1] and "done" in lines[1] and "failed" in lines[1]
    assert "100% of 4 runs" in capture.get() and "\x1b[" in out.getvalue()


def test_time_left_is_that_of_the_arms_own_runs(tmp_path):
    one, layout, asked, out = study(tmp_path)
    display = one.display
    assert display.eta() is None
    display.seconds = {"bf16": [100.0], "quads": [200.0, 220.0]}
    assert display.eta() == pytest.approx(2 * 100 + 2 * 210)
    run = layout.run("bf16", 0)
    run.folder.mkdir(parents=True)
    display.begin(run, run.folder / "metrics-1.jsonl")
    display.active[run.name].started -= 90
    assert display.eta() == pytest.approx(100 + 2 * 210 + 10, abs=1)
    display.jobs = 2
    assert display.eta() == pytest.approx((100 + 2 * 210 + 10) / 2, abs=1)
    display.jobs = 1
    run.mark_done({"seconds": 90.0})
    display.active[run.name].steps.append(Step(1, reward=0.5))
    display.end(run, [])
    assert "about 9 min of training left" in out.getvalue()
    assert describe(Step(2, reward=0.5), 4) == "step 2/4  reward 0.500"
