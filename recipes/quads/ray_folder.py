"""Ray's folder of a run on a CPU: a private one, since the default is shared by all runs, and gone when the run is."""

from __future__ import annotations

import atexit
import sys
import time
from pathlib import Path

import psutil

from quads_recipe.scratch import Scratch

PREFIX = "quads-"
_PATIENCE_SECONDS = 10.0
"""For workers that outlive Ray's shutdown, which write to the folder to the last."""


def make() -> str:
    """A new folder in TMPDIR, removed when this process ends; if a signal kills it, by the next run that makes one."""
    scratch = Scratch(PREFIX)
    atexit.register(_remove, scratch)
    return str(scratch.path)


def temporary(folder: str) -> str:
    """A new folder in Ray's, for the temporary files of its workers."""
    path = Path(folder, "tmp")
    path.mkdir()
    return str(path)


def _remove(scratch: Scratch) -> None:
    """Ray is shut down first, because its shutdown writes to the folder.

    Ray's own handler would come too late: they run in the reverse order, and Ray's is there since it was imported.
    """
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        started = psutil.Process().children(recursive=True)  # workers too, which are children of the raylet
        time.sleep(0.5)  # as Ray does: workers' last lines are on their way to the terminal
        ray.shutdown(wait_for_processes=True)
        psutil.wait_procs(started, timeout=_PATIENCE_SECONDS)
    scratch.remove()
