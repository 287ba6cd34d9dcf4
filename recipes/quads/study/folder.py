"""Checks of a study's folder before anything is written: that it can be made, and that its parts are what they were."""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path

from quads_recipe.study.plan import PLAN, POLICY, StudyError, require_ours

FOLDERS = {
    "runs": "runs",
    "data": "problems",
    "evaluations": "evaluations",
    "report": "report",
    POLICY: "starting policy",
}
FILES = (PLAN, "about.json", ".lock")


def require_usable(folder: Path) -> None:
    """Leaves no trace, neither in the folder nor beside it.

    Raises StudyError: it can't be made, can't be written to, or holds something else than a study.
    """
    try:
        folder.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:  # a name that is too long, a folder that may not be entered
        raise StudyError(f"--out: {folder}: {error.strerror}; give another folder") from None
    require_parts(folder)
    require_ours(folder)
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir():
        raise StudyError(f"--out: {folder} can't be made: {there} is a file; give another folder")
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise StudyError(f"--out: can't write in {there}: {error.strerror}; give another folder") from None


def require_parts(folder: Path) -> None:
    """Raises StudyError for a file where a study has a folder, and the reverse."""
    for name, what in FOLDERS.items():
        if (part := folder / name).exists() and not part.is_dir():
            raise StudyError(f"--out: {part} is a file, where a study keeps its {what}; move it away")
    for name in FILES:
        if (part := folder / name).is_dir():
            raise StudyError(f"--out: {part} is a folder, where a study has a file; move it away")


def explained(error: OSError) -> str:
    """An error of the file system that no check foresaw, with its file and a remedy."""
    if error.strerror is None:  # one of ours, which says all
        return str(error)
    remedy = "make room there" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "repair that"
    return f"{error.filename or 'a file'}: {error.strerror}; {remedy}, or give another --out"
