"""Checks of the options of `quads study` by themselves: what is out of range, has no effect, or contradicts another."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

from quads_recipe.paths import POLICIES
from quads_recipe.study.plan import StudyError
from quads_recipe.study.presets import PRESETS, STRESSES, contradiction

LIMITS = {"seeds": (1, 1000), "steps": (1, 100_000), "heldout": (2, 100_000), "samples": (1, 1000)}
"""Option -> (least, most). All problems are generated before the first run, a training file for each seed."""
STRENGTHS = (1e-5, 1e5)
"""Of outlier channels. Block scales in E4M3 reach from 448 to 2^-9, a factor of 2.3e5: far beyond, all else is zero."""
_ALONE = {"report": ("report", "out"), "compare": ("compare", "out")}


def given(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> set[str]:
    """Names of the options that are in `argv`, whatever their defaults."""
    names = vars(parser.parse_args([]))
    found = parser.parse_args(argv, argparse.Namespace(**dict.fromkeys(names)))
    return {name for name, value in vars(found).items() if value is not None}


def check_alone(names: set[str]) -> None:
    """Raises StudyError for options that --report or --compare would not look at."""
    for alone, fitting in _ALONE.items():
        if alone in names and (idle := sorted(names - set(fitting))):
            shown = ", ".join(_option(name) for name in idle)
            raise StudyError(f"--{alone}: starts nothing, so {shown} would have no effect; leave it out")


def check(args: argparse.Namespace) -> None:
    """Raises StudyError."""
    for name, (least, most) in LIMITS.items():
        value = getattr(args, name)
        if value is not None and value < least:
            raise StudyError(f"--{name}: {value} is too few; give {least} or more")
        if value is not None and value > most:
            raise StudyError(f"--{name}: {value} is too many; give {most} or fewer")
    if args.jobs < 1:
        raise StudyError(f"--jobs: {args.jobs}; give at least 1")
    if args.policy is not None and not args.policy.strip():
        raise StudyError(f"--policy: {args.policy!r} names no policy; use {', '.join(POLICIES)} or a checkpoint folder")
    _check_outliers(args)
    for file in args.data or ():
        if not file.is_file():
            raise StudyError(f"--data: {file}: no such file; give two verl parquet files")
    if longer := [name for name in args.stress if STRESSES[name].terms and args.data]:
        raise StudyError(
            f"--stress {longer[0]}: longer problems are generated, which --data replaces; leave one of them out"
        )


def _check_outliers(args: argparse.Namespace) -> None:
    strength, (least, most) = args.outlier_strength, STRENGTHS
    if found := contradiction(args.stress):
        one, other, what = found
        raise StudyError(f"--stress: {one} and {other} both set {what}, differently; leave one of them out")
    if strength is None:
        return
    policy = args.policy or PRESETS[args.preset].policy
    if policy != "outlier":
        asked = f"--policy {policy}" if policy else f"the policy of --preset {args.preset}"
        raise StudyError(
            f"--outlier-strength: {asked} can't be given other outliers; leave the option out, or use --policy outlier"
        )
    if not (math.isfinite(strength) and least <= strength <= most):
        raise StudyError(
            f"--outlier-strength: {strength:g} is no factor from {least:g} to {most:g}; give one such as 16"
        )
    if stressed := [name for name in args.stress if "strength" in STRESSES[name].outliers]:
        raise StudyError(f"--outlier-strength: --stress {stressed[0]} sets the same; leave one of them out")


def _option(name: str) -> str:
    return "--set" if name == "overrides" else f"--{name.replace('_', '-')}"
