"""Reads what the runs of a study logged: every step's figures, and the summary of a run."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from quads_recipe import demo_report
from quads_recipe.study.reading import StudyError, shown
from quads_recipe.words import plural

Step = dict[str, float]
"""`step`, and the metrics below that were logged."""


@dataclass(frozen=True)
class Metric:
    """names: in the log, the first that is there counts. label and unit: for tables and axes."""

    names: tuple[str, ...]
    label: str
    unit: str = ""


METRICS = {
    "reward": Metric(demo_report.METRICS["reward"], "mean reward"),
    "d_mean": Metric(demo_report.METRICS["d_mean"], "mean |d|", "nats"),
    "d_p99": Metric(demo_report.METRICS["d_p99"], "99th percentile of |d|", "nats"),
    "d_max": Metric(demo_report.METRICS["d_max"], "largest |d| of a step", "nats"),
    "k3": Metric(("quads/logprob_k3_mean",), "KL(rollout || actor), k3", "nats"),
    "nonfinite": Metric(("quads/logprob_nonfinite_sum",), "tokens without a finite d"),
    "entropy": Metric(("actor/entropy",), "entropy", "nats"),
    "grad_norm": Metric(("actor/grad_norm",), "gradient norm"),
    "clipped": Metric(("actor/pg_clipfrac",), "share of tokens clipped"),
    "length": Metric(("response_length/mean",), "response length", "tokens"),
    "cut": Metric(("response_length/clip_ratio",), "share of responses cut off"),
    "changed": Metric(demo_report.METRICS["changed"], "weight codes changed per sync"),
    "covered": Metric(("quads/rac_energy_covered_mean",), "residual energy covered"),
    "moved": Metric(("quads/rac_mask_moved_mean",), "mask entries moved per sync"),
    "receipts": Metric(demo_report.METRICS["receipts_equal"], "receipts equal"),
    "part_weight": Metric(("quads/probe_weight_abs_mean",), "mean |d_weight|", "nats"),
    "part_weight_max": Metric(("quads/probe_weight_abs_max",), "largest |d_weight|", "nats"),
    "part_act": Metric(("quads/probe_act_abs_mean",), "mean |d_act|", "nats"),
    "part_num": Metric(("quads/probe_num_abs_mean",), "mean |d_num|", "nats"),
    "seconds": Metric(demo_report.METRICS["seconds"], "step", "s"),
    "generate": Metric(demo_report.METRICS["generate"], "generate", "s"),
    "logprobs": Metric(("timing_s/old_log_prob",), "logprobs of the actor", "s"),
    "update": Metric(demo_report.METRICS["update"], "update", "s"),
    "sync": Metric(demo_report.METRICS["sync"], "weight sync", "s"),
}
TIMES = ("seconds", "generate", "logprobs", "update", "sync")


def steps(files: Iterable[Path]) -> list[Step]:
    """The training steps in files of verl's file logger, in order. Of a step that occurs again the later file counts.

    Lines that are not whole (the trainer was killed) are left out, as are those without a reward (validation).
    Raises StudyError: a metric is no number, or a file has the reward of a step twice.
    """
    merged: dict[int, Step] = {}
    for file in files:
        merged |= _of_file(file)
    return [step for _, step in sorted(merged.items()) if "reward" in step]


def _of_file(file: Path) -> dict[int, Step]:
    found: dict[int, Step] = {}
    if file.is_dir():
        raise StudyError(f"{file}: is broken, a folder and no file; {_remedy(file)}")
    for i, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        if (record := _record(line)) is None:
            continue
        number, logged = record
        values = _values(logged, f"{file}: is broken, line {i}, step {number}: ", _remedy(file))
        step = found.setdefault(number, {"step": number})
        if "reward" in values and "reward" in step:
            raise StudyError(f"{file}: is broken, line {i} has the reward of step {number} again; {_remedy(file)}")
        step |= values
    return found


def _remedy(file: Path) -> str:
    return f"remove {file.parent / 'done.json'}, and the same command trains this run again"


def _record(line: str) -> tuple[int, Mapping] | None:
    """(step, what was logged); None for a line of something else."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("data"), dict):
        return None
    number = record.get("step")
    if not isinstance(number, int | float) or isinstance(number, bool) or number != number // 1:
        return None
    return int(number), record["data"]


def _values(logged: Mapping, start: str, remedy: str) -> Step:
    values: Step = {}
    for name, metric in METRICS.items():
        source = next((source for source in metric.names if logged.get(source) is not None), None)
        if source is not None:
            values[name] = _float(logged[source], f"{start}{source}", remedy)
    return values


def _float(value: object, where: str, remedy: str) -> float:
    try:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)  # NaN and infinity too, which a run that went wrong logs
    except OverflowError:
        pass
    raise StudyError(f"{where} is {shown(value)}, must be a number; {remedy}")


def require_all(steps_: Sequence[Step], count: int, folder: Path) -> None:
    """Raises StudyError if the run in `folder` has not logged steps 1 to `count`, each of them and no other."""
    there = {int(step["step"]) for step in steps_}
    wanted = set(range(1, count + 1))
    if there == wanted:
        return
    wrong = f"step {min(wanted - there)} is missing" if wanted - there else f"step {max(there)} is too many"
    raise StudyError(
        f"{folder}: its metrics-*.jsonl are broken, {wrong}: they hold {plural(len(there), 'step')}, and done.json "
        f"says that all {count} are done; remove done.json there, and the same command trains this run again"
    )


def window(count: int) -> int:
    """How many steps the beginning and the end of a run of `count` steps are: a third, at least one."""
    return max(1, count // 3)


def series(steps_: Sequence[Step], name: str) -> list[float]:
    """The values of a metric where it was logged and is finite."""
    return [step[name] for step in steps_ if name in step and math.isfinite(step[name])]


def summary(steps_: Sequence[Step]) -> dict[str, float]:
    """Of one run: the mean over its steps of every metric, and

    - `reward_first`, `reward_last`: over the first and last third; `gain`: their difference
    - `reward_best`: the best mean over as many consecutive steps; `collapsed`: 1 if the last third is below half of it
    - `d_max_ever`: the largest |d| of all. Times are medians, without the first step, which warms up.
    """
    found = {}
    for name in METRICS:
        values = series(steps_[1:] if name in TIMES and len(steps_) > 1 else steps_, name)
        if values:
            found[name] = statistics.median(values) if name in TIMES else statistics.fmean(values)
    if maxima := series(steps_, "d_max"):
        found["d_max_ever"] = max(maxima)
    return found | _reward(series(steps_, "reward"))


def _reward(rewards: list[float]) -> dict[str, float]:
    if not rewards:
        return {}
    width = window(len(rewards))
    means = [statistics.fmean(rewards[i : i + width]) for i in range(len(rewards) - width + 1)]
    return {
        "reward_first": means[0],
        "reward_last": means[-1],
        "gain": means[-1] - means[0],
        "reward_best": max(means),
        "collapsed": float(means[-1] < 0.5 * max(means)),
    }
