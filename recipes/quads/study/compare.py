"""Several studies side by side: where an arm degrades, from which stress on, and whether another one holds there."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from quads_recipe.study.layout import Layout
from quads_recipe.study.reading import StudyError, many, number, optional, read_object, record, table, text, whole

TABLE, RESULTS = "compare.csv", "results.json"
_CONTENTS = {
    "plan": record({"policy": text, "stress": many(text, 0), "steps": whole(1)}),
    "about": record({"outliers": optional(table(number))}),
    "arms": many(record({"arm": text, "figures": table(record({"mean": optional(number), "n": whole(1)}))})),
}
_FIGURES = ("reward_first", "reward_last", "gain", "collapsed", "d_mean", "d_max", "own", "in_bf16")


def write(studies: Sequence[Path], out: Path) -> list[str]:
    """Writes compare.csv, a row per study and arm, into `out`; returns a table for the terminal.

    studies: folders of studies, or copies of their reports.
    Raises StudyError: a folder without a report, or with a broken one.
    """
    rows = [{"study": study.resolve().name, **row} for study in studies for row in rows_of(_results(study))]
    out.mkdir(parents=True, exist_ok=True)
    with (out / TABLE).open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return [*lines(rows), f"table: {out / TABLE}"]


def _results(study: Path) -> dict:
    file = next((f for f in (Layout(study).report / RESULTS, study / RESULTS) if f.exists()), None)
    if file is None:
        raise StudyError(f"--compare: {study} has no report/{RESULTS} and no {RESULTS}; run or report that study first")
    remedy = f"write it again: quads study --report --out {study}"
    if file.parent == study:
        remedy = "copy the report of its study again"
    return read_object(file, remedy, _CONTENTS)


def rows_of(results: Mapping) -> list[dict]:
    """Per arm of a study: what it was run with, its mean figures, and what it lost against bf16."""
    plan = results["plan"]
    figures = {arm["arm"]: arm["figures"] for arm in results["arms"]}
    base = figures.get("bf16", {})
    rows = []
    for arm, found in figures.items():
        row = {
            "policy": plan["policy"],
            "outliers": " ".join(f"{k}={v:g}" for k, v in (results["about"].get("outliers") or {}).items()),
            "stress": "+".join(plan["stress"]) or "none",
            "steps": plan["steps"],
            "seeds": found.get("reward_last", {}).get("n", 0),
            "arm": arm,
        }
        row |= {name: found.get(name, {}).get("mean") for name in _FIGURES}
        for name in ("reward_last", "own", "in_bf16"):
            own, plain = (of.get(name, {}).get("mean") for of in (found, base))
            row[f"{name}_gap"] = None if own is None or plain is None else own - plain
        rows.append(row)
    return rows


def lines(rows: Sequence[Mapping]) -> list[str]:
    """The table as text."""
    columns = ("study", "policy", "stress", "arm", "seeds", "steps", "d_mean", "reward_first", "reward_last")
    columns += ("collapsed", "reward_last_gap", "own_gap", "in_bf16_gap")
    cells = [columns, *(tuple(_cell(row[name]) for name in columns) for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return ["  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in cells]


def _cell(value) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
