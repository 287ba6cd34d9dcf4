"""A trainer that outlived its study is ended before its run starts anew.

Only where the study was killed together with the guard that ends its trainers then (quads_recipe.demo_guard).
"""

from __future__ import annotations

import json
from pathlib import Path

import psutil

from quads_recipe.demo_process import session, stop
from quads_recipe.study.plan import write_atomically
from quads_recipe.study.reading import number, read_object, whole

FILE = "trainer.json"
_FIELDS = {"pid": whole(2, 2**22), "started": number}  # Linux has no higher pids


def remember(folder: Path, pid: int) -> None:
    """Notes the trainer of a run: its pid, and when it started, since pids are used again."""
    facts = {"pid": pid, "started": psutil.Process(pid).create_time()}
    write_atomically(folder / FILE, json.dumps(facts) + "\n")


def forget(folder: Path) -> None:
    (folder / FILE).unlink(missing_ok=True)


def end(folder: Path) -> int | None:
    """Ends the session of the trainer that a run's folder names, if it still runs. Returns its pid, or None.

    Raises StudyError: the file that names it is broken.
    """
    facts = read(folder)
    if facts is None:
        return None
    members = session(facts["pid"]) if _is(facts["pid"], facts["started"]) else []
    stop(members, patience=15.0)
    forget(folder)
    return facts["pid"] if members else None


def read(folder: Path) -> dict | None:
    """pid and start of the trainer that a run's folder names. Raises StudyError: the file is broken."""
    file = folder / FILE
    remedy = (
        f"it names the trainer of an earlier start: end that one if it still runs (its command line names {folder}), "
        "remove the file, and the same command trains this run"
    )
    return read_object(file, remedy, _FIELDS) if file.exists() else None


def _is(pid: int, started: float) -> bool:
    """False if the process has ended, though another one may have its pid now."""
    try:
        return abs(psutil.Process(pid).create_time() - started) <= 1
    except psutil.NoSuchProcess:
        return False
