"""`quads diagnose`: where the difference between rollout and actor comes from on your model, and what to do about it.

Samples responses with the real rollout engine, scores them with the trainer's own forward, for every arm and several
residual ratios, and splits each token's difference into weights, activations and the engine's arithmetic. Needs no RL.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quads_ops.compat import UnsupportedVersion
from quads_ops.settings import ARMS, GRANULARITIES, SCOPES, QuadsSettings, SettingsError
from quads_recipe.analysis.prompts import PromptError, read_prompts
from quads_recipe.diagnose_run import DTYPES, DiagnoseError, Request
from quads_recipe.paths import POLICIES, given_folder, policy_dir

REASONS = (DiagnoseError, PromptError, SettingsError, UnsupportedVersion, FileNotFoundError)
"""Errors that explain themselves in one line."""
RATIOS = "0,0.125,0.25,0.5,0.75,1"
FAILED, WRONG, INTERRUPTED = 1, 2, 130
SEEDS = 1 << 62
"""Prompts count their seeds on from the first, and torch has 64 bits for them."""


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="quads diagnose", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--model", required=True, help=f"checkpoint folder, or a shipped policy ({', '.join(POLICIES)})")
    p.add_argument("--data", required=True, type=Path, help="prompts: .txt, .jsonl, or a verl .parquet")
    p.add_argument("--arms", default=",".join(ARMS), help="which arms (default all: %(default)s)")
    p.add_argument("--ratios", default=RATIOS, help="residual ratios (default %(default)s); '' for none")
    p.add_argument("--prompts", type=int, default=64, help="prompts to use, one response each (default %(default)s)")
    p.add_argument("--max-new", type=int, default=64, help="most tokens of a response (default %(default)s)")
    p.add_argument("--out", help="folder for the report (default runs/diagnose-TIME)")
    p.add_argument("--dtype", choices=DTYPES, default="bf16", help="compute dtype of both sides (default %(default)s)")
    p.add_argument("--seed", type=int, default=0, help="of the sampling (default 0)")
    p.add_argument("--raw", action="store_true", help="feed text prompts as they are, without the chat template")
    p.add_argument("--targets", help="quads.targets: all_linear (default), experts, or patterns separated by commas")
    p.add_argument("--exclude", help="quads.exclude: module names and re:patterns separated by commas")
    p.add_argument("--granularity", choices=GRANULARITIES, help="of the residual masks (default block)")
    p.add_argument("--scope", choices=SCOPES, help="of the residual masks (default step)")
    p.add_argument("--score", choices=("residual", "weighted"), help="of the residual masks (default residual)")
    p.add_argument("--leave-out", type=int, default=24, help="most layers to leave out in turn (default %(default)s)")
    p.add_argument("--worst", type=int, default=12, help="tokens of largest |d| to list per arm (default %(default)s)")
    return p


def main(argv: list[str] | None = None) -> int:
    """0 when the report was written, 1 when that failed, 2 for a wrong argument (a model or prompts that don't suit are
    some), 130 when interrupted."""
    args = parser().parse_args(argv)
    status, clock = WRONG, Clock()
    try:
        prepared = prepare(args, clock)
        status = FAILED
        work(args, prepared, clock)
    except REASONS as error:
        print(f"quads diagnose: {error}", file=sys.stderr)
        return status
    except KeyboardInterrupt:
        print("quads diagnose: interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0


class Clock:
    """Lines for the terminal, with the time since the start."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    def seconds(self) -> float:
        return time.monotonic() - self._started

    def say(self, line: str) -> None:
        print(f"[{self.seconds():6.1f} s] {line}", flush=True)


@dataclass(frozen=True)
class Prepared:
    """What is known to suit before an engine starts."""

    request: Request
    job: Any
    """quads_recipe.analysis.rollouts.Job"""
    out: Path


def prepare(args: argparse.Namespace, clock: Clock) -> Prepared:
    """Check everything that the user gave.

    Raises:
        DiagnoseError, PromptError, SettingsError, UnsupportedVersion, FileNotFoundError: one clear reason.
    """
    request = request_from(args)
    _quiet()

    from quads_recipe import diagnose_run

    job = diagnose_run.prepare(request, clock.say)
    return Prepared(request, job, _out_folder(args.out))  # only now: a wrong argument leaves no folder behind


