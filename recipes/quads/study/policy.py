"""The policy that all runs of a study start from: shipped, given, or made with other outliers."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from quads_recipe.paths import POLICIES, policy_dir
from quads_recipe.study.plan import POLICY, POLICY_PART, StudyError, read_object


def outliers_of(folder: Path) -> dict[str, float] | None:
    """The outlier settings on a policy's card; None if it has none. Raises StudyError: the card is broken."""
    card = folder / "policy.json"
    remedy = "remove it, if the policy is not one of `quads make-policy`, or make the policy again"
    return (read_object(card, remedy).get("outliers") if card.is_file() else None) or None


def find(policy: str, outliers: Mapping[str, float], study: Path) -> Path | None:
    """The folder of the starting policy: shipped, given, or made before; None if it has to be made (`make`).

    outliers: fields of OutlierSettings, if others than the shipped ones are asked for.
    Raises StudyError: no such policy, outliers asked for with another one than `outlier`, or a folder that holds a
    policy with others.
    """
    if not outliers:
        return _given(policy)
    if policy != "outlier":
        raise StudyError(f"--policy: {policy} can't be given other outliers; use --policy outlier")
    wanted, made = settings(outliers), study / POLICY
    for folder in (policy_dir("outlier"), made):
        if outliers_of(folder) == wanted:
            return folder
    if made.exists():
        raise StudyError(f"--out: {made} is a policy with other outliers; give another folder")
    return None


def settings(outliers: Mapping[str, float]) -> dict[str, float]:
    """All fields of OutlierSettings, as on a policy's card."""
    from quads_recipe.policy.outliers import OutlierSettings

    return asdict(OutlierSettings(**outliers))


def _given(policy: str) -> Path:
    try:
        return policy_dir(policy)
    except RuntimeError:
        raise StudyError(f"--policy: {policy}: there is no such user; write out what ~ stands for") from None
    except FileNotFoundError:
        kind = "has no config.json" if Path(policy).expanduser().is_dir() else "is no folder"
        choices = ", ".join(POLICIES)
        raise StudyError(f"--policy: {policy!r} {kind}; use {choices} or a Hugging Face checkpoint folder") from None


def make(study: Path, outliers: Mapping[str, float], report: Callable[[str], None]) -> Path:
    """Makes a policy with these outliers from the natural one, in the study's folder. Returns its folder.

    Raises StudyError: the model has no room for them.
    """
    from quads_recipe.policy.make import make_policy
    from quads_recipe.policy.outliers import OutlierSettings

    wanted, folder = OutlierSettings(**outliers), study / POLICY
    part = folder.with_name(POLICY_PART)
    shutil.rmtree(part, ignore_errors=True)
    report(f"making a policy with outliers of strength {wanted.strength:g}")
    try:
        make_policy(part, "outlier", outliers=wanted, source=policy_dir("natural"), force=True, report=report)
    except ValueError as error:
        raise StudyError(f"--outlier-strength or --stress: {error}") from None
    part.replace(folder)
    return folder
