"""Drawings of `quads diagnose`, from the contents of diagnose.json: PNG for files, SVG for the page.

The SVG takes its text and grid colours from the page, so that it reads on a light and on a dark background.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from quads_recipe.analysis.evidence import has_percentiles

WEIGHT, ACT, NUM = "#3f7fc4", "#d9822b", "#8a8f98"
GOOD, BAD, POINT = "#2f9e73", "#cf4a55", "#7a5cc0"
INK, GRID, PAPER = "#1b1f24", "#d5d9de", "#fefefe"
PARTS = {"weight": ("weights", WEIGHT), "act": ("activations", ACT), "num": ("engine arithmetic", NUM)}
CAUSES = {
    "routing": ("another expert chosen", POINT),
    "weights": ("weights rounded", WEIGHT),
    "activations": ("activations rounded", ACT),
    "engine": ("engine arithmetic", NUM),
}
ARM_COLORS = {
    "bf16": NUM,
    "fp8": GOOD,
    "naive": BAD,
    "qat": ACT,
    "symmetric": POINT,
    "quads": "#7fb2e8",
    "quads_full": WEIGHT,
}
_STYLE = {
    "font.size": 10,
    "font.family": "DejaVu Sans",
    "svg.fonttype": "none",
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "figure.facecolor": PAPER,
    "axes.facecolor": PAPER,
    "legend.frameon": False,
}


@dataclass(frozen=True)
class Drawing:
    """The same figure twice."""

    png: bytes
    svg: str


def draw_all(results: dict) -> dict[str, Drawing]:
    """Name -> drawing, for what the results hold."""
    wanted: dict[str, tuple[Callable[[dict], Figure], bool]] = {
        "arms": (arms, bool(results["arms"])),
        "shares": (shares, any(a["parts"]["d"]["share"] is not None for a in results["arms"])),
        "distribution": (distribution, bool(results["arms"])),
        "ratios": (ratios, bool(results["ratios"])),
        "causes": (causes, any(a["flips"] for a in results["arms"])),
        "left_out": (left_out, bool(results["left_out"])),
        "layers": (layers, bool(results["sites"])),
    }
    with matplotlib.rc_context(_STYLE):
        return {name: _drawing(name, draw(results)) for name, (draw, there) in wanted.items() if there}


def arms(results: dict) -> Figure:
    """Mean, 99th percentile and maximum of |d| per arm, on a logarithmic axis."""
    found = results["arms"]
    figure, axes = plt.subplots(figsize=(8.2, 0.42 * len(found) + 1.1))
    for row, arm in enumerate(reversed(found)):
        d = arm["parts"]["d"]
        low, high = _floor(d["mean"]), _floor(d["max"])
        axes.plot([low, high], [row, row], color=GRID, linewidth=5, solid_capstyle="round", zorder=1)
        for name, color, size in (("mean", WEIGHT, 64), ("p99", ACT, 40), ("max", BAD, 28)):
            if name != "p99" or has_percentiles(arm):
                axes.scatter([_floor(d[name])], [row], s=size, color=color, zorder=3)
        place = {"xytext": (-9, 0), "textcoords": "offset points", "ha": "right", "va": "center"}
        axes.annotate(f"{d['mean']:.2g}", (low, row), **place)
    axes.set_yticks(range(len(found)), [arm["arm"] for arm in reversed(found)])
    axes.set_xscale("log")
    axes.margins(x=0.16, y=0.1)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("|logprob of rollout - logprob of actor| per token, nats")
    for color, label in ((WEIGHT, "mean"), (ACT, "99% of tokens below"), (BAD, "largest")):
        axes.scatter([], [], color=color, label=label)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)
    return figure


def shares(results: dict) -> Figure:
    """Shares of the variance of d, stacked."""
    found = [arm for arm in results["arms"] if arm["parts"]["d"]["share"] is not None]
    figure, axes = plt.subplots(figsize=(8.2, 0.4 * len(found) + 1.1))
    _stacked(axes, found, lambda arm: {part: arm["parts"][part]["share"] for part in PARTS}, PARTS)
    axes.set_xlabel("share of the variance of d")
    return figure


def causes(results: dict) -> Figure:
    """Shares of sum |d| by the cause of each token, stacked."""
    figure, axes = plt.subplots(figsize=(8.2, 0.4 * len(results["arms"]) + 1.1))
    _stacked(axes, results["arms"], lambda arm: arm["causes"], CAUSES)
    axes.set_xlabel("share of the sum of |d|, by the main cause at each token")
    return figure


def distribution(results: dict) -> Figure:
    """How many tokens have a larger |d|."""
    figure, axes = plt.subplots(figsize=(8.2, 3.6))
    largest = max(arm["parts"]["d"]["max"] for arm in results["arms"])
    for arm in results["arms"]:
        points = [(value, share) for share, value in arm["tail"] if value > largest / 1e5]
        if points:
            axes.plot(*zip(*points, strict=True), color=ARM_COLORS[arm["arm"]], linewidth=1.8, label=arm["arm"])
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("|d|, nats")
    axes.set_ylabel("share of tokens above")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def ratios(results: dict) -> Figure:
    """Mismatch against the residual ratio, with the other arms as reference lines."""
    found = results["ratios"]
    x = [arm["ratio"] for arm in found]
    figure, axes = plt.subplots(figsize=(8.2, 3.6))
    for name, label, color in (("d", "mean |d|", WEIGHT), ("act", "mean |d_act|", ACT)):
        y = [arm["parts"][name]["mean"] for arm in found]
        error = [_finite(arm["parts"][name]["error"]) for arm in found]
        axes.errorbar(x, y, yerr=error, color=color, marker="o", markersize=5, linewidth=1.8, capsize=3, label=label)
    for arm in results["arms"]:
        mean = arm["parts"]["d"]["mean"]
        if arm["arm"] in ("fp8", "bf16") and mean > 0:
            style = {"linestyle": "--", "linewidth": 1.2, "label": f"mean |d| of arm {arm['arm']}"}
            axes.axhline(mean, color=GOOD if arm["arm"] == "fp8" else NUM, **style)
    axes.set_xticks(x, [f"{ratio:g}\n{arm['cost']['products']:.0%}" for ratio, arm in zip(x, found, strict=True)])
    axes.set_xlabel("residual ratio, and below it the time of all matrix products relative to BF16")
    axes.set_ylabel("nats")
    axes.set_ylim(bottom=0)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4)
    return figure


def left_out(results: dict) -> Figure:
    """Share of mean |d_act| that each layer's activations make up."""
    found = sorted(results["left_out"], key=lambda one: one["removed"])
    figure, axes = plt.subplots(figsize=(8.2, 0.3 * len(found) + 0.9))
    values = [100 * one["removed"] for one in found]
    error = [200 * _finite(one["error"]) for one in found]
    chosen = {module for module in results["verdict"]["leave_out"]}
    colors = [GOOD if set(one["modules"]) <= chosen else ACT for one in found]
    axes.barh(range(len(found)), values, xerr=error, color=colors, height=0.62, ecolor=NUM)
    axes.set_yticks(range(len(found)), [short(one["unit"]) for one in found])
    axes.axvline(0, color=NUM, linewidth=0.8)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("% of mean |d_act| that disappears when this layer's activations stay unquantized (2 std. errors)")
    axes.margins(y=0.02)
    return figure


