"""The guard: a demo or study that is killed takes its trainer along."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
from support_wait import eventually

from quads_recipe import demo_guard
from quads_recipe.demo_process import TrainerProcess, alive

# A child, one in a session of its own, and one that ignores what asks it to end. The parent ignores SIGINT, as what a
# script starts in the background does.
TREE = """
    import os, signal, subprocess, sys, tempfile, time
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    open(os.path.join(tempfile.gettempdir(), "left"), "w")
    away = subprocess.Popen(["sleep", "601"], start_new_session=True)
    deaf = "import time, signal as s; s.signal(s.SIGTERM, s.SIG_IGN); print('deaf', flush=True); time.sleep(602)"
    deaf = subprocess.Popen([sys.executable, "-c", deaf])
    print("pids", os.getpid(), away.pid, deaf.pid, tempfile.gettempdir(), flush=True)
    time.sleep(600)
"""
DEMO = """
    import os, sys
    from pathlib import Path
    from quads_recipe import demo
    demo.train([sys.executable, "-c", {tree!r}], dict(os.environ), Path({folder!r}), 3)
"""


def guard_of(parent: int) -> psutil.Process:
    [guard] = [p for p in psutil.Process(parent).children() if "quads_recipe.demo_guard" in p.cmdline()]
    return guard


def test_a_killed_demo_takes_all_of_its_trainer_along(tmp_path):
    script = DEMO.format(tree=textwrap.dedent(TREE), folder=str(tmp_path))
    runner = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)])
    log = tmp_path / "log.txt"
    assert eventually(lambda: log.is_file() and all(word in log.read_text() for word in ("pids", "deaf")))
    [line] = [line for line in log.read_text().splitlines() if line.startswith("pids")]
    *pids, scratch = line.split()[1:]
    family = [psutil.Process(int(pid)) for pid in pids]
    guard = guard_of(runner.pid)
    assert all(map(alive, family)) and (Path(scratch) / "left").is_file()
    runner.kill()
    runner.wait()
    assert eventually(lambda: not any(map(alive, [*family, guard])), seconds=40)
    assert not Path(scratch).exists()
    assert "the command that started this trainer was killed" in log.read_text()


def test_a_guard_does_nothing_about_a_trainer_that_was_ended(tmp_path):
    log = tmp_path / "log"
    with TrainerProcess(
        [sys.executable, "-c", "print('done')"], dict(os.environ), log, tmp_path / "scratch"
    ) as trainer:
        (tmp_path / "scratch").mkdir()
        guard = guard_of(os.getpid())
        assert eventually(lambda: trainer.poll() == 0)
    assert not guard.is_running() and log.read_text() == "done\n" and (tmp_path / "scratch").is_dir()


def test_a_command_that_does_not_exist_leaves_no_guard(tmp_path):
    before = psutil.Process().children()
    with pytest.raises(FileNotFoundError):
        TrainerProcess(["/no/such/command"], dict(os.environ), tmp_path / "log")
    assert psutil.Process().children() == before


def test_a_trainer_outlives_its_guard(tmp_path):
    """Whoever kills the guard gets what there was without it."""
    waits = [sys.executable, "-c", "import time; time.sleep(600)"]
    with TrainerProcess(waits, dict(os.environ), tmp_path / "log") as trainer:
        guard_of(os.getpid()).kill()
        time.sleep(0.5)
        assert trainer.poll() is None
    assert trainer.poll() is not None


def test_a_pid_that_was_given_to_another_process_is_left_alone():
    bystander = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        gone = psutil.Process(bystander.pid)
        gone._ident = (bystander.pid, 1.0)  # by this psutil tells processes of one pid apart
        demo_guard.end(gone)
        assert bystander.poll() is None
        demo_guard.end(psutil.Process(bystander.pid))
        assert eventually(lambda: bystander.poll() is not None, seconds=5)
    finally:
        bystander.kill()
        bystander.wait()
