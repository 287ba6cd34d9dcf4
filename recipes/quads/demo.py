"""`quads demo`: a small mixture-of-experts policy learns chain sums by GRPO, through verl's own trainer.

Writes the data as verl parquet files, runs `python -m verl.trainer.main_ppo` on them, shows the steps as they come,
and ends with a table, the curves and what came out.
"""

import argparse
import json
import os
import re
import shlex
import sys
import time
from pathlib import Path

from quads_recipe import scratch
from quads_recipe.ending_signals import handled
from quads_recipe.paths import POLICIES, configs_dir, given_folder, hydra_value, policy_dir

POLL_SECONDS = 0.5
INTERRUPTED = 130


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="quads demo", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--arm", default="quads", help="bf16, fp8, naive, qat, symmetric, quads (default) or quads_full")
    p.add_argument("--steps", type=int, default=40, help="training steps (default 40)")
    p.add_argument("--policy", default="natural", help=f"{', '.join(POLICIES)} or a folder (default natural)")
    p.add_argument("--seed", type=int, default=0, help="of the problems, the sampling and the order (default 0)")
    p.add_argument("--run-dir", help="folder for everything the run writes (default runs/demo-TIME)")
    p.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a hydra override for the trainer, such as actor_rollout_ref.actor.optim.lr=5e-5; may be repeated",
    )
    return p


class DemoError(Exception):
    """A wrong argument: the message names it and the remedy."""


def main(argv: list[str] | None = None) -> int:
    """0 when training finished, 1 when it failed, 2 for a wrong argument, 130 when interrupted."""
    args = parser().parse_args(argv)
    try:
        run_dir, command, environment = prepare(args)
    except (DemoError, OSError) as error:
        print(f"quads demo: {error}", file=sys.stderr)
        return 2
    print(f"run folder: {run_dir}\nby hand:    {run_dir / 'command.sh'}", flush=True)
    print("Starting Ray, verl and vLLM takes a minute or more; then there is a line for each step.", flush=True)
    with handled(_interrupt):  # a terminated demo must end its trainer too, as with Ctrl-C
        status = train(command, environment, run_dir, args.steps)
    report(run_dir, f"QUADS demo: arm {args.arm}, policy {Path(args.policy).name}, seed {args.seed}")
    return status


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def prepare(args: argparse.Namespace) -> tuple[Path, list[str], dict[str, str]]:
    """Checks the arguments, writes the data and the command into the run folder.

    Returns (run folder, command, environment). Raises DemoError or OSError.
    """
    check(args)
    policy = policy_dir(args.policy)
    run_dir = make_run_dir(args.run_dir)
    from quads_recipe.demo_data import write_data

    # verl goes through the data again if a batch larger than 16 uses it up.
    files = write_data(run_dir / "data", train=max(1024, 16 * args.steps), seed=args.seed)
    command = build_command(args, policy, run_dir, files)
    added = run_environment(run_dir)
    _write_script(run_dir / "command.sh", command, added)
    return run_dir, command, {**os.environ, **added}


def check(args: argparse.Namespace) -> None:
    """Raises DemoError for what can be seen without starting the trainer, which checks the rest itself."""
    from quads_ops.settings import ARMS

    if args.arm not in ARMS:
        raise DemoError(f"--arm: {args.arm!r} is unknown; use one of {', '.join(ARMS)}")
    if args.steps < 1:
        raise DemoError(f"--steps: {args.steps} is not a number of training steps; give 1 or more")
    if not 0 <= args.seed < 2**31:
        raise DemoError(f"--seed: {args.seed} is not within 0 and 2^31 - 1")
    if not args.policy.strip():
        raise DemoError(f"--policy: {args.policy!r} names no model; use one of {', '.join(POLICIES)}, or a folder")
    for override in args.overrides:
        if "=" not in override:
            raise DemoError(f"--set: {override!r} has no '='; write it as key=value")
    try:
        scratch.require_room()
    except scratch.ScratchError as error:
        raise DemoError(str(error)) from None


def make_run_dir(given: str | Path | None) -> Path:
    """The run folder, made, and empty. Raises DemoError."""
    try:
        folder = given_folder(time.strftime("runs/demo-%Y%m%d-%H%M%S") if given is None else given).resolve()
    except argparse.ArgumentTypeError as error:
        raise DemoError(f"--run-dir: {error}") from None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise DemoError(f"--run-dir: {folder} is not empty; give another folder or remove it")
        (folder / "log.txt").touch()
    except OSError as error:
        raise DemoError(f"--run-dir: can't write in {folder} ({error.strerror}); give another folder") from None
    return folder


