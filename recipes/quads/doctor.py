"""`quads doctor`: is everything there that a run needs, and which numeric path would run.

Each check is one line: what was found, and the remedy when something is missing. Exit status 0 when nothing is missing,
1 otherwise. Nothing is started, and neither vLLM nor verl is imported: it takes a few seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING

from quads_ops import compat

if TYPE_CHECKING:
    import torch

GIB = 1024**3
# The demo's processes together peak below this (Ray, trainer and vLLM hold a Python with torch each).
MEMORY_NEEDED = 8 * GIB
# Weight buckets, vLLM's worker messages and Ray's object store lie there. Containers often have 64 MiB.
SHARED_MEMORY_NEEDED = 1 * GIB

PLUGINS = {
    "verl.plugins": ("quads", "quads_recipe.verl_plugin"),
    "vllm.general_plugins": ("quads_nvfp4", "quads_ops.vllm_plugin:register"),
}
ALSO_SHOWN = ("ray", "tensordict", "reasoning-gym", "numpy")

OK, NOTE, MISSING = "ok", "note", "MISSING"


@dataclass(frozen=True)
class Check:
    """One finding: `status` is ok, note (works, but worth knowing) or MISSING (a run would fail: do `remedy`)."""

    name: str
    status: str
    found: str
    remedy: str = ""


def main(argv: list[str] | None = None) -> int:
    """Print the findings; 0 when nothing is missing, else 1."""
    parser = argparse.ArgumentParser(prog="quads doctor", description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    args = parser.parse_args(argv)
    checks = [check for find in CHECKS for check in find()]
    healthy = all(check.status != MISSING for check in checks)
    if args.json:
        print(json.dumps({"ok": healthy, "checks": [asdict(check) for check in checks]}, indent=2))
    else:
        print(as_text(checks))
    return 0 if healthy else 1


def as_text(checks: list[Check]) -> str:
    """The findings as lines, the remedies under them, and a verdict."""
    lines = []
    for check in checks:
        lines.append(f"{check.status:8}{check.name:22}{check.found}")
        if check.remedy:
            lines.append(f"{'':8}{'':22}-> {check.remedy}")
    missing = [check.name for check in checks if check.status == MISSING]
    lines.append(f"\n{len(missing)} missing: {', '.join(missing)}" if missing else "\nNothing is missing.")
    return "\n".join(lines)


def versions() -> Iterator[Check]:
    """Python, this package, the packages whose versions matter, and a few that are only shown."""
    python = platform.python_version()
    fine = sys.version_info[:2] in ((3, 11), (3, 12))
    yield Check(
        "python", OK if fine else MISSING, f"{python} ({sys.prefix})", "" if fine else "use Python 3.11 or 3.12"
    )
    yield Check("quads-rl", OK, f"{compat.installed_version('quads-rl')} ({Path(__file__).resolve().parent})")
    for package in compat.TRIED_VERSIONS:
        found = compat.distribution(package)
        text = "not installed" if found is None else found[1] if found[0] == package else f"{found[1]} ({found[0]})"
        trouble = compat.problem(package)
        allowed = found is not None and os.environ.get(compat.ALLOW_UNTESTED) == "1"
        yield Check(package, OK if not trouble else NOTE if allowed else MISSING, text, trouble or "")
    for package in ALSO_SHOWN:
        found = compat.installed_version(package)
        remedy = "" if found else "install requirements/cpu.lock (`make venv`)"
        yield Check(package, OK if found else MISSING, found or "not installed", remedy)


def device() -> Iterator[Check]:
    """The device that torch sees, and the path that would run on it."""
    import torch

    if torch.cuda.is_available():
        here = torch.device("cuda", torch.cuda.current_device())
        capability = torch.cuda.get_device_capability()
        name = f"{torch.cuda.get_device_name()} (sm_{capability[0]}{capability[1]}), CUDA {torch.version.cuda}"
    else:
        here = torch.device("cpu")
        name = f"CPU, {os.cpu_count()} cores, {instruction_set()}"
    yield Check("device", OK, name)
    yield path(here)


def attention() -> Iterator[Check]:
    """flash-attn, which verl's actor uses on a GPU unless told otherwise."""
    import torch

    if not torch.cuda.is_available():
        return
    found = compat.installed_version("flash-attn")
    remedy = "install it (docs/install.md), or set +actor_rollout_ref.model.override_config.attn_implementation=sdpa"
    yield Check("flash-attn", OK if found else NOTE, found or "not installed", "" if found else remedy)


