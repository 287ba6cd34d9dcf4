"""Drawings of a study, from the contents of results.json, in the style of the diagnose page."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import matplotlib
from matplotlib.figure import Figure

from quads_recipe import diagnose_plots as style
from quads_recipe.diagnose_plots import ACT, ARM_COLORS, BAD, GOOD, GRID, NUM, POINT, WEIGHT, Drawing
from quads_recipe.study.claims import CONTRADICTED, MARGIN, NOT_SHOWN, NOT_TESTABLE, SHOWN
from quads_recipe.study.collect import METRICS
from quads_recipe.study.results import SMOOTH

plt = style.plt
_STATUS_COLORS = {SHOWN: GOOD, NOT_SHOWN: ACT, CONTRADICTED: BAD, NOT_TESTABLE: NUM}
_TIMES = {
    "generate": ("generate", WEIGHT),
    "logprobs": ("actor's logprobs", POINT),
    "update": ("update", ACT),
    "sync": ("weight sync", GOOD),
    "other": ("rest", NUM),
}


def draw_all(results: dict) -> dict[str, Drawing]:
    """Name -> drawing, for what the results hold."""
    figures = [arm["figures"] for arm in results["arms"]]
    wanted: dict[str, tuple[Callable[[dict], Figure], bool]] = {
        "claims": (claims, any(part["scale"] for outcome in results["claims"] for part in outcome["parts"])),
        "mismatch": (mismatch, bool(results["curves"]["d_mean"])),
        "parts": (parts, any("part_act" in f for f in figures)),
        "reward": (reward, bool(results["curves"]["reward"])),
        "heldout": (heldout, any("own" in f for f in figures)),
        "health": (health, bool(results["curves"]["reward"])),
        "time": (time, any("seconds" in f for f in figures)),
    }
    with matplotlib.rc_context(style._STYLE):
        return {name: style._drawing(name, draw(results)) for name, (draw, there) in wanted.items() if there}


def claims(results: dict) -> Figure:
    """Every comparison with its 95% interval: factors of mismatch, and beside them differences of reward."""
    panels = {"factor": _factor_axes, "difference": _difference_axes}
    found = {scale: rows for scale in panels if (rows := _comparisons(results, scale))}
    height = max(map(len, found.values()))
    size = (11, 0.3 * height + 1.2)
    figure, grid = plt.subplots(1, len(found), figsize=size, layout="constrained", squeeze=False)
    for axes, (scale, rows) in zip(grid.flat, found.items(), strict=True):
        _forest(axes, rows, height)
        panels[scale](axes)
    handles = [matplotlib.lines.Line2D([], [], marker="o", color=color) for color in _STATUS_COLORS.values()]
    figure.legend(handles, _STATUS_COLORS, loc="outside lower center", ncols=len(handles), frameon=False)
    return figure


def _factor_axes(axes) -> None:
    axes.set_xscale("log")
    axes.axvline(1, color=style.INK, linewidth=1)
    axes.set_title("mismatch: factor", loc="left", fontsize=10)
    axes.xaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))


def _difference_axes(axes) -> None:
    axes.axvspan(-MARGIN, MARGIN, color=GOOD, alpha=0.1, linewidth=0)
    axes.axvline(0, color=style.INK, linewidth=1)
    axes.set_title("reward: difference", loc="left", fontsize=10)


def _comparisons(results: dict, scale: str) -> list[dict]:
    """The parts of all claims on a scale, each once."""
    unique = {}
    for outcome in results["claims"]:
        for part in outcome["parts"]:
            if part["scale"] == scale:
                unique.setdefault(part["label"], part)
    return list(unique.values())


def _forest(axes, found: list[dict], height: int) -> None:
    for row, part in enumerate(found):
        color = _STATUS_COLORS[part["status"]]
        if part["low"] is not None:
            axes.plot([part["low"], part["high"]], [row, row], color=color, linewidth=2, solid_capstyle="round")
        marker = {"within": "s"}.get(part["claimed"], "o")
        axes.plot([part["value"]], [row], marker, color=color, markersize=6)
        text = f"{part['value']:.2f}x" if part["scale"] == "factor" else f"{part['value']:+.3f}"
        axes.text(1.02, row, text, transform=axes.get_yaxis_transform(), va="center", fontsize=8.5)
    axes.set_yticks(range(len(found)), [part["label"].replace(" - ", " \u2212 ") for part in found], fontsize=8.5)
    axes.set_ylim(height - 0.5, -0.7)
    axes.grid(axis="y", visible=False)


def mismatch(results: dict) -> Figure:
    """Mean |d| over the steps, and per arm its mean with every seed, the 99th percentile and the largest."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), width_ratios=(1.15, 1), layout="constrained")
    _curves(left, results["curves"]["d_mean"], log=True)
    left.set_xlabel("step")
    left.set_title("mean |d|, nats", loc="left", fontsize=10)
    _labels(left, results["curves"]["d_mean"], log=True)
    shown = [arm for arm in results["arms"] if arm["figures"].get("d_mean", {}).get("mean", 0) > 0]
    shown.sort(key=lambda arm: -arm["figures"]["d_mean"]["mean"])
    for row, arm in enumerate(shown):
        _mismatch_row(right, row, arm, results)
    right.set_yticks(range(len(shown)), [arm["arm"] for arm in shown])
    right.set_xscale("log")
    right.margins(x=0.08, y=0.08)
    right.grid(axis="y", visible=False)
    right.set_title("per arm, nats", loc="left", fontsize=10)
    for marker, label in (("o", "mean"), ("|", "99% of tokens below"), ("x", "largest of a step, mean over steps")):
        right.plot([], [], marker, color=style.INK, label=label, markersize=6)
    right.legend(loc="upper center", bbox_to_anchor=(0.45, -0.1), ncols=3, fontsize=8.5, handletextpad=0.2)
    return figure


