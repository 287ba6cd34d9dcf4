"""The demo around the trainer: metrics, table, curves, progress, the subprocess and its errors."""

import argparse
import io
import json
import os
import signal
import statistics
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy
import psutil
import pytest
from rich.console import Console
from support_wait import eventually

from quads_recipe import cli, demo, demo_plot, demo_report
from quads_recipe.demo_data import balance, write_data
from quads_recipe.demo_process import LogTail, TrainerProcess, clean, error_lines
from quads_recipe.demo_progress import RunDisplay
from quads_recipe.paths import configs_dir, hydra_value, policy_dir
from quads_recipe.policy.task import is_heldout, problems


def line(step, **data):
    return json.dumps({"step": step, "data": data})


def full_line(step, reward, seconds=5.0):
    return line(
        step,
        **{
            "critic/score/mean": reward,
            "quads/logprob_abs_diff_mean": 0.005,
            "quads/logprob_abs_diff_p99": 0.12,
            "quads/logprob_abs_diff_max": 0.5 + step,
            "quads/changed_codes_mean": 0.0123,
            "quads/receipts_equal_min": 1.0,
            "timing_s/step": seconds,
            "timing_s/gen": 3.0,
            "timing_s/update_actor": 1.0,
        },
    )


REWARDS = [0.4, 0.5] * 10 + [0.6, 0.8] * 5


@pytest.fixture
def metrics():
    return demo_report.parse([full_line(i + 1, reward) for i, reward in enumerate(REWARDS)])


def test_table_has_a_row_per_step_and_the_columns_line_up(metrics):
    lines = demo_report.table(metrics.steps[:2]).splitlines()
    assert lines[0].split("  ")[0] == "step" and lines[0].endswith("changed codes  seconds")
    assert lines[1].split() == ["1", "0.400", "0.0050", "0.1200", "1.500", "1.23%", "5.0"]
    assert len({len(one) for one in lines}) == 1


def test_missing_metrics_are_dashes():
    parsed = demo_report.parse([line(1, **{"critic/rewards/mean": 0.25, "quads/logprob_abs_diff_mean": None})])
    assert demo_report.cells(parsed.steps[0]) == ["1", "0.250", "-", "-", "-", "-", "-"]
    assert demo_report.verdict(parsed) == []


def test_lines_of_one_step_are_joined_and_broken_ones_left_out():
    lines = [
        line(0, **{"val-core/chain_sum/reward/mean@1": 0.75}),
        line(1, **{"critic/score/mean": 0.5}),
        line(1, **{"timing_s/step": 4.0}),
        full_line(2, 0.5)[:20],
    ]
    parsed = demo_report.parse(lines)
    assert [(s.step, s.reward, s.seconds) for s in parsed.steps] == [(1, 0.5, 4.0)]
    assert parsed.validation == [(0, 0.75)]


def test_progress_compares_first_and_last_ten_with_standard_errors(metrics):
    p = demo_report.progress(metrics.steps)
    error_first = statistics.stdev(REWARDS[:10]) / 10**0.5
    error_last = statistics.stdev(REWARDS[-10:]) / 10**0.5
    assert p.window == 10
    assert (p.first, p.first_error) == pytest.approx((0.45, error_first))
    assert (p.last, p.last_error) == pytest.approx((0.7, error_last))
    assert (p.gain, p.gain_error) == pytest.approx((0.25, (error_first**2 + error_last**2) ** 0.5))


def test_a_short_run_is_compared_by_halves(metrics):
    assert demo_report.progress(metrics.steps[:7]).window == 3
    assert demo_report.progress(metrics.steps[:3]) is None


def test_verdict_states_gain_receipts_and_mismatch(metrics):
    text = "\n".join(demo_report.verdict(metrics))
    assert "first 10 steps 0.450 +- 0.017, last 10 steps 0.700 +- 0.033; gain +0.250 +- 0.037 (6.7 standard" in text
    assert "receipts equal at 30 of 30 syncs" in text
    assert "mean 0.005, p99 0.12, largest 30.5 nats" in text
    unequal = demo_report.parse([full_line(1, 0.5), line(1, **{"quads/receipts_equal_min": 0.0})])
    assert "receipts equal at 0 of 1 syncs" in demo_report.verdict(unequal)