def build_command(args: argparse.Namespace, policy: Path, run_dir: Path, files: tuple[Path, Path]) -> list[str]:
    """The main_ppo command line; the caller's own overrides come last, so they win."""
    settings = {
        "quads.arm": args.arm,
        "actor_rollout_ref.model.path": hydra_value(policy),
        "actor_rollout_ref.rollout.seed": args.seed,
        "actor_rollout_ref.actor.data_loader_seed": args.seed,
        "actor_rollout_ref.actor.fsdp_config.seed": args.seed,
        "data.train_files": hydra_value(files[0]),
        "data.val_files": hydra_value(files[1]),
        "reward.custom_reward_function.path": "pkg://quads_recipe.reward",
        "trainer.total_training_steps": args.steps,
        "trainer.logger": "[console,tensorboard,file]",
        "trainer.default_local_dir": hydra_value(run_dir / "checkpoints"),
        "hydra.run.dir": hydra_value(run_dir / "hydra"),
    }
    command = [sys.executable, "-m", "verl.trainer.main_ppo"]
    command += ["--config-path", str(configs_dir()), "--config-name", "quads_demo"]
    return command + [f"{key}={value}" for key, value in settings.items()] + args.overrides


def run_environment(run_dir: Path) -> dict[str, str]:
    """What the trainer needs in its environment beside the caller's own."""
    return {
        "VERL_PLATFORM": "cpu",
        "VERL_FILE_LOGGER_PATH": str(run_dir / "metrics.jsonl"),
        "TENSORBOARD_DIR": str(run_dir / "tensorboard"),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def _write_script(path: Path, command: list[str], environment: dict[str, str]) -> None:
    lines = [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]
    if metrics := environment.get("VERL_FILE_LOGGER_PATH"):
        lines += _another_metrics_file(metrics)
    arguments = " \\\n  ".join(shlex.quote(part) for part in command)
    path.write_text("\n".join(["#!/bin/sh", *lines, f'exec {arguments} "$@"', ""]))
    path.chmod(0o755)


def _another_metrics_file(metrics: str) -> list[str]:
    """Lines of sh: where `metrics` is there already, metrics-2.jsonl or the next that is free takes its place."""
    stem = re.sub(r"(-\d+)?\.jsonl$", "", metrics)
    return [
        "# verl's file logger would overwrite the metrics of an earlier run.",
        "attempt=1",
        'while [ -e "$VERL_FILE_LOGGER_PATH" ]; do',
        "  attempt=$((attempt + 1))",
        f"  export VERL_FILE_LOGGER_PATH={shlex.quote(stem)}-$attempt.jsonl",
        "done",
    ]


def train(command: list[str], environment: dict[str, str], run_dir: Path, steps: int) -> int:
    """Runs the trainer and shows its steps. 0, 1 when it failed, 130 when interrupted; nothing is left running.

    Its temporary files (Ray's session, sockets) lie in a folder of their own, which is removed at the end.
    """
    from quads_recipe.demo_process import TrainerProcess, error_lines
    from quads_recipe.demo_progress import RunDisplay

    log, metrics = run_dir / "log.txt", run_dir / "metrics.jsonl"
    try:
        with (
            scratch.made() as folder,
            TrainerProcess(command, environment | scratch.environment(folder, environment), log, folder) as trainer,
            RunDisplay(metrics, log, steps) as display,
        ):
            while (status := trainer.poll()) is None:
                display.update()
                time.sleep(POLL_SECONDS)
            display.update()
    except KeyboardInterrupt:
        print(f"interrupted; the trainer was ended. Log: {log}", file=sys.stderr)
        return INTERRUPTED
    if status:
        print(f"the trainer failed with status {status}:", file=sys.stderr)
        print("\n".join(f"  {line}" for line in error_lines(log)) + f"\nlog: {log}", file=sys.stderr)
        return 1
    return 0


def report(run_dir: Path, title: str) -> None:
    """Table, verdict and curves of what the run logged; says so if it logged nothing."""
    from quads_recipe.demo_plot import draw
    from quads_recipe.demo_report import read, summary, table, verdict

    metrics = read(run_dir / "metrics.jsonl")
    if not metrics.steps:
        print("no training step was finished")
        return
    draw(metrics, run_dir / "curves.png", title)
    (run_dir / "summary.json").write_text(json.dumps(summary(metrics), indent=1) + "\n")
    lines = ["", table(metrics.steps), "", *verdict(metrics), f"curves:      {run_dir / 'curves.png'}"]
    lines += [f"tensorboard: tensorboard --logdir {shlex.quote(str(run_dir / 'tensorboard'))}"]
    print("\n".join(lines))
