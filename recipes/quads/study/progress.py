"""Shows a study while it goes: on a terminal a grid of the runs and a bar, elsewhere plain lines."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from quads_recipe.demo_process import LogTail
from quads_recipe.demo_report import Step, parse
from quads_recipe.study.layout import Layout, Run
from quads_recipe.study.plan import Plan
from quads_recipe.words import plural

PLAIN_EVERY = 5
BAR = 32


@dataclass
class Active:
    """A run that is being trained."""

    run: Run
    tail: LogTail
    steps: list[Step] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    def seconds(self) -> float:
        return time.monotonic() - self.started


class StudyDisplay:
    """Told of every event by the runner and the evaluation. Use as a context manager."""

    def __init__(self, plan: Plan, layout: Layout, console: Console | None = None, jobs: int = 1):
        self.console = console or Console(highlight=False, soft_wrap=True)
        self.plan, self.layout, self.jobs = plan, layout, jobs
        self.active: dict[str, Active] = {}
        self.status = "preparing"
        self.seconds: dict[str, list[float]] = {}
        self._began = time.monotonic()
        self._live: Live | None = None
        for run in layout.runs(plan):
            if done := run.done():
                self.seconds.setdefault(run.arm, []).append(done["seconds"])

    def __enter__(self) -> StudyDisplay:
        if self.console.is_terminal:
            self._live = Live(get_renderable=self.render, console=self.console, refresh_per_second=2, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    # -- events

    def note(self, line: str) -> None:
        """A line that stays."""
        self.console.print(f"[{_clock(time.monotonic() - self._began)}] {line}", markup=False)

    def doing(self, what: str) -> None:
        """What is going on now, where it isn't training. Shown on a terminal only."""
        self.status = what

    def begin(self, run: Run, metrics: Path) -> None:
        self.active[run.name] = Active(run, LogTail(metrics))
        self.status = f"training {', '.join(self.active)}"
        number = [r.name for r in self.layout.runs(self.plan)].index(run.name) + 1
        self.note(f"run {number}/{len(self.plan.runs())}: arm {run.arm}, seed {run.seed}")

    def update(self) -> None:
        """Takes in the steps that were logged since the last call."""
        for name, active in self.active.items():
            # Several at a time: each line says whose it is.
            prefix = f"{name}: " if len(self.active) > 1 else ""
            for step in parse(active.tail.lines()).steps:
                active.steps.append(step)
                if not self._live and (step.step == 1 or step.step % PLAIN_EVERY == 0):
                    self.note(f"  {prefix}{describe(step, self.plan.steps)}")

    def end(self, run: Run, cause: Sequence[str]) -> None:
        """cause: lines, empty for a run that finished."""
        self.update()
        ended = self.active.pop(run.name)
        took = ended.seconds()
        if cause:
            self.note(f"  {run.name} FAILED after {took:.0f} s: {cause[0]}")
            for line in cause[1:]:
                self.console.print(f"    {line}", markup=False)
        else:
            self.seconds.setdefault(run.arm, []).append(took)
            self.note(f"  {run.name} done in {took:.0f} s: {summary(ended.steps)}{self._eta_text()}")

    # -- the picture

    def render(self) -> Group:
        return Group(self._grid(), Text(self._bar()), Text(f"{self.status}   {self._now()}"))

    def _grid(self) -> Table:
        grid = Table(box=None, padding=(0, 2), show_edge=False)
        grid.add_column("arm")
        for seed in self.plan.seeds:
            grid.add_column(f"seed {seed}", min_width=26)
        for arm in self.plan.arms:
            grid.add_row(arm, *(self._cell(self.layout.run(arm, seed)) for seed in self.plan.seeds))
        return grid

    def _cell(self, run: Run) -> Text:
        if active := self.active.get(run.name):
            last = active.steps[-1] if active.steps else None
            text = describe(last, self.plan.steps) if last else "starting Ray, verl and vLLM"
            return Text(text, style="bold cyan")
        if done := run.done():
            return Text(f"done, {done['seconds']:.0f} s", style="green")
        return Text("failed", style="red") if run.failure() else Text("waiting", style="dim")

    def _bar(self) -> str:
        runs = self.layout.runs(self.plan)
        part = sum(len(active.steps) for active in self.active.values()) / self.plan.steps
        share = min(1.0, (sum(bool(run.done() or run.failure()) for run in runs) + part) / len(runs))
        filled = round(BAR * share)
        return f"[{'#' * filled}{'.' * (BAR - filled)}] {share:.0%} of {plural(len(runs), 'run')}{self._eta_text()}"

    def _now(self) -> str:
        return _clock(time.monotonic() - self._began)

    def _eta_text(self) -> str:
        left = self.eta()
        return "" if left is None else f", about {max(1, round(left / 60))} min of training left"

    def eta(self) -> float | None:
        """Seconds of training left, by the runs that finished; None before the first."""
        known = [value for values in self.seconds.values() for value in values]
        if not known:
            return None
        left = [run for run in self.layout.runs(self.plan) if not run.done() and not run.failure()]
        mean = {arm: statistics.fmean(values) for arm, values in self.seconds.items()}
        total = sum(mean.get(run.arm, statistics.fmean(known)) for run in left)
        spent = sum(active.seconds() for active in self.active.values())
        return max(0.0, total - spent) / min(self.jobs, len(left)) if left else None


def summary(steps: Sequence[Step]) -> str:
    """`reward 0.446 -> 0.549, mean |d| 0.0111`: rewards of the first and the last third."""
    rewards = [s.reward for s in steps]
    third = max(1, len(rewards) // 3)
    text = f"reward {statistics.fmean(rewards[:third]):.3f} -> {statistics.fmean(rewards[-third:]):.3f}"
    sizes = [s.d_mean for s in steps if s.d_mean is not None]
    return text + (f", mean |d| {statistics.fmean(sizes):.4f}" if sizes else "")


def describe(step: Step, total: int) -> str:
    """`step 12/30  reward 0.475  |d| 0.0053  5.1 s`."""
    parts = [f"step {step.step}/{total}", f"reward {step.reward:.3f}"]
    parts += [] if step.d_mean is None else [f"|d| {step.d_mean:.4f}"]
    parts += [] if step.seconds is None else [f"{step.seconds:.1f} s"]
    return "  ".join(parts)


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60:3d}:{int(seconds) % 60:02d}"
