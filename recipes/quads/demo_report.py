"""What a run did: reads the metrics that verl's file logger wrote, prints a table and a verdict, draws the curves.

Usage: quads report METRICS.jsonl [--png FILE] [--title TEXT]
"""

import argparse
import json
import re
import statistics
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path

# Field of Step: the metric names it may come under, the first one that is there counts.
METRICS = {
    "reward": ("critic/score/mean", "critic/rewards/mean"),
    "d_mean": ("quads/logprob_abs_diff_mean",),
    "d_p99": ("quads/logprob_abs_diff_p99",),
    "d_max": ("quads/logprob_abs_diff_max",),
    "changed": ("quads/changed_codes_mean",),
    "receipts_equal": ("quads/receipts_equal_min",),
    "seconds": ("timing_s/step",),
    "generate": ("timing_s/gen",),
    "update": ("timing_s/update_actor",),
    "sync": ("timing_s/update_weights", "quads/sync_seconds_max"),
}
_VALIDATION = re.compile(r"^val-core/.+/mean@\d+$")


@dataclass(frozen=True)
class Step:
    """One training step; None where the run did not log a metric.

    d_*: |logp_rollout - logp_actor| over the step's tokens, nats. changed: share of weight codes that differ from those
    of the sync before. receipts_equal: 1 if both sides hold the same codes. The rest are seconds.
    """

    step: int
    reward: float | None = None
    d_mean: float | None = None
    d_p99: float | None = None
    d_max: float | None = None
    changed: float | None = None
    receipts_equal: float | None = None
    seconds: float | None = None
    generate: float | None = None
    update: float | None = None
    sync: float | None = None


@dataclass(frozen=True)
class Metrics:
    """`steps` in order; `validation`: (step, held-out reward) where the run validated."""

    steps: list[Step] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)


def parse(lines: list[str]) -> Metrics:
    """From lines of verl's file logger, `{"step": n, "data": {name: value}}`. A line that is not whole yet is left out.

    A step that was logged in several lines becomes one; lines without a reward count for validation only.
    """
    merged: dict[int, dict] = {}
    for line in lines:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        merged.setdefault(int(record["step"]), {}).update(record["data"])
    metrics = Metrics()
    for number, data in sorted(merged.items()):
        step = _step(number, data)
        if step.reward is not None:
            metrics.steps.append(step)
        metrics.validation.extend((number, float(v)) for k, v in data.items() if _VALIDATION.match(k))
    return metrics


def _step(number: int, data: dict) -> Step:
    values = {}
    for name, sources in METRICS.items():
        found = next((data[source] for source in sources if data.get(source) is not None), None)
        values[name] = None if found is None else float(found)
    return Step(number, **values)


def read(path: Path) -> Metrics:
    """Metrics of a file; empty ones if the file is not there yet."""
    return parse(path.read_text().splitlines()) if path.is_file() else Metrics()


@dataclass(frozen=True)
class Progress:
    """Mean reward of the first and of the last `window` steps, each with its standard error over the steps."""

    window: int
    first: float
    first_error: float
    last: float
    last_error: float

    @property
    def gain(self) -> float:
        return self.last - self.first

    @property
    def gain_error(self) -> float:
        return (self.first_error**2 + self.last_error**2) ** 0.5


