"""Reads what the runs of a study logged: every step's figures, and the summary of a run."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from quads_recipe import demo_report

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
    """
    merged: dict[int, dict] = {}
    for file in files:
        own: dict[int, dict] = {}
        for line in file.read_text(errors="replace").splitlines():
            try:
                record = json.loads(line)
                number, logged = int(record["step"]), dict(record["data"])
            except (ValueError, TypeError, KeyError):
                continue
            own.setdefault(number, {}).update(logged)
        merged |= own
    found = [_step(number, logged) for number, logged in sorted(merged.items())]
    return [step for step in found if "reward" in step]


def _step(number: int, logged: Mapping) -> Step:
    values: Step = {"step": number}
    for name, metric in METRICS.items():
        value = next((logged[source] for source in metric.names if logged.get(source) is not None), None)
        if value is not None:
            values[name] = float(value)
    return values


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