def work(args: argparse.Namespace, prepared: Prepared, clock: Clock) -> Path:
    """Measure and write the report; returns the path of the HTML page.

    Raises:
        DiagnoseError: the report can't be written. Of the rest of REASONS what the engines meet.
    """
    from quads_recipe import diagnose_report, diagnose_run

    out = prepared.out
    results = diagnose_run.diagnose(prepared.request, prepared.job, clock.say)
    results["about"] |= {
        "data": args.data.name,
        "command": command_line(args),
        "seconds": round(clock.seconds(), 1),
        "date": time.strftime("%Y-%m-%d %H:%M"),
    }
    try:
        page = diagnose_report.write(out, results)
    except OSError as error:
        raise DiagnoseError(
            f"--out {out}: can't write the report: {error.strerror}; make room or give another folder, and run it "
            "again. What was in the folder before is unchanged"
        ) from None
    clock.say(f"report: {page}")
    print("\n".join(diagnose_report.terminal_lines(results)))
    return page


# -- arguments


def request_from(args: argparse.Namespace) -> Request:
    """Everything the run needs, checked as far as it can be without the model.

    Raises:
        DiagnoseError, PromptError, SettingsError, FileNotFoundError.
    """
    for name, least in (("prompts", 1), ("max_new", 1), ("worst", 1), ("leave_out", 0)):
        value = getattr(args, name)
        if value < least:
            raise DiagnoseError(f"--{name.replace('_', '-')} {value}: must be at least {least}")
    if not 0 <= args.seed < SEEDS:  # vLLM takes -1 for none
        raise DiagnoseError(f"--seed {args.seed}: must be from 0 to 2^62 - 1")
    if not args.model.strip():
        raise DiagnoseError(
            f"--model {args.model!r}: names no model; give a checkpoint folder, or {', '.join(POLICIES)}"
        )
    try:
        given_folder("runs" if args.out is None else args.out)
    except argparse.ArgumentTypeError as error:
        raise DiagnoseError(f"--out: {error}") from None
    return Request(
        model=str(policy_dir(args.model)),
        prompts=read_prompts(args.data),
        arms=tuple(parse_arms(args.arms)),
        ratios=tuple(parse_ratios(args.ratios)),
        settings=settings_from(args),
        dtype=args.dtype,
        count=args.prompts,
        max_new=args.max_new,
        seed=args.seed,
        raw=args.raw,
        leave_out=args.leave_out,
        worst=args.worst,
    )


def parse_arms(text: str) -> list[str]:
    """Arms in the order of ARMS. Raises DiagnoseError for an unknown one, or none."""
    wanted = [part.strip() for part in text.split(",") if part.strip()]
    unknown = [arm for arm in wanted if arm not in ARMS]
    if unknown or not wanted:
        raise DiagnoseError(f"--arms {text!r}: {unknown[0] if unknown else 'nothing'} is no arm; use {', '.join(ARMS)}")
    return [arm for arm in ARMS if arm in wanted]


def parse_ratios(text: str) -> list[float]:
    """Ratios in rising order, 0 and 1 always among them; empty for an empty text. Raises DiagnoseError."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    try:
        ratios = {float(part) for part in parts}
    except ValueError:
        raise DiagnoseError(f"--ratios {text!r}: needs numbers in [0, 1] separated by commas") from None
    if any(not 0 <= ratio <= 1 for ratio in ratios):
        raise DiagnoseError(f"--ratios {text!r}: a ratio is a share of the channels, in [0, 1]")
    return sorted(ratios | {0.0, 1.0}) if ratios else []


def settings_from(args: argparse.Namespace) -> QuadsSettings:
    """The `quads` block of the options. Raises SettingsError."""
    targets = args.targets
    if targets and targets not in ("all_linear", "experts"):
        targets = _patterns(targets)
    residual = {"granularity": args.granularity, "scope": args.scope, "score": args.score}
    return QuadsSettings.from_dict(
        {
            "arm": "quads",
            "targets": targets,
            "exclude": _patterns(args.exclude) if args.exclude else None,
            "rollout": {"residual": residual},
        }
    )


def _patterns(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _out_folder(given: str | None) -> Path:
    out = given_folder(time.strftime("runs/diagnose-%Y%m%d-%H%M%S") if given is None else given)
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise DiagnoseError(f"--out {out}: can't write there: {error.strerror}") from None
    return out


# -- the terminal


def _quiet() -> None:
    """Progress bars and notices of the libraries, unless somebody asked for them."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def command_line(args: argparse.Namespace) -> str:
    """The command again, with what differs from the defaults and without folders of this machine."""
    defaults = vars(parser().parse_args(["--model", "x", "--data", "x"]))
    given = [f"--model {Path(args.model).name} --data {args.data.name}"]
    for name, value in vars(args).items():
        if name not in ("model", "data", "out") and value != defaults[name]:
            flag = f"--{name.replace('_', '-')}"
            given.append(flag if value is True else f"{flag} {json.dumps(value) if value == '' else value}")
    return " ".join(["quads diagnose", *given])


if __name__ == "__main__":
    sys.exit(main())
