"""What the terminal is told before a study starts: options with another effect than it seems, what is not checked."""

from __future__ import annotations

import argparse
from pathlib import Path

from quads_recipe.study.command import DEMO_CONFIG
from quads_recipe.study.plan import Plan

READ_GIB = 8
"""Weights up to this size are looked through for NaN and infinity at every start: about 3 s a GiB."""
RUN_GIB = 7
"""What a run of the small policies takes at its peak."""


def lines(
    args: argparse.Namespace, plan: Plan, policy: Path | None, heldout: int, of_prompts: str | None = None
) -> tuple[str, ...]:
    """policy: its folder, if there is one. heldout: number of held-out problems. of_prompts: a warning of theirs."""
    import psutil

    found, runs = [f"warning: {of_prompts}"] if of_prompts else [], len(plan.runs())
    if args.jobs > runs:
        found.append(f"note: --jobs {args.jobs}: {_only(runs)}")
    jobs, memory = min(args.jobs, runs), psutil.virtual_memory().total / 2**30
    if jobs > 1 and plan.config != DEMO_CONFIG:
        found.append(f"warning: --jobs {args.jobs}: the runs would share the GPUs, of which each takes all")
    elif jobs > 1 and jobs * RUN_GIB > memory:
        found.append(
            f"warning: --jobs {args.jobs}: {jobs} runs need about {jobs * RUN_GIB} GiB, and this machine has "
            f"{memory:.0f}; give {max(1, int(memory // RUN_GIB))}"
        )
    if policy and (size := weights_gib(policy)) > READ_GIB:
        found.append(
            f"note: {size:.0f} GiB of weights were not looked through for NaN and infinity; every run does it at its "
            "first weight sync"
        )
    if args.heldout is not None and args.data:
        found.append(
            f"note: --heldout {args.heldout}: has no effect with --data, whose {heldout} problems are all used"
        )
    return tuple(found)


def _only(runs: int) -> str:
    return "there is only 1 run" if runs == 1 else f"there are only {runs} runs, which all work at the same time"


def weights_gib(folder: Path) -> float:
    """Size of the safetensors files in a checkpoint's folder."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 2**30
