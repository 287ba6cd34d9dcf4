"""Everything a study found, as one dict of plain values: what results.json holds and all reports are made from."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from quads_ops.settings import ARMS
from quads_recipe.demo_plot import running_mean
from quads_recipe.study import collect, evaluate, plan, statistics
from quads_recipe.study.layout import Layout, Run

Values = dict[str, dict[str, dict[int, float]]]
"""metric -> arm -> seed -> value"""

SMOOTH = 5
"""Steps in the running means of rewards."""
CURVES = ("reward", "d_mean", "d_p99", "d_max", "k3", "entropy", "grad_norm", "length", "changed", "covered")


@dataclass
class Found:
    """What a study's folder holds so far."""

    plan: plan.Plan
    runs: list[Run]
    steps: dict[tuple[str, int], list[collect.Step]] = field(default_factory=dict)
    """Of finished runs, by arm and seed."""
    start: dict[str, dict] = field(default_factory=dict)
    """Engine's name -> evaluation of the starting policy."""
    engines: dict[str, str] = field(default_factory=dict)
    """arm -> name of its engine"""
    final: dict[tuple[str, int], dict[str, dict]] = field(default_factory=dict)
    """(arm, seed) -> {"own", "bf16"} -> evaluation of the final weights."""


def load(folder: Path) -> Found:
    """Reads a study's folder. Raises StudyError: it holds no study, or a file of it is damaged."""
    layout, asked = Layout(folder), plan.read(folder)
    found = Found(asked, layout.runs(asked))
    for run in found.runs:
        if run.done():
            found.steps[run.arm, run.seed] = steps = collect.steps(run.metrics_files())
            collect.require_all(steps, asked.steps, run.folder)
        sides = {side: evaluate.result(layout, f"{run.name}-{side}") for side in ("own", "bf16")}
        if sides["bf16"] is None and sides["own"] and sides["own"]["mode"] == "bf16":
            sides["bf16"] = sides["own"]
        if present := {side: value for side, value in sides.items() if value}:
            found.final[run.arm, run.seed] = present
    for file in sorted(layout.evaluations.glob(f"{evaluate.START}-*.json")):
        found.start[file.stem.removeprefix(f"{evaluate.START}-")] = evaluate.result(layout, file.stem)
    evaluate.require_same(layout, _evaluations(found), asked)
    found.engines = {arm: _engine_name(arm, found) for arm in asked.arms}
    return found


def _evaluations(found: Found) -> dict[str, dict]:
    """Name of its file -> evaluation."""
    named = {f"{evaluate.START}-{engine}": of for engine, of in found.start.items()}
    for (arm, seed), sides in found.final.items():
        shared = sides.get("own") is sides.get("bf16")
        named |= {f"{arm}-seed{seed}-{side}": of for side, of in sides.items() if not (shared and side == "bf16")}
    return named


def _engine_name(arm: str, found: Found) -> str:
    """As its evaluations say, which know the overrides; else the arm's own."""
    for (other, _), sides in found.final.items():
        if other == arm and "own" in sides:
            return evaluate.Engine(sides["own"]["mode"], sides["own"]["ratio"], {}).name
    _, mode, ratio = ARMS[arm]
    return evaluate.Engine(mode, ratio, {}).name


def values(found: Found) -> Values:
    """Every summary figure of every finished run, with pass@1 of the final weights as `own` and `in_bf16`."""
    table: Values = {}
    for (arm, seed), steps in found.steps.items():
        for name, value in collect.summary(steps).items():
            table.setdefault(name, {}).setdefault(arm, {})[seed] = value
    for (arm, seed), sides in found.final.items():
        for side, name in (("own", "own"), ("bf16", "in_bf16")):
            if side in sides:
                table.setdefault(name, {}).setdefault(arm, {})[seed] = sides[side]["pass_at_1"]
    return table


def contents(found: Found, about: Mapping) -> dict:
    """What results.json holds. about: machine, versions and so on."""
    from quads_recipe.study import claims

    table = values(found)
    return {
        "about": dict(about),
        "plan": dataclasses.asdict(found.plan),
        "runs": [_run(run, found) for run in found.runs],
        "notes": notes(found),
        "arms": [_arm(arm, found, table) for arm in found.plan.arms],
        "start": [_start(arm, found) for arm in found.plan.arms],
        "claims": [dataclasses.asdict(outcome) for outcome in claims.judge(table, _start_scores(found))],
        "curves": {name: curves(found, name) for name in CURVES},
        "smooth": {"reward": curves(found, "reward", SMOOTH), "gap": reward_gaps(found, SMOOTH)},
    }


