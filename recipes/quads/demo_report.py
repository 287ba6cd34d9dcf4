"""What a run did: reads the metrics that verl's file logger wrote, prints a table and a verdict, draws the curves.

Usage: quads report METRICS.jsonl [--png FILE] [--title TEXT]
"""

import argparse
import json
import math
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
_REMEDY = "give a file that verl's file logger wrote"
_VALIDATION = re.compile(r"^val-core/.+/mean@\d+$")


class MetricsError(ValueError):
    """A file, or an option of `quads report`, that doesn't fit: the message names it and the remedy."""


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
    Raises MetricsError for a line of something else.
    """
    merged: dict[int, dict] = {}
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        step, data = _record(record, f"line {number}")
        merged.setdefault(step, {}).update(data)
    metrics = Metrics()
    for number, data in sorted(merged.items()):
        step = _step(number, data)
        if step.reward is not None:
            metrics.steps.append(step)
        validations = {k: v for k, v in data.items() if _VALIDATION.match(k)}
        metrics.validation.extend((number, _number(v, f"step {number}: {k}")) for k, v in validations.items())
    return metrics


def _record(record: object, where: str) -> tuple[int, dict]:
    """(step, data) of a line."""
    if not isinstance(record, dict) or not isinstance(record.get("data"), dict) or "step" not in record:
        raise MetricsError(f'{where}: {str(record)[:60]} is not {{"step": ..., "data": {{...}}}}; {_REMEDY}')
    step = _number(record["step"], f"{where}: step")
    if not math.isfinite(step):
        raise MetricsError(f"{where}: step: {step} is no step; {_REMEDY}")
    return int(step), record["data"]


def _number(value: object, where: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise MetricsError(f"{where}: {str(value)[:60]!r} is no number; {_REMEDY}") from None


def _step(number: int, data: dict) -> Step:
    values = {}
    for name, sources in METRICS.items():
        source = next((source for source in sources if data.get(source) is not None), None)
        values[name] = None if source is None else _number(data[source], f"step {number}: {source}")
    return Step(number, **values)


def read(path: Path) -> Metrics:
    """Metrics of a file; empty ones if the file is not there yet. Raises MetricsError, which names the file."""
    if path.is_dir():
        raise MetricsError(f"{path}: is a folder; give the file in it, such as {path / 'metrics.jsonl'}")
    try:
        return parse(path.read_text(encoding="utf-8").splitlines()) if path.is_file() else Metrics()
    except UnicodeDecodeError:
        raise MetricsError(f"{path}: is no text; {_REMEDY}") from None
    except OSError as error:
        raise MetricsError(f"{path}: can't be read ({error.strerror})") from None
    except MetricsError as error:
        raise MetricsError(f"{path}: {error}") from None


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
    """0; 1 if there are no training steps in the file; 2 for a file of something else or a wrong argument."""
    parser = argparse.ArgumentParser(prog="quads report", description=__doc__.split("\n\n")[0])
    parser.add_argument("metrics", type=Path, help="what VERL_FILE_LOGGER_PATH named in the run, trainer.logger=[file]")
    parser.add_argument("--png", help="where to draw the curves (default: next to the metrics)")
    parser.add_argument("--title", default=None, help="of the drawing")
    args = parser.parse_args(argv)
    try:
        metrics = read(args.metrics)
        if not metrics.steps:
            print(f"quads report: {args.metrics} holds no training steps", file=sys.stderr)
            return 1
        png = _drawing(args.png, args.metrics)
        _draw(metrics, png, args.title or args.metrics.stem)
    except MetricsError as error:
        print(f"quads report: {error}", file=sys.stderr)
        return 2
    print("\n".join([table(metrics.steps), "", *verdict(metrics), f"curves: {png}"]))
    return 0


def _drawing(given: str | None, metrics: Path) -> Path:
    """The file to draw into; .png where no extension was given. Raises MetricsError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    if given is not None and not given.strip():
        raise MetricsError("--png: '' names no file; give one, or leave the option out")
    path = metrics.with_suffix(".png") if given is None else Path(given).expanduser()
    if path.is_dir():
        raise MetricsError(f"--png: {path} is a folder; give a file, such as {path / 'curves.png'}")
    if path.parent.exists() and not path.parent.is_dir():
        raise MetricsError(f"--png: {path.parent} is a file, so nothing can be written in it; give another file")
    if not path.suffix:
        path = path.with_name(path.name + ".png")
    known = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix[1:].lower() not in known:
        raise MetricsError(f"--png: {path}: unknown extension {path.suffix!r}; use one of {', '.join(sorted(known))}")
    if path.resolve() == metrics.resolve():
        raise MetricsError(f"--png: {path} is the file of the metrics; give another one")
    return path


def _draw(metrics: Metrics, path: Path, title: str) -> None:
    from quads_recipe.demo_plot import draw

    try:
        draw(metrics, path, title)
    except OSError as error:
        raise MetricsError(f"--png: can't write {path} ({error.strerror or error}); give another file") from None
