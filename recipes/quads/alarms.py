"""Warnings in the log while the rollout drifts away from the actor. docs/metrics.md gives the rules and the reasons.

An alarm is said once when it begins, again whenever its figure has doubled since, and once when it is over.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quads_ops.settings import QuadsSettings
from quads_recipe import alarm_advice
from quads_recipe.alarm_advice import Split
from quads_recipe.alarm_rules import Baseline, Rule, rules
from quads_recipe.settings_difference import compute_otherwise, differences

FILE = "quads_alarms.json"
"""In a checkpoint's folder: what a resumed run continues from."""


class Alarms:
    """The rules of a run, fed with the metrics of each step.

    settings: `alarms` has the thresholds; the rest decides which advice fits.
    """

    def __init__(self, settings: QuadsSettings):
        self._settings = settings
        self._split: Split | None = None
        self._baseline = Baseline(settings.alarms.baseline)
        self._rules: dict[str, Rule] = {}
        if settings.alarms.enabled:
            self._rules = rules(settings.alarms, self._baseline, self._advice)

    def _advice(self) -> str:
        return alarm_advice.mismatch(self._split, self._settings)

    @property
    def active(self) -> int:
        """How many alarms are on."""
        return sum(rule.watch.since is not None for rule in self._rules.values())

    def step(self, step: int, metrics: Mapping[str, float]) -> list[str]:
        """Take the metrics of a step; returns the lines for the log."""
        self._split = Split.of(step, metrics) or self._split
        lines, advised = [], set()
        for rule in self._rules.values():
            if line := self._line(step, rule, metrics, advised):
                lines.append(line)
        self._baseline.add(metrics)
        return lines

    def _line(self, step: int, rule: Rule, metrics: Mapping[str, float], advised: set[str]) -> str | None:
        """advised: what the step's lines before this one have advised already."""
        figure, threshold, since = rule.figure(metrics), rule.threshold(), rule.watch.since
        if figure is None or math.isnan(figure) or threshold is None:
            return None
        event = rule.watch.update(step, figure, threshold)
        if event is None:
            return None
        level = rule.watch.level()
        if event == "over":
            return f"alarm over: step {step}: {rule.gone(level, threshold)} (begun in step {since})"
        name = "alarm" if event == "begun" else "alarm, doubled"
        advice = [sentence for sentence in rule.advice() if sentence not in advised]
        advised.update(advice)
        return ". ".join([f"{name}: step {step}: {rule.found(level, threshold)}", *advice])

    def save(self, folder: Path) -> None:
        """Into a checkpoint's folder: the baseline, what has been said, and the settings. Creates the folder."""
        watches = {
            name: {"recent": list(rule.watch.recent), "since": rule.watch.since, "reported": rule.watch.reported}
            for name, rule in self._rules.items()
        }
        split = None if self._split is None else {"step": self._split.step, "means": dict(self._split.means)}
        folder.mkdir(parents=True, exist_ok=True)
        state = {"baseline": self._baseline.values, "split": split, "watches": watches}
        state["settings"] = self._settings.to_dict()
        (folder / FILE).write_text(json.dumps(state) + "\n")

    def load(self, folder: Path) -> bool:
        """Continue from what `save` wrote, with this run's thresholds. False if there is nothing.

        A run that computes otherwise than the one that saved has another |d|, so it starts anew.
        """
        file = folder / FILE
        if not file.is_file():
            return False
        state = json.loads(file.read_text())
        if compute_otherwise(differences(state.get("settings"), self._settings)):
            return True
        self._baseline.values[:] = state["baseline"][: self._baseline.count]
        self._split = None if state["split"] is None else Split(**state["split"])
        for name, kept in state["watches"].items():
            if name in self._rules:
                watch = self._rules[name].watch
                watch.recent = deque(kept["recent"][-watch.window :])
                watch.since, watch.reported = kept["since"], kept["reported"]
        return True


def saved_settings(folder: Path) -> dict[str, Any] | None:
    """The `quads:` block that a checkpoint was written with; None where its folder does not say.

    Raises:
        ValueError: the file is there, but is not what `save` wrote.
    """
    file = folder / FILE
    if not file.is_file():
        return None
    state = json.loads(file.read_text())
    if not isinstance(state, dict):
        raise ValueError(f"not a mapping: {state!r}")
    return state.get("settings")