def progress(steps: list[Step], window: int = 10) -> Progress | None:
    """Compares the first and last `window` steps (half of the run each where it is shorter); None below 4 steps."""
    rewards = [step.reward for step in steps]
    window = min(window, len(rewards) // 2)
    if window < 2:
        return None
    return Progress(window, *_mean_error(rewards[:window]), *_mean_error(rewards[-window:]))


def _mean_error(values: list[float]) -> tuple[float, float]:
    return statistics.fmean(values), statistics.stdev(values) / len(values) ** 0.5


def verdict(metrics: Metrics) -> list[str]:
    """Lines that say what came out: reward, receipts, |d|, held-out reward, time."""
    steps, lines = metrics.steps, []
    if p := progress(steps):
        significance = f"{p.gain / p.gain_error:.1f} standard errors" if p.gain_error else "no spread"
        lines.append(
            f"mean reward: first {p.window} steps {p.first:.3f} +- {p.first_error:.3f}, "
            f"last {p.window} steps {p.last:.3f} +- {p.last_error:.3f}; "
            f"gain {p.gain:+.3f} +- {p.gain_error:.3f} ({significance})"
        )
    receipts = [s.receipts_equal for s in steps if s.receipts_equal is not None]
    if receipts:
        equal = sum(value == 1 for value in receipts)
        lines.append(f"receipts equal at {equal} of {len(receipts)} syncs")
    means = {name: _present(steps, name) for name in ("d_mean", "d_p99", "d_max")}
    if means["d_mean"]:
        parts = [f"mean {statistics.fmean(means['d_mean']):.4g}"]
        parts += [f"p99 {statistics.fmean(means['d_p99']):.4g}"] if means["d_p99"] else []
        parts += [f"largest {max(means['d_max']):.4g}"] if means["d_max"] else []
        lines.append(f"|logprob rollout - logprob actor| over all steps: {', '.join(parts)} nats")
    if metrics.validation:
        shown = ", ".join(f"{value:.3f} at step {step}" for step, value in metrics.validation)
        lines.append(f"held-out reward: {shown}")
    if seconds := _present(steps, "seconds"):
        lines.append(f"{len(steps)} steps, {sum(seconds):.0f} s in steps, median {statistics.median(seconds):.1f} s")
    return lines


def _present(steps: list[Step], name: str) -> list[float]:
    return [value for step in steps if (value := getattr(step, name)) is not None]


COLUMNS = {
    "step": ("step", "{:d}"),
    "reward": ("reward", "{:.3f}"),
    "d_mean": ("|d| mean", "{:.4f}"),
    "d_p99": ("|d| p99", "{:.4f}"),
    "d_max": ("|d| max", "{:.3f}"),
    "changed": ("changed codes", "{:.2%}"),
    "seconds": ("seconds", "{:.1f}"),
}


def cells(step: Step) -> list[str]:
    """The row of the table for a step; "-" for what was not logged."""
    values = ((getattr(step, name), form) for name, (_, form) in COLUMNS.items())
    return ["-" if value is None else form.format(value) for value, form in values]


def table(steps: list[Step]) -> str:
    """The table as text, one line a step, columns aligned to the right."""
    rows = [[title for title, _ in COLUMNS.values()], *(cells(step) for step in steps)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def summary(metrics: Metrics) -> dict:
    """The run in one JSON-ready dict: the steps, the validation and the reward's gain."""
    names = [f.name for f in fields(Step)]
    p = progress(metrics.steps)
    return {
        "steps": [{name: getattr(step, name) for name in names} for step in metrics.steps],
        "validation": metrics.validation,
        "reward": None if p is None else {**vars(p), "gain": p.gain, "gain_error": p.gain_error},
    }


def main(argv: list[str] | None = None) -> int:
    """0; 1 if there are no training steps in the file."""
    parser = argparse.ArgumentParser(prog="quads report", description=__doc__.split("\n\n")[0])
    parser.add_argument("metrics", type=Path, help="what VERL_FILE_LOGGER_PATH named in the run, trainer.logger=[file]")
    parser.add_argument("--png", type=Path, help="where to draw the curves (default: next to the metrics)")
    parser.add_argument("--title", default=None, help="of the drawing")
    args = parser.parse_args(argv)
    metrics = read(args.metrics)
    if not metrics.steps:
        print(f"quads report: {args.metrics} holds no training steps", file=sys.stderr)
        return 1
    from quads_recipe.demo_plot import draw

    png = args.png or args.metrics.with_suffix(".png")
    draw(metrics, png, args.title or args.metrics.stem)
    print("\n".join([table(metrics.steps), "", *verdict(metrics), f"curves: {png}"]))
    return 0