def layers(results: dict) -> Figure:
    """Relative output error per layer and kind: no compensation, half, all."""
    shown = shown_ratios(results)
    kinds = list(dict.fromkeys(site["kind"] for site in results["sites"]))
    numbers = sorted({site["layer"] for site in results["sites"] if site["layer"] is not None})
    size = (1.2 + 0.75 * len(kinds) * len(shown), 1.6 + 0.22 * len(numbers))
    figure, axes = plt.subplots(1, len(shown), figsize=size, sharey=True, squeeze=False)
    top = max(site["ratios"][shown[0]]["error"] for site in results["sites"])
    for one, ratio in zip(axes[0], shown, strict=True):
        values = {(s["layer"], s["kind"]): s["ratios"][ratio]["error"] for s in results["sites"]}
        grid = [[values.get((n, kind), float("nan")) for kind in kinds] for n in numbers]
        image = one.imshow(grid, cmap="YlOrBr", vmin=0, vmax=top, aspect="auto")
        one.set_xticks(range(len(kinds)), kinds, rotation=40, ha="right")
        one.set_title("no compensation" if ratio == "0" else f"ratio {ratio}")
        one.grid(visible=False)
    axes[0][0].set_ylabel("layer")
    figure.colorbar(image, ax=axes[0].tolist(), label="relative error of the product")
    return figure


def shown_ratios(results: dict) -> list[str]:
    """Up to three ratios for side-by-side views: none, the middle (0.5 if there), all."""
    known = [arm["ratio"] for arm in results["ratios"]]
    middle = 0.5 if 0.5 in known else known[len(known) // 2]
    return [f"{ratio:g}" for ratio in dict.fromkeys((known[0], middle, known[-1]))]


def short(name: str) -> str:
    """A module's name without what all of them share."""
    return name.removeprefix("model.layers.")


def _stacked(axes, found: list[dict], values: Callable[[dict], dict], parts: dict[str, tuple[str, str]]) -> None:
    for row, arm in enumerate(reversed(found)):
        left, below = 0.0, 0.0
        for part, (_, color) in parts.items():
            value = values(arm)[part]
            start = left if value >= 0 else below + value
            axes.barh([row], [abs(value)], left=[start], color=color, height=0.6)
            if value > 0.08:
                axes.text(start + value / 2, row, f"{value:.0%}", ha="center", va="center", color=PAPER, fontsize=9)
            left, below = left + max(value, 0), below + min(value, 0)
    axes.set_yticks(range(len(found)), [arm["arm"] for arm in reversed(found)])
    axes.xaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0))
    axes.grid(axis="y", visible=False)
    axes.margins(x=0.01)
    for label, color in parts.values():
        axes.barh([0], [0], color=color, label=label)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(parts))


def _drawing(name: str, figure: Figure) -> Drawing:
    png, svg = io.BytesIO(), io.StringIO()
    figure.savefig(png, format="png", dpi=150, bbox_inches="tight")
    # Names inside the SVG must differ between the drawings of one page.
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(svg, format="svg", bbox_inches="tight", transparent=True, metadata={"Date": None})
    plt.close(figure)
    return Drawing(png.getvalue(), themed(svg.getvalue()))


def themed(svg: str) -> str:
    """The <svg> element alone, sized by the page, with the page's colours for ink, grid and paper."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<svg ([^>]*?)width="[\d.]+pt"', r"<svg \1", svg, count=1)
    svg = re.sub(r'height="[\d.]+pt" ', "", svg, count=1)
    for color, name in ((INK, "--ink"), (GRID, "--grid"), (PAPER, "--paper-on-color")):
        svg = svg.replace(color, f"var({name})")
    return svg


def _floor(value: float) -> float:
    """Zero has no place on a logarithmic axis; nothing is below FP32's resolution of a logprob."""
    return max(value, 1e-8)


def _finite(value: float) -> float:
    return value if value == value else 0.0