def test_curves_are_drawn_where_there_is_data(metrics, tmp_path):
    import matplotlib.image

    bare = demo_report.parse([line(i, **{"critic/score/mean": 0.5}) for i in range(1, 4)])
    colors = []
    for name, drawn in (("full", metrics), ("bare", bare)):
        demo_plot.draw(drawn, tmp_path / f"{name}.png", name)
        image = matplotlib.image.imread(tmp_path / f"{name}.png")[..., :3]
        assert image.shape[1] > 1000
        height, width = image.shape[0] // 2, image.shape[1] // 2
        panels = [image[:height, :width], image[:height, width:], image[height:, :width], image[height:, width:]]
        colors.append([float(numpy.ptp(panel, axis=-1).sum()) for panel in panels])
    full, empty = colors
    assert all(amount > 100 for amount in full)
    assert empty[0] > 100 and empty[1:] == [0.0, 0.0, 0.0]  # grey text only


def test_report_command_writes_table_and_png(metrics, tmp_path, capsys):
    file = tmp_path / "metrics.jsonl"
    file.write_text("\n".join(full_line(i + 1, r) for i, r in enumerate(REWARDS)))
    assert cli.main(["report", str(file)]) == 0
    assert "gain +0.250" in capsys.readouterr().out and (tmp_path / "metrics.png").stat().st_size > 10_000
    assert cli.main(["report", str(tmp_path / "none.jsonl")]) == 1
    assert "no training steps" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"step": 1, "data": {}}\n[1, 2]\n', "line 2: [1, 2] is not {"),
        (b"7\n", "line 1: 7 is not {"),
        (b'{"step": 1}\n', "line 1: {'step': 1} is not {"),
        (b'{"step": 1, "data": [1]}\n', "line 1: "),
        (b'{"step": "one", "data": {}}\n', "line 1: step: 'one' is no number"),
        (b'{"step": null, "data": {}}\n', "line 1: step: 'None' is no number"),
        (b'{"step": NaN, "data": {}}\n', "line 1: step: nan is no step"),
        (b'{"step": 3, "data": {"critic/score/mean": "high"}}\n', "step 3: critic/score/mean: 'high' is no number"),
        (b'{"step": 3, "data": {"val-core/x/reward/mean@1": {}}}\n', "step 3: val-core/x/reward/mean@1: '{}' is no"),
        (b"\x89PNG\r\n\x1a\n\xff\xfe", "is no text"),
    ],
)
def test_a_file_of_something_else_is_refused_in_one_line(content, said, tmp_path, capsys):
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(content)
    assert cli.main(["report", str(file)]) == 2
    err = capsys.readouterr().err
    assert said in err and str(file) in err and "file logger" in err and len(err.splitlines()) == 1
    assert cli.main(["report", str(tmp_path)]) == 2
    assert "is a folder; give the file in it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("curves.xyz", "unknown extension '.xyz'; use one of"),
        ("", "'' names no file"),
        ("folder", "is a folder"),
        ("folder.png", "is a folder"),
        ("metrics.jsonl/x.png", "metrics.jsonl is a file, so nothing can be written in it"),
        ("/proc/none/x.png", "can't write /proc/none/x.png"),
        ("metrics.png", "is the file of the metrics"),
    ],
)
def test_a_drawing_that_cannot_be_written_names_its_option(given, said, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("folder", "folder.png"):
        (tmp_path / name).mkdir()
    file = "metrics.png" if given == "metrics.png" else "metrics.jsonl"
    for name in {file, "metrics.jsonl"}:
        (tmp_path / name).write_text(full_line(1, 0.5))
    assert cli.main(["report", file, "--png", given]) == 2
    err = capsys.readouterr().err
    assert "--png: " in err and said in err and len(err.splitlines()) == 1


def test_a_drawing_gets_its_folder_and_its_extension(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text(full_line(1, 0.5))
    for given, written in (("a/b/curves", "a/b/curves.png"), ("curves.pdf", "curves.pdf")):
        assert cli.main(["report", str(tmp_path / "metrics.jsonl"), "--png", str(tmp_path / given)]) == 0
        assert (tmp_path / written).stat().st_size > 1000
        assert f"curves: {tmp_path / written}" in capsys.readouterr().out


def test_running_mean_uses_what_there_is_at_the_start():
    assert demo_plot.running_mean([1, 2, 3, 4], window=2) == [1, 1.5, 2.5, 3.5]


def test_data_is_what_verl_reads_and_the_splits_are_apart(tmp_path):
    from omegaconf import OmegaConf
    from verl.utils.dataset.rl_dataset import RLHFDataset

    from quads_recipe.policy.tokenizer import build_tokenizer

    train, heldout = write_data(tmp_path, train=64, heldout=16)
    config = OmegaConf.create({"max_prompt_length": 16, "filter_overlong_prompts": True, "cache_dir": str(tmp_path)})
    dataset = RLHFDataset([str(train)], build_tokenizer(), config)
    assert len(dataset) == 64
    assert dataset[0]["reward_model"]["ground_truth"] == problems_of(train)[0][1]
    assert not any(is_heldout(prompt) for prompt, _ in problems_of(train))
    assert all(is_heldout(prompt) for prompt, _ in problems_of(heldout))


def problems_of(file):
    import pandas

    rows = pandas.read_parquet(file)
    return [(r.prompt[0]["content"], r.reward_model["ground_truth"]) for r in rows.itertuples()]


def test_balanced_order_gives_every_batch_the_same_mix():
    chosen = problems("train", 400)
    ordered = balance(chosen)

    def kinds(part):
        return sorted((p.entry["metadata"]["num_terms"], p.entry["metadata"]["num_digits"]) for p in part)

    assert sorted(p.prompt for p in ordered) == sorted(p.prompt for p in chosen)
    assert kinds(ordered[:16]) == kinds(ordered[16:32]) and len(set(kinds(ordered[:16]))) == 4


def test_log_tail_gives_whole_lines_once(tmp_path):
    tail = LogTail(tmp_path / "log")
    assert tail.lines() == []
    with (tmp_path / "log").open("w") as log:
        for written, seen in (("a\nb", ["a"]), ("c\n", ["bc"]), ("", [])):
            log.write(written)
            log.flush()
            assert tail.lines() == seen


def test_lines_lose_colours_and_rays_prefix():
    assert clean("\x1b[36m(TaskRunnerV1 pid=12, ip=10.0.0.1)\x1b[0m quads: path cpu\r\n") == "quads: path cpu"
    assert clean("50%\r100%") == "100%"


def test_error_lines_pick_the_cause_out_of_the_log(tmp_path):
    log = tmp_path / "log"
    log.write_text(
        "INFO all is well, no errors so far\n"
        "Error executing job with overrides: ['quads.arm=x']\n"
        "Traceback (most recent call last):\n"
        '  File "x.py", line 1, in f\n'
        "\x1b[36m(WorkerDict pid=77)\x1b[0m quads_ops.receipt.ReceiptMismatch: layers.0.q_proj: codes differ\n"
        "\x1b[36m(WorkerDict pid=78)\x1b[0m quads_ops.receipt.ReceiptMismatch: layers.0.q_proj: codes differ\n"
        "quads: error: quads.arm = 'x': must be one of bf16\n"
        "bye\n"
    )
    assert error_lines(log) == [
        "quads_ops.receipt.ReceiptMismatch: layers.0.q_proj: codes differ",
        "quads: error: quads.arm = 'x': must be one of bf16",
    ]
    log.write_text("first\n\nKilled")
    assert error_lines(log) == ["first", "Killed"]


def test_an_error_that_ends_with_a_colon_is_shown_with_its_cause(tmp_path):
    log = tmp_path / "log"
    log.write_text(
        "Error executing job with overrides: ['quads.arm=bf16']\n"
        "Error in call to target 'verl.workers.config.optimizer.FSDPOptimizerConfig':\n"
        "TypeError(\"FSDPOptimizerConfig.__init__() got an unexpected keyword argument 'lrr'\")\n"
        "full_key: actor_rollout_ref.actor.optim\n\n"
        "Set the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.\n"
    )
    assert error_lines(log) == [
        "Error in call to target 'verl.workers.config.optimizer.FSDPOptimizerConfig':",
        "TypeError(\"FSDPOptimizerConfig.__init__() got an unexpected keyword argument 'lrr'\")",
        "full_key: actor_rollout_ref.actor.optim",
    ]
    log.write_text("ValueError: these do not fit:\nheads 3\nbye\nRuntimeError: the end is missing:")
    assert error_lines(log) == ["ValueError: these do not fit:", "heads 3", "RuntimeError: the end is missing:"]


DEATH = (
    "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.\n"
    "\tclass_name: {0}\n\tactor_id: 8b3c\n"
    "\x1b[36m(WorkerDict pid=78)\x1b[0m loading\n"
    "\tpid: {1}\n\tnamespace: 1f\n\tip: 10.0.0.1\n"
    "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: "
    "Worker unexpectedly exits. (1) The process is killed by SIGKILL by OOM killer due to high memory usage.\n"
)


def test_error_lines_say_which_worker_died_and_why(tmp_path):
    log = tmp_path / "log"
    handled = "".join(f"ValueError: handled {i}: fine\n" for i in range(9))
    log.write_text(handled + DEATH.format("WorkerDict", 1) + handled + DEATH.format("TaskRunner", 77) + "bye\n")
    assert error_lines(log) == [
        "ValueError: handled 7: fine",
        "ValueError: handled 8: fine",
        "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.",
        "class_name: TaskRunner",
        "pid: 77",
        DEATH.splitlines()[-1],
    ]
    log.write_text(DEATH.format("TaskRunner", 77) + handled)
    assert len(found := error_lines(log)) == 6 and "SIGKILL by OOM killer" in found[3]
    assert found[4:] == ["ValueError: handled 7: fine", "ValueError: handled 8: fine"]


def test_an_error_that_comes_again_counts_where_it_comes_last(tmp_path):
    log = tmp_path / "log"
    others = [f"TypeError: {i}" for i in range(8)]
    log.write_text("\n".join(["KeyError: 'a': gone", *others, "KeyError: 'a': gone"]))
    assert error_lines(log) == [*others[-5:], "KeyError: 'a': gone"]


def test_the_remedy_at_the_end_of_a_long_error_is_shown(tmp_path):
    import torch

    from quads_recipe.weight_finite import FiniteCheck, NonFiniteWeightsError

    check = FiniteCheck()
    for layer in range(9):
        check.add(f"model.layers.{layer}.post_attention_layernorm.weight", torch.tensor([float("inf")]))
    with pytest.raises(NonFiniteWeightsError) as caught:
        check.require()
    log = tmp_path / "log"
    log.write_text(f"(WorkerDict pid=7) quads_recipe.weight_finite.NonFiniteWeightsError: {caught.value}\n")
    assert error_lines(log)[-1].endswith("with a lower actor_rollout_ref.actor.optim.lr")


def display(tmp_path, terminal):
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=120, highlight=False)
    return out, RunDisplay(tmp_path / "metrics.jsonl", tmp_path / "log.txt", 3, console)


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_shows_notices_and_steps_as_they_come(tmp_path, terminal):
    out, shown = display(tmp_path, terminal)
    with shown:
        shown.update()
        (tmp_path / "log.txt").write_text("noise\n(Worker pid=3) quads: path cpu emulated\nquads: path cpu emulated\n")
        (tmp_path / "metrics.jsonl").write_text(full_line(1, 0.5, seconds=50.0) + "\n")
        shown.update()
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write(full_line(2, 0.625) + "\n" + full_line(3, 0.7)[:30])
        with (tmp_path / "log.txt").open("a") as file:
            file.write("quads: synced again\n(TaskRunner pid=9) quads: alarm: step 2: mean |d| is 0.06 nats\n")
        shown.update()
    text = out.getvalue()
    assert "quads: alarm: step 2: mean |d|" in text
    assert text.count("quads: path cpu emulated") == 1 and "noise" not in text and "synced again" not in text
    # The first step is slow, so the time left is told from the second on.
    assert "step 1/3  reward 0.500  |d| 0.0050 (p99 0.120)  50.0 s\n" in text
    assert "step 2/3  reward 0.625  |d| 0.0050 (p99 0.120)  5.0 s  5 s left\n" in text and "step 3/3" not in text
    assert terminal == ("\x1b[" in text)


TREE = """
    import subprocess, sys, time
    subprocess.Popen(["sleep", "600"])
    subprocess.Popen(["sleep", "601"], start_new_session=True)
    deaf = "import time, signal as s; s.signal(s.SIGTERM, s.SIG_IGN); print('deaf', flush=True); time.sleep(602)"
    subprocess.Popen([sys.executable, "-c", deaf])
    time.sleep(600)
"""


def test_ending_the_trainer_ends_all_that_it_started(tmp_path):
    """A child, a child in a session of its own, and one that ignores SIGTERM."""
    log = tmp_path / "log"
    with TrainerProcess([sys.executable, "-c", textwrap.dedent(TREE)], dict(os.environ), log) as trainer:
        assert eventually(lambda: len(trainer.members()) == 4 and "deaf" in log.read_text())
        members = trainer.members()
    assert not [p for p in members if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert trainer.poll() == -signal.SIGINT


def test_a_failing_trainer_is_reported_with_its_error(tmp_path, capsys):
    command = [sys.executable, "-c", "raise ValueError('the lattice is broken')"]
    assert demo.train(command, dict(os.environ), tmp_path, steps=3) == 1
    err = capsys.readouterr().err
    assert "status 1" in err and "ValueError: the lattice is broken" in err and str(tmp_path / "log.txt") in err


def test_an_interrupted_demo_ends_its_trainer(tmp_path):
    """Ctrl-C while the trainer runs: exit status 130, and the trainer is gone."""
    script = f"""
        import os, sys
        from pathlib import Path
        from quads_recipe import demo
        child = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
        sys.exit(demo.train([sys.executable, "-c", child], dict(os.environ), Path({str(tmp_path)!r}), 3))
    """
    runner = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stderr=subprocess.PIPE, text=True)
    log = tmp_path / "log.txt"
    assert eventually(lambda: log.is_file() and log.read_text().strip())
    trainer = psutil.Process(int(log.read_text()))
    runner.send_signal(signal.SIGINT)
    _, err = runner.communicate(timeout=60)
    assert runner.returncode == demo.INTERRUPTED and "interrupted" in err
    assert not trainer.is_running()


def test_a_second_signal_does_not_save_a_stubborn_trainer(tmp_path):
    """The trainer ignores SIGINT and SIGTERM; signals that come while it is being ended change nothing."""
    script = f"""
        import os, signal, sys
        from pathlib import Path
        from quads_recipe import demo, demo_process
        end = demo_process.TrainerProcess.end
        demo_process.TrainerProcess.end = lambda self: end(self, patience=4.0)
        signal.signal(signal.SIGTERM, demo._interrupt)
        child = "import os, signal as s, time; s.signal(s.SIGINT, s.SIG_IGN); s.signal(s.SIGTERM, s.SIG_IGN);"
        child += "print(os.getpid(), flush=True); time.sleep(600)"
        sys.exit(demo.train([sys.executable, "-c", child], dict(os.environ), Path({str(tmp_path)!r}), 3))
    """
    runner = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stderr=subprocess.PIPE, text=True)
    log = tmp_path / "log.txt"
    assert eventually(lambda: log.is_file() and log.read_text().strip())
    trainer = psutil.Process(int(log.read_text()))
    runner.send_signal(signal.SIGINT)
    for again in (signal.SIGINT, signal.SIGTERM):
        time.sleep(1.0)
        assert trainer.is_running() and runner.poll() is None
        runner.send_signal(again)
    _, err = runner.communicate(timeout=60)
    assert runner.returncode == demo.INTERRUPTED and "interrupted" in err and "Traceback" not in err
    assert not trainer.is_running()