def _mismatch_row(axes, row: int, arm: dict, results: dict) -> None:
    color = ARM_COLORS[arm["arm"]]
    figures = arm["figures"]
    points = [figures[name]["mean"] for name in ("d_mean", "d_p99", "d_max") if name in figures]
    axes.plot([min(points), max(points)], [row, row], color=GRID, linewidth=4, solid_capstyle="round", zorder=1)
    for name, marker, size in (("d_mean", "o", 7), ("d_p99", "|", 10), ("d_max", "x", 6)):
        if name in figures:
            axes.plot(
                [figures[name]["mean"]], [row], marker, color=color, markersize=size, zorder=3, markeredgewidth=1.8
            )
    for run in results["runs"]:
        if run["arm"] == arm["arm"] and "d_mean" in run["figures"]:
            axes.plot([run["figures"]["d_mean"]], [row + 0.26], "o", color=color, markersize=3, alpha=0.6, zorder=2)
    place = {"xytext": (0, -8), "textcoords": "offset points", "ha": "center", "va": "top", "fontsize": 8}
    axes.annotate(f"{figures['d_mean']['mean']:.2g}", (figures["d_mean"]["mean"], row), **place)


def parts(results: dict) -> Figure:
    """Mean |d_weight|, |d_act| and |d_num| per arm. Zero has no place on a logarithmic axis and is written."""
    shown = [arm for arm in results["arms"] if "part_act" in arm["figures"]]
    figure, axes = plt.subplots(figsize=(11, 0.5 * len(shown) + 1.2))
    names = {"part_weight": "weight", "part_act": "act", "part_num": "num"}
    found = [arm["figures"][name]["mean"] for arm in shown for name in names if name in arm["figures"]]
    floor = 0.4 * min((value for value in found if value > 0), default=1e-4)
    for row, arm in enumerate(reversed(shown)):
        for offset, (name, part) in zip((0.24, 0.0, -0.24), names.items(), strict=True):
            mean = arm["figures"].get(name, {}).get("mean", 0.0)
            if mean > 0:
                axes.barh([row + offset], [mean - floor], left=floor, height=0.2, color=style.PARTS[part][1])
            place = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "fontsize": 8}
            axes.annotate(f"{mean:.2g}" if mean > 0 else "exactly 0", (max(mean, floor), row + offset), **place)
    axes.set_yticks(range(len(shown)), [arm["arm"] for arm in reversed(shown)])
    axes.set_xscale("log")
    axes.set_xlim(floor, 1.6 * max(found, default=1.0) or 1.0)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("mean magnitude, nats")
    for label, color in (style.PARTS[part] for part in names.values()):
        axes.barh([0], [0], color=color, label=label)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)
    return figure