def _run(run: Run, found: Found) -> dict:
    done, failure = run.done(), run.failure()
    facts = done or failure or {}
    steps = found.steps.get((run.arm, run.seed), [])
    sides = found.final.get((run.arm, run.seed), {})
    figures = collect.summary(steps) if steps else {}
    in_steps = sum(collect.series(steps, "seconds"))
    return {
        "arm": run.arm,
        "seed": run.seed,
        "status": "done" if done else "failed" if failure else "missing",
        "cause": (failure or {}).get("cause", []),
        "attempt": facts.get("attempt"),
        "code": facts.get("code"),
        "date": facts.get("date"),
        "steps": len(steps),
        "seconds": facts.get("seconds"),
        "start_seconds": round(facts["seconds"] - in_steps, 1) if done and in_steps else None,
        "figures": figures,
        "own": sides.get("own", {}).get("pass_at_1"),
        "in_bf16": sides.get("bf16", {}).get("pass_at_1"),
    }


def notes(found: Found) -> list[str]:
    """What a reader must know of the figures: files that could not be read, rewards that are left out of means."""
    failures = {run: run.failure() for run in found.runs}
    lines = [failure["cause"][0] for failure in failures.values() if failure and failure.get("broken")]
    for (arm, seed), steps in found.steps.items():
        wrong = [int(step["step"]) for step in steps if not math.isfinite(step["reward"])]
        if wrong:
            text = f"{arm} seed {seed}: no finite reward in {len(wrong)} of {len(steps)} steps"
            lines.append(f"{text} (first step {wrong[0]}), which are left out of its means")
    return lines


def _arm(arm: str, found: Found, table: Values) -> dict:
    actor, rollout, ratio = ARMS[arm]
    figures = {}
    for name, by_arm in table.items():
        if arm in by_arm:
            figures[name] = spread(list(by_arm[arm].values()))
    return {"arm": arm, "actor": actor, "rollout": rollout, "ratio": ratio, "figures": figures}


def spread(many: Sequence[float]) -> dict[str, float | int | None]:
    """mean, standard error over seeds (None with one seed), and n."""
    mean, error = statistics.mean_error(many)
    return {"mean": mean, "error": None if math.isnan(error) else error, "n": len(many)}


def _start(arm: str, found: Found) -> dict:
    """The starting policy in the arm's engine and in BF16: nothing was learned yet, so the gap is the engine's."""
    own, plain = found.start.get(found.engines[arm]), found.start.get("bf16")
    row = {"arm": arm, "engine": found.engines[arm], "own": None, "gap": None}
    if own:
        row["own"] = spread(own["per_problem"])
    if own and plain and own is not plain:
        test = statistics.paired(own["per_problem"], plain["per_problem"], unit="problems")
        row["gap"] = dataclasses.asdict(test)
    return row


def _start_scores(found: Found) -> dict[str, list[float]]:
    """arm -> score per held-out problem of the starting policy in its engine; `bf16` always, if it is there."""
    scores = {arm: found.start[name]["per_problem"] for arm, name in found.engines.items() if name in found.start}
    if "bf16" in found.start:
        scores["bf16"] = found.start["bf16"]["per_problem"]
    return scores


def curves(found: Found, name: str, smooth: int = 1) -> dict[str, dict[str, list]]:
    """arm -> step, mean over seeds, standard error (None with one seed) and n of a metric.

    smooth: every seed's values become running means of so many steps first, so the error is that of the smooth curve.
    """
    return _by_arm(found, {key: _logged(steps, name) for key, steps in found.steps.items()}, smooth)


def reward_gaps(found: Found, smooth: int = 1) -> dict[str, dict[str, list]]:
    """arm -> the curve of its reward minus that of bf16 with the same seed, which saw the same prompts."""
    rewards = {key: _logged(steps, "reward") for key, steps in found.steps.items()}
    gaps = {}
    for (arm, seed), own in rewards.items():
        base = rewards.get(("bf16", seed))
        if arm != "bf16" and base:
            gaps[arm, seed] = {number: own[number] - base[number] for number in own if number in base}
    return _by_arm(found, gaps, smooth)


def _logged(steps: Sequence[collect.Step], name: str) -> dict[int, float]:
    return {int(step["step"]): step[name] for step in steps if name in step and math.isfinite(step[name])}


def _by_arm(found: Found, runs: Mapping[tuple[str, int], Mapping[int, float]], smooth: int) -> dict[str, dict]:
    """runs: (arm, seed) -> step -> value."""
    result = {}
    for arm in found.plan.arms:
        by_step: dict[int, list[float]] = {}
        for (other, _), logged in runs.items():
            if other == arm:
                for number, value in zip(logged, running_mean(list(logged.values()), smooth), strict=True):
                    by_step.setdefault(number, []).append(value)
        if by_step:
            numbers = sorted(by_step)
            spreads = [spread(by_step[number]) for number in numbers]
            result[arm] = {"step": numbers} | {key: [s[key] for s in spreads] for key in ("mean", "error", "n")}
    return result