def test_handlers_are_back_after_a_trainer_was_ended(tmp_path):
    before = [signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    with TrainerProcess([sys.executable, "-c", "pass"], dict(os.environ), tmp_path / "log"):
        pass
    assert [signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


@pytest.mark.parametrize("ignored", [True, False])
def test_an_ignored_signal_stays_ignored(tmp_path, monkeypatch, ignored):
    """As SIGHUP is under nohup; otherwise it ends the demo as Ctrl-C does."""

    def train(*_):
        os.kill(os.getpid(), signal.SIGHUP)
        return 7

    monkeypatch.setattr(demo, "train", train)
    monkeypatch.setattr(demo, "report", lambda *_: None)
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    arguments = ["--steps", "1", "--run-dir", str(tmp_path / "run")]
    try:
        if ignored:
            assert demo.main(arguments) == 7
        else:
            with pytest.raises(KeyboardInterrupt):
                demo.main(arguments)
    finally:
        signal.signal(signal.SIGHUP, former)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--arm", "fp4"], "--arm: 'fp4'"),
        (["--steps", "0"], "--steps: 0"),
        (["--seed", "-1"], "--seed: -1"),
        (["--set", "trainer.nnodes"], "--set: 'trainer.nnodes'"),
        (["--policy", "/no/such/policy"], "/no/such/policy"),
        (["--policy", ""], "--policy: '' names no model"),
        (["--run-dir", ""], "--run-dir: '' names no folder"),
        (["--run-dir", "/proc/foo"], "--run-dir: can't write in /proc/foo (No such file or directory); give another"),
        (["--run-dir", __file__], f"--run-dir: {__file__} is a file; give a folder"),
        (["--run-dir", f"{__file__}/run"], "(Not a directory); give another folder"),
    ],
)
def test_wrong_arguments_are_named_before_anything_starts(arguments, named, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert demo.main(arguments) == 2
    assert named in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["new/deep", "empty", "with space"])
