"""Compiles cpu_qdq.cpp for this machine, once, and keeps the library in a cache folder.

The compiler is $CXX or g++ (11 and 12 were tried; not Clang, which has no `__builtin_shuffle`). The folder is
$QUADS_CACHE_DIR, $XDG_CACHE_HOME/quads or ~/.cache/quads. The file's name is a hash of the source, the flags, the
compiler's version, the processor's features and torch's OpenMP, so nothing stale is ever loaded, also from a folder
that different machines share.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("cpu_qdq.cpp")
# Contracting a * b + c would change results; -march=native makes the library this machine's own.
FLAGS = (
    "-O3 -march=native -std=c++17 -shared -fPIC -fopenmp "
    "-ffp-contract=off -fno-math-errno -fno-trapping-math -Wno-psabi"
).split()
_SECONDS = 120


class BuildError(RuntimeError):
    """The library can't be built here; the message says why and what to do."""


def build() -> tuple[ctypes.CDLL, str]:
    """The loaded library, and one line on where it comes from. Raises BuildError."""
    compiler = _compiler()
    version = _run([compiler, "--version"]).splitlines()[0]
    link = _openmp()
    name = f"cpu_qdq-{_digest(version, *FLAGS, *link)}.so"
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        library = folder / name
        if not library.exists():
            _compile(compiler, link, library)
        return ctypes.CDLL(str(library)), f"{version}; {library}"
    except OSError as error:  # a folder that can't be written, or from which nothing may be loaded
        with tempfile.TemporaryDirectory(prefix="quads-") as private:
            library = Path(private) / name
            _compile(compiler, link, library)
            return _load_private(library), f"{version}; rebuilt in every process, as the cache failed: {error}"


def cache_folder() -> Path:
    """Where compiled libraries are kept. It need not exist."""
    if own := os.environ.get("QUADS_CACHE_DIR"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quads"


def _load_private(library: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise BuildError(f"the compiled library can't be loaded: {error}") from None


def _compiler() -> str:
    wanted = os.environ.get("CXX") or "g++"
    found = shutil.which(wanted)
    if found is None:
        raise BuildError(f"no C++ compiler: {wanted!r} is not on PATH; install g++ or set CXX to one")
    return found


def _compile(compiler: str, link: list[str], library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent, prefix="build-") as scratch:
        output = Path(scratch) / library.name
        _run([compiler, *FLAGS, str(SOURCE), "-o", str(output), *link])
        output.replace(library)  # atomic: other processes see the whole file or none


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} did not run: {error}") from None
    if done.returncode:
        raise BuildError(f"{command[0]} failed with status {done.returncode}: {done.stderr.strip()[-2000:]}")
    return done.stdout


def _openmp() -> list[str]:
    """torch's own OpenMP library, so that a process has one pool of threads; none if torch brings none."""
    root = Path(torch.__file__).parent
    for folder in (root / "lib", root.parent / "torch.libs"):
        for library in sorted(folder.glob("libgomp*.so*")):
            return [str(library)]
    return []


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join((SOURCE.read_text(), _processor(), *parts)).encode()).hexdigest()[:16]


def _processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    keys = ("vendor_id", "cpu family", "model", "stepping", "flags", "Features", "CPU implementer", "CPU part")
    first = dict(line.partition(":")[::2] for line in reversed(lines) if ":" in line)
    first = {key.strip(): value.strip() for key, value in first.items()}
    return platform.machine() + "".join(first.get(key, "") for key in keys)
