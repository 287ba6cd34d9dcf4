"""Folders of temporary files in TMPDIR, one for each run: gone when the run is, and after a kill at the next start.

A folder is held by a lock on a file in it, which the system releases when its owner ends, however it ends.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil

from quads_recipe.ending_signals import undisturbed

PREFIX = "qd-"
OWNER = ".owner"
COMPILED = "TORCHINDUCTOR_CACHE_DIR"
"""Where torch keeps what it compiles; in TMPDIR if that is not set."""
_LONGEST = 107 - len("/quads-12345678/session_2026-01-01_00-00-00_000000_0000000/sockets/plasma_store")
"""Bytes of a folder that leave room for the sockets in Ray's own (`ray_folder`): a socket's path may have 107."""
ROOM = _LONGEST - len(f"/{PREFIX}1234")


class ScratchError(Exception):
    """TMPDIR can't be used: the message names it and the remedy."""


class Scratch:
    """A new private folder `path` in TMPDIR, until `remove()`.

    What killed owners left there is removed first. Raises OSError where nothing can be written.
    """

    def __init__(self, prefix: str = PREFIX):
        sweep(prefix)
        self.path = _new(prefix)
        part = self.path / f"{OWNER}.part"
        self._lock = part.open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        part.rename(self.path / OWNER)  # only now `sweep` looks at it

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _new(prefix: str) -> Path:
    """As tempfile.mkdtemp, but with a shorter name, which leaves more room for TMPDIR."""
    while True:
        path = Path(tempfile.gettempdir(), prefix + secrets.token_hex(2))
        try:
            path.mkdir(mode=0o700)
            return path
        except FileExistsError:
            continue


@contextmanager
def made() -> Iterator[Path]:
    """Such a folder, removed at the end; signals that ask this process to end wait for that."""
    with undisturbed():
        scratch = Scratch()
    try:
        yield scratch.path
    finally:
        with undisturbed():
            scratch.remove()


def require_room() -> None:
    """Raises ScratchError if TMPDIR is too long for the sockets of a run on a CPU, whose Ray has its folder there."""
    folder = tempfile.gettempdir()
    if (length := len(os.fsencode(folder))) > ROOM:
        raise ScratchError(
            f"TMPDIR: {folder} has {length} bytes, and Ray's sockets leave room for {ROOM}; use one such as /tmp"
        )


def environment(folder: Path, others: Mapping[str, str]) -> dict[str, str]:
    """What makes `folder` the place of temporary files for a trainer with the environment `others`.

    Without VERL_PLATFORM=cpu Ray keeps the folder that it has without this: a cluster that runs already is found there.
    """
    if others.get("VERL_PLATFORM", "").lower() == "cpu":
        return {"TMPDIR": str(folder)}
    return {"TMPDIR": str(folder), "RAY_TMPDIR": others.get("RAY_TMPDIR", others.get("TMPDIR", "/tmp"))}


@contextmanager
def compiled() -> Iterator[None]:
    """What torch compiles lies in a folder that all processes started meanwhile share, unless the caller has one."""
    if COMPILED in os.environ:
        yield
        return
    with made() as folder:
        os.environ[COMPILED] = str(folder)
        try:
            yield
        finally:
            os.environ.pop(COMPILED, None)


@contextmanager
def as_tmpdir() -> Iterator[None]:
    """TMPDIR of this process, and of what it starts, is such a folder meanwhile."""
    before = {name: os.environ.get(name) for name in ("TMPDIR", COMPILED)}  # torch sets the latter by itself
    with made() as folder:
        os.environ["TMPDIR"], tempfile.tempdir = str(folder), None
        try:
            yield
        finally:
            tempfile.tempdir = None
            for name, value in before.items():
                os.environ.pop(name, None)
                os.environ.update({} if value is None else {name: value})


def sweep(prefix: str) -> None:
    """Removes the folders of owners that are gone, if none of the processes that they started is left either."""
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        if _abandoned(folder) and not _used(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _abandoned(folder: Path) -> bool:
    """Whether this program made it for this user, and its owner has ended."""
    try:
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            return False
        with (folder / OWNER).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _used(folder: Path) -> bool:
    """Whether a process has the folder in its command line or environment."""
    for process in psutil.process_iter():
        try:
            told = [*process.cmdline(), *process.environ().values()]
        except psutil.Error:
            continue
        if any(str(folder) in one for one in told):
            return True
    return False
