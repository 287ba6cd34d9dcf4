"""Writes what a study found: results.json, its tables as CSV, its drawings as PNG, and study.html with all of it."""

from __future__ import annotations

import csv
import json
import math
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from quads_recipe.study import collect
from quads_recipe.study import results as gathered
from quads_recipe.study.layout import Layout
from quads_recipe.study.reading import Misfit, StudyError, number, optional, record, table, text, whole

PAGE = "study.html"
_TEST = ("kind", "n", "unit", "effect", "error", "df", "t", "p", "low", "high")


def write(folder: Path, about: Mapping) -> dict:
    """Reads a study's folder and writes its report/. Returns the contents of results.json.

    about: what the folder itself doesn't say (see `describe`).
    Files appear there when all of them are written: an earlier report stays whole where that fails (OSError).
    Raises StudyError: the folder holds no study, or a file of it is damaged.
    """
    found = gathered.load(folder)
    _check(folder, about)
    results = gathered.contents(found, {**about, "seconds": _seconds(found)})
    report = Layout(folder).report
    report.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".part-", dir=report) as part:
        _write(Path(part), found, results)
        for file in Path(part).iterdir():
            file.replace(report / file.name)
    return results


_ABOUT = {
    "title": text,
    "command": text,
    "date": text,
    "machine": table(text),
    "outliers": optional(table(number)),
    "prompts_per_step": whole(1),
    "responses": whole(1),
}


def _check(folder: Path, about: Mapping) -> None:
    try:
        record(_ABOUT)(about, "")
        record({} if "gpus" in about["machine"] else {"processor": text, "cores": text})(about["machine"], "machine")
    except Misfit as error:
        remedy = "start the study again with the same arguments, which writes it"
        raise StudyError(f"{folder / 'about.json'}: is broken, {error}; {remedy}") from None


def _write(out: Path, found: gathered.Found, results: dict) -> None:
    from quads_recipe.study import html, plots

    (out / "results.json").write_text(json.dumps(_finite(results), indent=1, allow_nan=False) + "\n")
    for name, rows in tables(found, results).items():
        _write_csv(out / f"{name}.csv", rows)
    drawings = plots.draw_all(results)
    for name, drawing in drawings.items():
        (out / f"{name}.png").write_bytes(drawing.png)
    (out / PAGE).write_text(html.page(results, {name: d.svg for name, d in drawings.items()}), encoding="utf-8")


def _seconds(found: gathered.Found) -> float:
    return sum(done["seconds"] for run in found.runs if (done := run.done()))


def _finite(value):
    """The same with None for what JSON has no number for (an infinite t, a NaN)."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def describe(title: str, command: str, config, outliers: Mapping | None) -> dict:
    """What the report says about the study beside its figures. config: the hydra configuration of a run."""
    from quads_recipe.study.machine import machine

    return {
        "title": title,
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "outliers": dict(outliers) if outliers else None,
        "prompts_per_step": int(config.data.train_batch_size),
        "responses": int(config.actor_rollout_ref.rollout.n),
        "learning_rate": float(config.actor_rollout_ref.actor.optim.lr),
        "max_response": int(config.data.max_response_length),
    }


def tables(found: gathered.Found, results: dict) -> dict[str, list[dict]]:
    """Name of the CSV file -> its rows."""
    return {
        "runs": [_run_row(run) for run in results["runs"]],
        "arms": [_arm_row(arm) for arm in results["arms"]],
        "steps": [
            {"arm": arm, "seed": seed, **{name: step.get(name) for name in ("step", *collect.METRICS)}}
            for (arm, seed), steps in found.steps.items()
            for step in steps
        ],
        "claims": [
            {"claim": o["name"], "status": o["status"], "part": part["text"], "part_status": part["status"]}
            | _test_row(part["test"] or {})
            for o in results["claims"]
            for part in o["parts"]
        ],
        "evaluations": _evaluations(found),
    }


def _test_row(test: Mapping) -> dict:
    row = {key: test.get(key) for key in ("kind", "n", "effect", "error", "df", "t", "p", "low", "high")}
    return row | {"n": None if row["n"] is None else " and ".join(map(str, row["n"]))}  # of each sample


def _run_row(run: Mapping) -> dict:
    kept = ("arm", "seed", "status", "steps", "seconds", "start_seconds", "attempt", "code", "own", "in_bf16")
    return {key: run[key] for key in kept} | dict(run["figures"])


def _arm_row(arm: Mapping) -> dict:
    row = {key: arm[key] for key in ("arm", "actor", "rollout", "ratio")}
    for name, spread in arm["figures"].items():
        row |= {name: spread["mean"], f"{name}_error": spread["error"], f"{name}_n": spread["n"]}
    return row


def _evaluations(found: gathered.Found) -> list[dict]:
    kept = ("mode", "ratio", "pass_at_1", "problems", "samples", "length", "energy_covered", "seconds")
    rows = [{"weights": "start", "seed": None, **{k: of.get(k) for k in kept}} for of in found.start.values()]
    for (arm, seed), sides in found.final.items():
        rows += [{"weights": arm, "seed": seed, **{k: of.get(k) for k in kept}} for of in _unique(sides)]
    return rows


def _unique(sides: Mapping[str, dict]) -> list[dict]:
    return list({id(side): side for side in sides.values()}.values())


def _write_csv(path: Path, rows: list[dict]) -> None:
    if not rows:
        return
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=names)
        writer.writeheader()
        writer.writerows(rows)


def terminal_lines(results: dict) -> list[str]:
    """The table of arms and the claims, for the terminal."""
    from quads_recipe.study.html import headline

    columns = {"d_mean": "mean |d|", "d_max": "max |d|", "reward_first": "first third", "reward_last": "last third"}
    columns |= {"own": "pass@1 own", "in_bf16": "in BF16", "seconds": "s/step"}
    rows = [("arm", *columns.values())]
    for arm in results["arms"]:
        rows.append((arm["arm"], *(_cell(arm["figures"].get(name)) for name in columns)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["", *("  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in rows), ""]
    width = max(len(o["status"]) for o in results["claims"])
    lines += [f"{o['status']:<{width}}  {o['claim']}" for o in results["claims"]]
    lines += [f"note: {note}" for note in results["notes"]]
    return [*lines, "", headline(results)]


def _cell(spread: Mapping | None) -> str:
    if spread is None:
        return "-"
    error = "" if spread["error"] is None else f" +- {spread['error']:.2g}"
    return f"{spread['mean']:.3g}{error}"
