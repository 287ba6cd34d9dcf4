"""`make lock`: write requirements/cpu.lock anew from requirements/cpu.in and print what changed.

pip resolves (a dry run; nothing is installed). Packages keep the version they have in the lock unless cpu.in says
another; with --upgrade NAME those named move, with --upgrade alone all of them do. `# left out: NAME` in cpu.in names
what vLLM's metadata requires and its CPU path does not use: pip is offered an empty wheel, the lock does not list it.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from locked import canonical, read_lock, write_lock

HERE = Path(__file__).resolve().parent
HEADER = "# Made by `make lock` from requirements/cpu.in. Installed with --no-deps. Linux, Python 3.11, CPU.\n"
# Meets every requirement on a package that is left out (the strictest is torchcodec>=0.14); no real release has it.
LEFT_OUT_VERSION = "0.14.0+left.out"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make lock", description=__doc__)
    parser.add_argument("--upgrade", nargs="*", metavar="NAME", help="let these packages (none named: all) move")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the lock would change")
    parser.add_argument("--input", type=Path, default=HERE / "cpu.in")
    parser.add_argument("--lock", type=Path, default=HERE / "cpu.lock")
    args = parser.parse_args(argv)

    old = read_lock(args.lock) if args.lock.exists() else {}
    new = resolve(args.input, keep=pins_to_keep(old, args.upgrade))
    changes = diff(old, new)
    print("\n".join(changes) if changes else "no change")
    if args.check:
        return 1 if changes else 0
    write_lock(args.lock, new, HEADER)
    return 0


def pins_to_keep(lock: dict[str, str], upgrade: list[str] | None) -> dict[str, str]:
    """The part of the present lock that pip is held to. `upgrade`: None keeps all, [] keeps none."""
    if upgrade is None:
        return lock
    free = {canonical(name) for name in upgrade}
    if unknown := free - lock.keys():
        sys.exit(f"make lock: not in the lock: {', '.join(sorted(unknown))}")
    return {name: version for name, version in lock.items() if free and name not in free}


def left_out(path: Path) -> list[str]:
    """Names in `# left out: NAME` lines of a requirements input."""
    return [canonical(name) for name in re.findall(r"^# left out: (\S+)$", path.read_text(), flags=re.MULTILINE)]


def specified(path: Path) -> set[str]:
    """Canonical names of the requirements in `path` that say which version."""
    found = re.findall(r"^([A-Za-z0-9][\w.-]*)\s*[=<>!~]", path.read_text(), flags=re.MULTILINE)
    return {canonical(name) for name in found}


def resolve(path: Path, keep: dict[str, str]) -> dict[str, str]:
    """{name: version} of everything that `path` needs, resolved by pip under the constraints `keep`.

    Exits with pip's own words when there is no solution.
    """
    absent = left_out(path)
    free = specified(path).union(absent)
    held = {name: version for name, version in keep.items() if name not in free}
    with tempfile.TemporaryDirectory() as folder:
        wheels, constraints, report = (Path(folder, name) for name in ("wheels", "constraints.txt", "report.json"))
        wheels.mkdir()
        for name in absent:
            empty_wheel(wheels, name)
        lines = [f"{name}=={version}" for name, version in held.items()]
        lines += [f"{name}=={LEFT_OUT_VERSION}" for name in absent]
        constraints.write_text("\n".join(lines) + "\n")
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--no-input"]
        command += ["--find-links", str(wheels), "--constraint", str(constraints), "--report", str(report)]
        command += ["-r", str(path)]
        result = subprocess.run(command, stderr=subprocess.PIPE, text=True)
        if result.returncode:
            sys.exit(f"pip found no solution for {path.name}:\n{without_noise(result.stderr)}")
        return pins(json.loads(report.read_text()), absent)


def pins(report: dict, absent: list[str]) -> dict[str, str]:
    """{name: version without local label} from pip's installation report."""
    found = {canonical(item["metadata"]["name"]): item["metadata"]["version"] for item in report["install"]}
    return {name: version.split("+")[0] for name, version in found.items() if name not in absent}


def empty_wheel(folder: Path, name: str) -> None:
    """A wheel of `name` that holds metadata only."""
    stem = f"{name.replace('-', '_')}-{LEFT_OUT_VERSION}"
    info = f"{stem}.dist-info"
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {LEFT_OUT_VERSION}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", f"{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")


def diff(old: dict[str, str], new: dict[str, str]) -> list[str]:
    """Changed lines, `-` before and `+` after."""
    before, after = ([f"{name}=={version}" for name, version in sorted(lock.items())] for lock in (old, new))
    return [
        line for line in difflib.unified_diff(before, after, lineterm="", n=0) if not re.match(r"@@|---|\+\+\+", line)
    ]


def without_noise(text: str) -> str:
    """pip's stderr without the notices about an index that lacks a package."""
    return "\n".join(line for line in text.splitlines() if not line.startswith("WARNING: Location"))


if __name__ == "__main__":
    sys.exit(main())
