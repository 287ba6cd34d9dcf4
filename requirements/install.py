"""Install requirements/cpu.lock and this package into the environment whose Python runs this file.

`make venv` calls it. Standard library only. Safe to run again: what is there and whole is left alone, what an
interrupted install left half written is installed again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from locked import canonical, read_lock

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements" / "cpu.lock"
LOG = Path(sys.prefix) / "install.log"
BUILD_TOOLS = ("setuptools", "wheel")  # first, because source distributions are built with them (--no-build-isolation)


class InstallError(Exception):
    """The install cannot go on; the text says what to do."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch-index", default="", help="address of a package index that has torch's CPU build")
    args = parser.parse_args(argv)
    try:
        if sys.prefix == sys.base_prefix:
            raise InstallError("This is not a virtual environment. Run `make venv`, which makes one.")
        LOG.write_text("")
        install(read_lock(LOCK), args.torch_index)
    except InstallError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    return 0


def install(lock: dict[str, str], torch_index: str) -> None:
    """Bring the environment to exactly the versions in `lock`, then install this package in editable mode."""
    tools = {name: lock[name] for name in BUILD_TOOLS}
    pip_install([f"{name}=={version}" for name, version in tools.items()], "build tools")
    torch = f"torch=={lock['torch']}"
    index = ["--extra-index-url", torch_index] if torch_index else []
    if "torch" in broken({"torch": lock["torch"]}):
        refuse_cuda_build(torch, index)
        pip_install([*index, torch], torch)
    pip_install(["-r", str(LOCK)], "packages", total=len(lock))
    if damaged := broken(lock):
        names = sorted(damaged)
        print(f"  installing again what is incomplete: {', '.join(names)}", flush=True)
        pip_install([*index, "--ignore-installed", *(f"{name}=={lock[name]}" for name in names)], "incomplete packages")
    if still := broken(lock):
        raise InstallError(f"Still missing or incomplete: {still}. Remove {sys.prefix} and run `make venv` again.")
    pip_install(["--editable", str(ROOT)], "quads-rl (editable)")


def pip_install(arguments: list[str], what: str, total: int = 0) -> None:
    """Run `pip install --no-deps`, showing one line of progress; pip's own output goes to the log.

    Raises:
        InstallError: pip failed; the text holds the end of its output.
    """
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
    collected, tail = 0, []
    with LOG.open("a") as log:
        for line in process.stdout:
            log.write(line)
            if not line.lstrip().startswith("WARNING: Location"):  # one per package where an index lacks it
                tail = [*tail[-24:], line]
            if line.startswith("Collecting "):
                collected += 1
                progress(f"{what}: {collected}{f' of {total}' if total else ''}  {line.split()[1]}", collected)
            elif line.startswith("Installing collected"):
                progress(f"{what}: unpacking {line.count(',') + 1} (this takes a minute or two)", 0)
    if process.wait():
        raise InstallError(f"pip could not install {what}:\n{''.join(tail)}(all of pip's output: {LOG})")
    progress(f"{what}: done", 0, end="\n")


def progress(text: str, count: int, end: str = "") -> None:
    """One line that is rewritten on a terminal; elsewhere every 40th step, so that a CI log stays short."""
    if sys.stdout.isatty():
        print(f"\r\033[K  {text}"[:100], end=end, flush=True)
    elif count % 40 == 0:
        print(f"  {text}", flush=True)


def refuse_cuda_build(torch: str, index: list[str]) -> None:
    """Ask pip which build of torch it would take, before it downloads gigabytes.

    Raises:
        InstallError: it would be a CUDA build (it requires CUDA libraries), or there is none.
    """
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps", "--ignore-installed"]
    command += ["--disable-pip-version-check", "--no-input", "--report", "-", *index, torch]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    remedy = (
        "Say where the CPU build is:  make venv TORCH_INDEX=<address>\n"
        "The address is the one that PyTorch's own install page shows for Linux, Pip, CPU (see docs/install.md)."
    )
    if result.returncode:
        raise InstallError(f"pip finds no {torch} for this Python:\n{result.stderr[-1500:]}\n{remedy}")
    found = json.loads(result.stdout)["install"][0]["metadata"]
    cuda = [name for name in found.get("requires_dist", []) if name.startswith(("nvidia-", "cuda-"))]
    if cuda:
        raise InstallError(
            f"pip would download a CUDA build of {torch} (several GB), which does not fit this lock.\n{remedy}"
        )


def broken(lock: dict[str, str]) -> dict[str, str]:
    """Locked packages that are absent, at another version, or not whole: {name: what is wrong}."""
    found = {canonical(dist.metadata["Name"] or ""): dist for dist in metadata.distributions()}
    problems = {}
    for name, version in lock.items():
        dist = found.get(name)
        if dist is None:
            problems[name] = "absent"
        elif (dist.version or "").split("+")[0] != version.split("+")[0]:
            problems[name] = f"is {dist.version}"
        elif missing := missing_file(dist):
            problems[name] = f"lacks {missing}"
    return problems


def missing_file(dist: metadata.Distribution) -> str | None:
    """The first file that the package's RECORD lists and that is absent or of another size (bytecode aside)."""
    if not dist.files:
        return "RECORD"
    for file in dist.files:
        path = Path(file.locate())
        if path.suffix == ".pyc":
            continue
        if not path.is_file() or (file.size is not None and path.stat().st_size != file.size):
            return str(file)
    return None


if __name__ == "__main__":
    sys.exit(main())