def path(here: torch.device) -> Check:
    """Which path NVFP4 takes on a device, in the words of the dispatch itself."""
    from quads_ops import cpu_build, dispatch

    try:
        text = dispatch.describe(here)
    except (ValueError, cpu_build.BuildError) as error:
        return Check("path", MISSING, str(error), "see QUADS_BACKEND and QUADS_CPU_QDQ in docs/install.md")
    if here.type == "cpu":
        return Check("path", OK, text)
    possible, reason = dispatch.can_run("emulated", dispatch.GEMM, here)
    if not possible:
        remedy = "use a GPU of compute capability 8.0 or newer, or the CPU (CUDA_VISIBLE_DEVICES= VERL_PLATFORM=cpu)"
        return Check("path", MISSING, f"{text}: {reason}", remedy)
    if "triton" not in text:
        return Check("path", NOTE, text, "QUADS_BACKEND asks for it; without, the Triton kernels run")
    if text.startswith(("ampere", "ada")):
        return Check("path", NOTE, f"{text}, not tried on GPUs older than Hopper")
    return Check("path", OK, text)


def instruction_set() -> str:
    """The widest vector instructions that vLLM's CPU kernels would use."""
    info = Path("/proc/cpuinfo")
    flags = info.read_text().split() if info.exists() else []
    return next((name for name in ("avx512f", "avx2") if name in flags), platform.machine())


def cpu_kernel() -> Iterator[Check]:
    """How NVFP4 is computed on the CPU; builds the library if it isn't in the cache yet."""
    from quads_ops import cpu_build, cpu_qdq

    try:
        found = cpu_qdq.path()
    except (ValueError, cpu_build.BuildError) as error:
        yield Check("CPU kernel", MISSING, str(error), "see QUADS_CPU_QDQ in docs/install.md")
        return
    remedy = "" if found.name == "compiled" else "many times slower than compiled; see QUADS_CPU_QDQ in docs/install.md"
    yield Check("CPU kernel", NOTE if remedy else OK, f"{found.name} ({found.reason})", remedy)


def plugins() -> Iterator[Check]:
    """Both entry points are registered and lead to this package's files."""
    for group, (name, value) in PLUGINS.items():
        label = group.split(".")[0] + " plugin"
        remedy = "install the package: pip install --no-deps --no-build-isolation -e ."
        entry = next((entry for entry in metadata.entry_points(group=group) if entry.name == name), None)
        if entry is None:
            yield Check(label, MISSING, f"{group}:{name} is not registered", remedy)
        elif entry.value != value:
            yield Check(label, MISSING, f"{group}:{name} is {entry.value}, not {value}", remedy)
        elif (problem := misdirected(entry.module)) is not None:
            yield Check(label, MISSING, problem, remedy)
        else:
            yield Check(label, OK, f"{group}:{name} = {entry.value}")


def misdirected(module: str) -> str | None:
    """What is wrong with where `module` would be imported from; None when it is the package that is running."""
    import quads_ops
    import quads_recipe

    owner = {"quads_ops": quads_ops, "quads_recipe": quads_recipe}[module.split(".")[0]]
    expected = Path(owner.__file__).resolve().parent
    spec = util.find_spec(module)
    if spec is None or spec.origin is None:
        return f"{module} can't be found"
    if Path(spec.origin).resolve().parent != expected:
        return f"{module} would come from {spec.origin}, not from {expected}"
    return None


def stale_metadata() -> Iterator[Check]:
    """A quads_rl.egg-info in the working directory (or in the checkout) is read before the installed metadata."""
    folders = {Path.cwd(), checkout() or Path.cwd()}
    for path in sorted(info for folder in folders for info in folder.glob("quads_rl.egg-info")):
        found = {(entry.group, entry.name): entry.value for entry in metadata.Distribution.at(path).entry_points}
        hidden = [group for group, (name, value) in PLUGINS.items() if found.get((group, name)) != value]
        effect = f"hides {' and '.join(hidden)}" if hidden else "agrees with the installed metadata today"
        yield Check("stale metadata", MISSING if hidden else NOTE, f"{path} {effect}", f"remove it: rm -r {path}")