def reward(results: dict) -> Figure:
    """Reward over the steps, and its gap to bf16 on the same prompts, both as running means."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    curves, gaps = results["smooth"]["reward"], results["smooth"]["gap"]
    _curves(left, curves)
    _labels(left, curves)
    left.set_title(f"reward of a step, running mean of {SMOOTH}", loc="left", fontsize=10)
    right.axhline(0, color=ARM_COLORS["bf16"], linewidth=1.5)
    _curves(right, gaps)
    _labels(right, gaps)
    right.set_title("minus that of bf16 on the same prompts", loc="left", fontsize=10)
    for axes in (left, right):
        axes.set_xlabel("step")
    if not gaps:
        right.text(0.5, 0.6, "no bf16 to compare with", transform=right.transAxes, ha="center", color=NUM)
    return figure


def heldout(results: dict) -> Figure:
    """Held-out pass@1 per arm: before training in its own engine; after, in its own engine and in BF16."""
    starts = {row["arm"]: row["own"] for row in results["start"]}
    shown = [arm for arm in results["arms"] if "own" in arm["figures"]]
    figure, axes = plt.subplots(figsize=(11, 0.46 * len(shown) + 1.3))
    for row, arm in enumerate(reversed(shown)):
        _heldout_row(axes, row, arm, starts.get(arm["arm"]))
    axes.set_yticks(range(len(shown)), [arm["arm"] for arm in reversed(shown)])
    axes.grid(axis="y", visible=False)
    axes.margins(x=0.06, y=0.1)
    axes.set_xlabel("held-out pass@1; bars are standard errors over seeds")
    ink = {"color": style.INK, "linestyle": "none"}
    axes.plot([], [], "o", markerfacecolor=style.PAPER, markersize=8, label="before training, own engine", **ink)
    axes.plot([], [], "o", markersize=8, label="after, own engine", **ink)
    axes.plot([], [], "D", markersize=5, label="after, in BF16", **ink)
    axes.legend(loc="lower center", bbox_to_anchor=(0.45, 1.0), ncols=3)
    return figure


def _heldout_row(axes, row: int, arm: dict, start: dict | None) -> None:
    color, own, plain = ARM_COLORS[arm["arm"]], arm["figures"]["own"], arm["figures"].get("in_bf16")
    if start:
        line = {"color": GRID, "linewidth": 4, "zorder": 1, "solid_capstyle": "round"}
        axes.plot([start["mean"], own["mean"]], [row, row], **line)
        axes.plot([start["mean"]], [row], "o", color=color, markerfacecolor=style.PAPER, markersize=8, zorder=3)
    if plain:
        look = {"fmt": "D", "color": color, "markersize": 5, "alpha": 0.75, "linewidth": 1.1, "zorder": 4}
        axes.errorbar([plain["mean"]], [row - 0.22], xerr=plain["error"] or 0, **look)
    look = {"fmt": "o", "color": color, "markersize": 8, "linewidth": 1.6, "zorder": 5}
    axes.errorbar([own["mean"]], [row], xerr=own["error"] or 0, **look)


def health(results: dict) -> Figure:
    """Entropy, gradient norm, length, KL, changed codes and covered energy over the steps."""
    names = [n for n in ("entropy", "grad_norm", "length", "k3", "changed", "covered") if results["curves"].get(n)]
    columns = min(3, len(names)) or 1
    rows = max(1, math.ceil(len(names) / columns))
    figure, grid = plt.subplots(rows, columns, figsize=(11, 2.7 * rows + 0.4), squeeze=False, layout="constrained")
    for axes, name in zip(grid.flat, names, strict=False):
        _curves(axes, results["curves"][name], log=name in ("k3", "grad_norm"))
        unit = f", {METRICS[name].unit}" if METRICS[name].unit else ""
        axes.set_title(f"{METRICS[name].label}{unit}", loc="left", fontsize=10)
    for axes in list(grid.flat)[len(names) :]:
        axes.set_visible(False)
    handles = {arm: color for arm, color in ARM_COLORS.items() if arm in results["curves"]["reward"]}
    lines = [matplotlib.lines.Line2D([], [], color=color, linewidth=2) for color in handles.values()]
    figure.legend(lines, handles, loc="outside upper center", ncols=len(handles), frameon=False)
    return figure


def time(results: dict) -> Figure:
    """Seconds of a step per arm, by what they go into."""
    shown = [arm for arm in results["arms"] if "seconds" in arm["figures"]]
    figure, axes = plt.subplots(figsize=(11, 0.4 * len(shown) + 1.1))
    for row, arm in enumerate(reversed(shown)):
        seconds = {name: arm["figures"].get(name, {}).get("mean", 0.0) for name in _TIMES}
        total = arm["figures"]["seconds"]["mean"]
        seconds["other"] = max(0.0, total - sum(seconds.values()))
        left = 0.0
        for name, (_, color) in _TIMES.items():
            axes.barh([row], [seconds[name]], left=[left], color=color, height=0.6)
            left += seconds[name]
        axes.annotate(f"{total:.1f}", (left, row), xytext=(5, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(shown)), [arm["arm"] for arm in reversed(shown)])
    axes.grid(axis="y", visible=False)
    axes.margins(x=0.08)
    axes.set_xlabel("seconds a step, medians")
    for label, color in _TIMES.values():
        axes.barh([0], [0], color=color, label=label)
    axes.legend(loc="lower center", bbox_to_anchor=(0.45, 1.0), ncols=len(_TIMES))
    return figure


# -- parts


def _curves(axes, curves: Mapping[str, dict], log: bool = False) -> None:
    """Means over seeds with bands of one standard error."""
    for arm, curve in curves.items():
        mean = [value if not log or value > 0 else math.nan for value in curve["mean"]]
        marker = "." if len(mean) < 3 else ""
        axes.plot(curve["step"], mean, color=ARM_COLORS[arm], linewidth=1.8, marker=marker)
        if all(error is not None for error in curve["error"]):
            low = [m - e for m, e in zip(mean, curve["error"], strict=True)]
            low = [max(v, 0.3 * m) if log else v for v, m in zip(low, mean, strict=True)]
            high = [m + e for m, e in zip(mean, curve["error"], strict=True)]
            axes.fill_between(curve["step"], low, high, color=ARM_COLORS[arm], alpha=0.16, linewidth=0)
    if log and any(value > 0 for curve in curves.values() for value in curve["mean"]):
        axes.set_yscale("log")


def _labels(axes, curves: Mapping[str, dict], log: bool = False) -> None:
    """Names at the ends of the lines, moved apart where they would meet."""
    ends = {arm: curve["mean"][-1] for arm, curve in curves.items() if not log or curve["mean"][-1] > 0}
    if not ends:
        return
    low, high = axes.get_ylim()
    scale = (lambda v: math.log(v)) if log else (lambda v: v)
    height = scale(high) - scale(low)
    places = spread_apart({arm: (scale(v) - scale(low)) / height for arm, v in ends.items()}, 0.055)
    for arm, place in places.items():
        axes.text(1.015, place, arm, transform=axes.transAxes, color=ARM_COLORS[arm], va="center", fontsize=9)


def spread_apart(places: Mapping[str, float], least: float) -> dict[str, float]:
    """The same places, in the same order, at least `least` apart, and moved little."""
    order = sorted(places, key=places.get)
    moved: list[float] = []
    for name in order:
        moved.append(max(places[name], moved[-1] + least) if moved else places[name])
    shift = (sum(places.values()) - sum(moved)) / len(moved)
    return {name: value + shift for name, value in zip(order, moved, strict=True)}
