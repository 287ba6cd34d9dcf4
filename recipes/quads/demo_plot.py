"""The curves of a run as a PNG."""

from pathlib import Path

from quads_recipe.demo_report import Metrics, Step, progress

BLUE, ORANGE, GREEN, RED, GREY = "#3465a4", "#e07b00", "#2e8b57", "#b22222", "#8a8a8a"
MISSING = float("nan")


def draw(metrics: Metrics, path: Path, title: str) -> None:
    """Writes four panels over the steps: reward, |d| (log axis), changed codes, seconds. Empty panels say so."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7.5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=13)
    panels = figure.subplots(2, 2, sharex=True).flat
    for axes, paint in zip(panels, (_reward, _mismatch, _changed, _seconds), strict=True):
        paint(axes, metrics)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelbottom=True)
        axes.set_xlabel("step")
        if not axes.lines and not axes.collections:
            axes.text(0.5, 0.5, "not logged", transform=axes.transAxes, ha="center", color=GREY)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _series(steps: list[Step], name: str) -> list[float]:
    return [MISSING if (value := getattr(step, name)) is None else value for step in steps]


def running_mean(values: list[float], window: int = 5) -> list[float]:
    """Mean of each value and up to `window` - 1 before it."""
    return [sum(part) / len(part) for i in range(len(values)) for part in [values[max(0, i - window + 1) : i + 1]]]


def _reward(axes, metrics: Metrics) -> None:
    steps = [step.step for step in metrics.steps]
    rewards = _series(metrics.steps, "reward")
    axes.plot(steps, rewards, "o", color=BLUE, alpha=0.35, markersize=4, label="step")
    axes.plot(steps, running_mean(rewards), color=BLUE, label="running mean of 5")
    if p := progress(metrics.steps):
        windows = ((steps[: p.window], p.first, p.first_error), (steps[-p.window :], p.last, p.last_error))
        for i, (where, mean, error) in enumerate(windows):
            ends = [where[0], where[-1]]
            label = f"mean of {p.window} steps, 2 standard errors" if i == 0 else None
            axes.fill_between(ends, mean - 2 * error, mean + 2 * error, color=ORANGE, alpha=0.2, linewidth=0)
            axes.plot(ends, [mean, mean], color=ORANGE, linewidth=2, label=label)
    if metrics.validation:
        axes.plot(*zip(*metrics.validation, strict=True), "s--", color=GREEN, label="held out")
    axes.set_title("mean reward")
    axes.legend(loc="upper left", fontsize=8, frameon=False)
    axes.margins(y=0.12)


def _mismatch(axes, metrics: Metrics) -> None:
    steps = [step.step for step in metrics.steps]
    for name, label, color in (("d_max", "max", RED), ("d_p99", "p99", ORANGE), ("d_mean", "mean", BLUE)):
        values = [value if value > 0 else MISSING for value in _series(metrics.steps, name)]
        if any(value == value for value in values):
            axes.plot(steps, values, ".-", color=color, label=label, linewidth=1.2, markersize=4)
    axes.set_title("|logprob of rollout - logprob of actor| per token, nats")
    if axes.lines:
        axes.set_yscale("log")
        axes.set_ylim(top=4 * axes.get_ylim()[1])  # room for the legend
        axes.legend(loc="upper right", fontsize=8, frameon=False, ncols=3)


def _changed(axes, metrics: Metrics) -> None:
    values = [100 * value for value in _series(metrics.steps, "changed")]
    if any(value == value for value in values):
        axes.plot([step.step for step in metrics.steps], values, ".-", color=GREEN)
        axes.set_ylim(0, 1.15 * max(value for value in values if value == value) or 1)
    axes.set_title("weight codes that changed since the last sync, %")


def _seconds(axes, metrics: Metrics) -> None:
    steps = [step.step for step in metrics.steps]
    parts = {"generate": BLUE, "update": ORANGE, "sync": RED}
    known = {name: [0.0 if v != v else v for v in _series(metrics.steps, name)] for name in parts}
    total = _series(metrics.steps, "seconds")
    if any(value == value for value in total):
        spent = [sum(values) for values in zip(*known.values(), strict=True)]
        other = [max(0.0, t - s) if t == t else 0.0 for t, s in zip(total, spent, strict=True)]
        stack = {**{n: (known[n], c) for n, c in parts.items()}, "other": (other, GREY)}
        colors = [color for _, color in stack.values()]
        axes.stackplot(steps, *(v for v, _ in stack.values()), labels=stack, colors=colors, alpha=0.75)
        # The first step warms up (compilation, caches); it would flatten the rest.
        rest = sorted(value for value in total[1:] if value == value) or [total[0]]
        axes.set_ylim(0, 1.3 * rest[-1])
        axes.legend(loc="upper right", fontsize=8, frameon=False, ncols=4)
    axes.set_title("seconds per step")
