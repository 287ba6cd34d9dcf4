"""Shows a run while it goes: a line a step, and a progress bar where there is a terminal."""

import statistics
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from quads_recipe.demo_process import LogTail
from quads_recipe.demo_report import Step, parse

# What the run itself says about the path taken, the settings and the targets.
NOTICE = "quads: "
ALARM = "quads: alarm"


class RunDisplay:
    """`update()` reads what is new in the run's metrics and log and shows it. Use as a context manager.

    On a terminal a bar stays at the bottom; elsewhere only plain lines are printed.
    """

    def __init__(self, metrics: Path, log: Path, total: int, console: Console | None = None):
        self.console = console or Console(highlight=False, soft_wrap=True)
        self.total, self.steps = total, []
        self._metrics, self._log = LogTail(metrics), LogTail(log)
        self._noticed: set[str] = set()
        self._bar = self._task = None

    def __enter__(self) -> "RunDisplay":
        if self.console.is_terminal:
            self._bar = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[eta]}"),
                console=self.console,
                transient=True,
            )
            self._task = self._bar.add_task("starting Ray, verl and vLLM", total=self.total, eta="")
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def update(self) -> None:
        """Shows new steps, alarms and, up to the first step, what the run says about itself (later: at every sync)."""
        for line in self._log.lines():
            wanted = ALARM if self.steps else NOTICE
            if line.startswith(wanted) and line not in self._noticed:
                self._noticed.add(line)
                self.console.print(line, markup=False)
        for step in parse(self._metrics.lines()).steps:
            self.steps.append(step)
            self.console.print(self.describe(step), markup=False)
            if self._bar:
                self._bar.update(self._task, completed=len(self.steps), description="training", eta=self.eta())

    def describe(self, step: Step) -> str:
        """One line for a step, `step 12/40  reward 0.475  |d| 0.0053 (p99 0.119)  5.1 s  2 min left`."""
        parts = [f"step {step.step}/{self.total}", f"reward {step.reward:.3f}"]
        if step.d_mean is not None:
            tail = "" if step.d_p99 is None else f" (p99 {step.d_p99:.3f})"
            parts.append(f"|d| {step.d_mean:.4f}{tail}")
        if step.seconds is not None:
            parts.append(f"{step.seconds:.1f} s")
        return "  ".join([*parts, self.eta()]).rstrip()

    def eta(self) -> str:
        """Time left by the median of the last ten steps; empty while unknown or when done.

        The first step does not count: what is compiled or filled at first use makes it several times as long.
        """
        recent = [s.seconds for s in self.steps[1:][-10:] if s.seconds is not None]
        left = self.total - len(self.steps)
        if not recent or left <= 0:
            return ""
        seconds = statistics.median(recent) * left
        return f"{seconds / 60:.0f} min left" if seconds >= 90 else f"{seconds:.0f} s left"