def test_a_run_folder_that_is_new_or_empty_is_fine(tmp_path, name):
    (tmp_path / "empty").mkdir()
    assert demo.make_run_dir(str(tmp_path / name)) == tmp_path / name
    assert os.access(tmp_path / name, os.W_OK)


def test_a_run_folder_with_something_in_it_is_refused(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text("")
    assert demo.main(["--run-dir", str(tmp_path)]) == 2
    assert "not empty" in capsys.readouterr().err


def test_command_sets_what_hydra_knows_and_overrides_come_last(tmp_path):
    """Composed by hydra itself: a key that verl's configuration lacks would be refused."""
    from hydra import compose, initialize_config_dir

    args = demo.parser().parse_args(["--arm", "naive", "--steps", "7", "--seed", "3", "--set", "trainer.nnodes=2"])
    command = demo.build_command(args, policy_dir("natural"), tmp_path, (tmp_path / "a", tmp_path / "b"))
    assert command[1:7] == ["-m", "verl.trainer.main_ppo", "--config-path", str(configs_dir()), "--config-name"] + [
        "quads_demo"
    ]
    assert command[-1] == "trainer.nnodes=2"
    overrides = [part for part in command[7:] if not part.startswith("hydra.")]
    with initialize_config_dir(str(configs_dir()), version_base=None):
        config = compose("quads_demo", overrides=overrides)
    assert config.quads.arm == "naive" and config.trainer.total_training_steps == 7 and config.trainer.nnodes == 2
    assert list(config.trainer.logger) == ["console", "tensorboard", "file"]
    assert config.actor_rollout_ref.rollout.seed == 3


@pytest.mark.parametrize(
    "name", ["plain-1.0", "run A", "ü", "a=b", "a,b", "(a)", "[a]", "{a}", "it's", "a#b", "a;b~c&d"]
)
def test_a_folder_of_any_name_reaches_the_run(name):
    from hydra import compose, initialize_config_dir

    path = Path("/data") / name / "x.parquet"
    with initialize_config_dir(str(configs_dir()), version_base=None):
        config = compose("quads_demo", [f"data.train_files={hydra_value(path)}"])
    assert config.data.train_files == str(path)


def test_prepare_writes_data_and_a_command_that_can_be_run_by_hand(tmp_path):
    args = argparse.Namespace(arm="quads", steps=2, policy="natural", seed=0, run_dir=tmp_path / "run", overrides=[])
    run_dir, command, environment = demo.prepare(args)
    script = (run_dir / "command.sh").read_text()
    assert environment["VERL_FILE_LOGGER_PATH"] == str(run_dir / "metrics.jsonl")
    assert "export VERL_PLATFORM=cpu" in script and "trainer.total_training_steps=2" in script
    assert subprocess.run(["sh", "-n", run_dir / "command.sh"]).returncode == 0
    assert (run_dir / "data" / "train.parquet").is_file() and command[0] == sys.executable


def test_the_command_run_again_by_hand_keeps_the_metrics_that_are_there(tmp_path):
    """The script itself, with a program in place of the trainer that opens the file as verl's logger does."""
    folder = tmp_path / "it's a run"
    folder.mkdir()
    child = "import os, sys; open(os.environ['VERL_FILE_LOGGER_PATH'], 'wb').write(sys.argv[1].encode())"
    demo._write_script(folder / "command.sh", [sys.executable, "-c", child], demo.run_environment(folder))
    for i in (1, 2, 3):
        subprocess.run([folder / "command.sh", str(i)], check=True)
    found = {file.name: file.read_text() for file in folder.glob("*.jsonl")}
    assert found == {"metrics.jsonl": "1", "metrics-2.jsonl": "2", "metrics-3.jsonl": "3"}


def test_unknown_command_lists_the_known_ones(capsys):
    assert cli.main(["dmeo"]) == 2
    assert "unknown command 'dmeo'" in (err := capsys.readouterr().err) and "make-policy" in err
    assert cli.main(["--help"]) == 0


def test_help_is_instant():
    """No command line that only asks for help may import torch."""
    code = "import sys; from quads_recipe.cli import main; main(['--help']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0
