"""A trainer that outlived its study is ended before its run starts anew.

Only where the study was killed together with the guard that ends its trainers then (quads_recipe.demo_guard).
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import psutil

from quads_recipe.study.plan import write_atomically

FILE = "trainer.json"


def remember(folder: Path, pid: int) -> None:
    """Notes the trainer of a run: its pid, and when it started, since pids are used again."""
    facts = {"pid": pid, "started": psutil.Process(pid).create_time()}
    write_atomically(folder / FILE, json.dumps(facts) + "\n")


def forget(folder: Path) -> None:
    (folder / FILE).unlink(missing_ok=True)


def end(folder: Path) -> int | None:
    """Ends the session of the trainer that a run's folder names, if it still runs. Returns its pid, or None."""
    file = folder / FILE
    if not file.is_file():
        return None
    facts = json.loads(file.read_text())
    members = _session(facts["pid"], facts["started"])
    for process in members:
        _signal(process.terminate)
    _, alive = psutil.wait_procs(members, timeout=15)
    for process in alive:
        _signal(process.kill)
    psutil.wait_procs(alive, timeout=5)
    forget(folder)
    return facts["pid"] if members else None


def _session(pid: int, started: float) -> list[psutil.Process]:
    """The processes of the session that `pid` leads, and their descendants; none if `pid` is another process now."""
    try:
        if abs(psutil.Process(pid).create_time() - started) > 1:
            return []
    except psutil.NoSuchProcess:
        return []
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == pid:
                found[process.pid] = process
                found |= {child.pid: child for child in process.children(recursive=True)}
        except (psutil.Error, OSError):
            continue
    return list(found.values())


def _signal(send) -> None:
    try:
        send()
    except psutil.Error:
        pass