def checkout() -> Path | None:
    """The root of the source tree, when the package runs from one (editable install)."""
    root = Path(__file__).resolve().parents[2]
    return root if (root / "setup.cfg").is_file() else None


def ray() -> Iterator[Check]:
    """Ray imports (its native part is what breaks when it does)."""
    try:
        import ray as module
    except Exception as error:  # whatever a broken native library raises is the finding
        yield Check("ray imports", MISSING, f"{type(error).__name__}: {error}", "install it again: make venv")
    else:
        yield Check("ray imports", OK, Path(module.__file__).parent.as_posix())


def shared_memory() -> Iterator[Check]:
    """/dev/shm: its free space."""
    path = Path("/dev/shm")
    free = shutil.disk_usage(path).free if path.is_dir() else 0
    enough = free >= SHARED_MEMORY_NEEDED
    remedy = f"{size(SHARED_MEMORY_NEEDED)} are needed; remove leftovers there, or give a container more: --shm-size=4g"
    yield Check("/dev/shm", OK if enough else MISSING, f"{size(free)} free", "" if enough else remedy)


def memory() -> Iterator[Check]:
    """Main memory, a container's limit included."""
    total, available = memory_limits()
    text = f"{size(available)} available of {size(total)}"
    if total < MEMORY_NEEDED:
        yield Check("memory", MISSING, text, f"the demo needs {size(MEMORY_NEEDED)}; use a machine that has more")
    elif available < MEMORY_NEEDED:
        yield Check("memory", NOTE, text, f"the demo needs {size(MEMORY_NEEDED)}; end what else is running")
    else:
        yield Check("memory", OK, text)


def memory_limits() -> tuple[int, int]:
    """(total, available) bytes: the machine's, or less where a cgroup (v2) limits this process."""
    import psutil

    machine = psutil.virtual_memory()
    total, available = machine.total, machine.available
    limit, used = (Path("/sys/fs/cgroup", name) for name in ("memory.max", "memory.current"))
    if limit.is_file() and used.is_file() and (text := limit.read_text().strip()).isdigit():
        total = min(total, int(text))
        available = min(available, max(0, int(text) - int(used.read_text())))
    return total, available


def compiler() -> Iterator[Check]:
    """A C++ compiler (for the CPU path's kernel and torch.compile) and Python's headers."""
    found = shutil.which(os.environ.get("CXX") or "g++")
    remedy = "the CPU kernel and torch.compile need one: set CXX, or on Debian and Ubuntu apt-get install g++"
    yield Check("C++ compiler", OK if found else MISSING, found or "none found", "" if found else remedy)
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    remedy = "torch.compile needs it; on Debian and Ubuntu: apt-get install python3.11-dev"
    there = header.is_file()
    yield Check(
        "Python headers", OK if there else MISSING, str(header) if there else "none found", "" if there else remedy
    )


def shipped_files() -> Iterator[Check]:
    """The hydra configs and the demo's policies, in a checkout as well as in a regular install."""
    from quads_recipe import paths

    wanted = {"configs": paths.configs_dir}
    wanted |= {f"policy {name}": partial(policy_weights, name) for name in paths.POLICIES}
    for name, find in wanted.items():
        try:
            yield Check(name, OK, str(find()))
        except FileNotFoundError as error:
            yield Check(name, MISSING, str(error), "install the package again from a complete checkout")


def policy_weights(name: str) -> Path:
    """The weights of a shipped policy. Raises FileNotFoundError if there are none."""
    from quads_recipe import paths

    folder = paths.policy_dir(name)
    found = next(folder.glob("*.safetensors"), None)
    if found is None:
        raise FileNotFoundError(f"{folder} has no *.safetensors")
    return found


def size(count: int) -> str:
    """Bytes as GiB."""
    return f"{count / GIB:.1f} GiB"


CHECKS: tuple[Callable[[], Iterator[Check]], ...] = (
    versions,
    device,
    attention,
    cpu_kernel,
    plugins,
    stale_metadata,
    ray,
    shared_memory,
    memory,
    compiler,
    shipped_files,
)

if __name__ == "__main__":
    sys.exit(main())
