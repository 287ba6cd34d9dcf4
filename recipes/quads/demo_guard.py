"""Ends a trainer whose parent, `quads demo` or `quads study`, died without ending it, as after `kill -9`.

Run by `quads_recipe.demo_process.TrainerProcess`, with its standard input a pipe: the trainer's pid comes in, and then
nothing until the parent is gone. In the ordinary course of things the parent kills it instead.
"""

from __future__ import annotations

import shutil
import sys

import psutil

from quads_recipe.demo_process import session, stop

PATIENCE_SECONDS = 10.0
"""For the trainer to shut Ray down by itself."""


def main(argv: list[str]) -> int:
    """argv: a folder of temporary files to remove, if there is one."""
    pid = sys.stdin.readline().strip()
    trainer = _process(int(pid)) if pid else None
    sys.stdin.read()  # returns when the parent is gone
    if trainer is not None:
        end(trainer)
    for folder in argv:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def _process(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None


def end(trainer: psutil.Process) -> None:
    """Ends its session, and what started from there; nothing if its pid belongs to another process by now."""
    if not trainer.is_running() and psutil.pid_exists(trainer.pid):
        return
    members = session(trainer.pid)
    if not members:
        return
    print("quads: error: the command that started this trainer was killed; the trainer is being ended", flush=True)
    try:
        trainer.terminate()  # not SIGINT, which a script's background commands ignore
        trainer.wait(PATIENCE_SECONDS)
    except psutil.Error:  # it has ended, or it does not listen
        pass
    stop(members + session(trainer.pid))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
