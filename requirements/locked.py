"""Reading and writing a lock: one `name==version` a line, canonical names, sorted. Standard library only."""

from __future__ import annotations

import re
from pathlib import Path

LINE = re.compile(r"([a-z0-9]+(?:-[a-z0-9]+)*)==([A-Za-z0-9.!]+)")


def canonical(name: str) -> str:
    """The one spelling of a distribution's name: lower case, hyphens."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_lock(path: Path) -> dict[str, str]:
    """{canonical name: version}.

    Raises:
        ValueError: a line that is not `name==version` in canonical form, or a name that comes twice.
    """
    lock: dict[str, str] = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        text = line.split("#", 1)[0].strip()
        if not text:
            continue
        match = LINE.fullmatch(text)
        if not match:
            raise ValueError(f"{path.name}:{number}: {text!r} is not `name==version` (lower case, hyphens)")
        if match[1] in lock:
            raise ValueError(f"{path.name}:{number}: {match[1]} comes twice")
        lock[match[1]] = match[2]
    return lock


def write_lock(path: Path, lock: dict[str, str], header: str) -> None:
    """Write `lock` sorted by name, under `header` (lines that start with #)."""
    lines = [f"{name}=={version}\n" for name, version in sorted(lock.items())]
    path.write_text(header + "".join(lines))
