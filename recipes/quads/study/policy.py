"""The policy that all runs of a study start from: shipped, given, or made with other outliers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from quads_recipe.paths import policy_dir
from quads_recipe.study.plan import POLICY, StudyError, read_object


def outliers_of(folder: Path) -> dict[str, float] | None:
    """The outlier settings on a policy's card; None if it has none. Raises StudyError: the card is broken."""
    card = folder / "policy.json"
    remedy = "remove it, if the policy is not one of `quads make-policy`, or make the policy again"
    return (read_object(card, remedy).get("outliers") if card.is_file() else None) or None


def resolve(policy: str, outliers: dict[str, float], study: Path, report: Callable[[str], None]) -> Path:
    """The folder of the starting policy. With `outliers` (fields of OutlierSettings) it is made from the natural one,
    once, in the study's folder, unless the shipped one has exactly these.

    Raises StudyError: outliers asked for with another policy, settings that the model has no room for, or a folder that
    holds a policy with others.
    """
    if not outliers:
        return policy_dir(policy)
    if policy != "outlier":
        raise StudyError(f"--policy: {policy} can't be given other outliers; use --policy outlier")
    from dataclasses import asdict

    from quads_recipe.policy.outliers import OutlierSettings

    wanted = asdict(OutlierSettings(**outliers))
    made = study / POLICY
    for folder in (policy_dir("outlier"), made):
        if outliers_of(folder) == wanted:
            return folder
    if made.exists():
        raise StudyError(f"--out: {made} is a policy with other outliers; give another folder")
    return _make(made, OutlierSettings(**outliers), report)


def _make(folder: Path, outliers, report: Callable[[str], None]) -> Path:
    from quads_recipe.policy.make import make_policy

    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    report(f"making a policy with outliers of strength {outliers.strength:g}")
    try:
        make_policy(part, "outlier", outliers=outliers, source=policy_dir("natural"), force=True, report=report)
    except ValueError as error:
        raise StudyError(f"--outlier-strength or --stress: {error}") from None
    part.replace(folder)
    return folder
