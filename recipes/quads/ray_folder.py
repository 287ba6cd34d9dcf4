"""Ray's folder of a run on a CPU: a private one, since the default is shared by all runs, and gone when the run is."""

from __future__ import annotations

import atexit
import shutil
import sys
import tempfile
import time

import psutil

PREFIX = "quads-"
_PATIENCE_SECONDS = 10.0
"""For workers that outlive Ray's shutdown, which write to the folder to the last."""


def make() -> str:
    """A new folder in TMPDIR, removed when this process ends, unless a signal kills it."""
    folder = tempfile.mkdtemp(prefix=PREFIX)
    atexit.register(_remove, folder)
    return folder


def _remove(folder: str) -> None:
    """Ray is shut down first, because its shutdown writes to the folder.

    Ray's own handler would come too late: they run in the reverse order, and Ray's is there since it was imported.
    """
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        started = psutil.Process().children(recursive=True)  # workers too, which are children of the raylet
        time.sleep(0.5)  # as Ray does: workers' last lines are on their way to the terminal
        ray.shutdown(wait_for_processes=True)
        psutil.wait_procs(started, timeout=_PATIENCE_SECONDS)
    shutil.rmtree(folder, ignore_errors=True)
