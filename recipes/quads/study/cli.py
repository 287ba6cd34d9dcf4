"""`quads study`: the paper's experiment in miniature, through verl's own trainer.

Trains every arm from the same policy on the same prompts with several seeds, evaluates the
weights on held-out problems in the arm's own rollout engine and in BF16, and judges the paper's claims by tests over
the seeds. Start it again with the same arguments to go on where it was interrupted.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from contextlib import closing
from pathlib import Path

from quads_recipe import ending_signals
from quads_recipe.paths import given_folder
from quads_recipe.study import arguments, folder
from quads_recipe.study.plan import StudyError, read_object
from quads_recipe.study.presets import ALL_ARMS, PRESETS, STRESSES

WRONG, FAILED, INTERRUPTED = 2, 1, 130


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="quads study", description=__doc__, epilog=_epilog(), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--preset", default="quick", choices=PRESETS, help="prepared study (default %(default)s)")
    p.add_argument("--out", type=given_folder, help="folder of the study (default runs/study-PRESET-...)")
    p.add_argument("--policy", help="natural, outlier or a checkpoint folder (default: the preset's)")
    p.add_argument("--outlier-strength", type=float, metavar="FACTOR", help="of the policy `outlier` (shipped: 16)")
    p.add_argument("--stress", action="append", default=[], choices=STRESSES, help="harder settings; may be repeated")
    p.add_argument("--arms", help=f"separated by commas, of {', '.join(ALL_ARMS)}")
    p.add_argument("--seeds", type=int, help="how many")
    p.add_argument("--steps", type=int, help="training steps of a run")
    p.add_argument("--heldout", type=int, help="held-out problems of the evaluation")
    p.add_argument("--samples", type=int, help="responses to each of them")
    p.add_argument("--data", type=Path, nargs=2, metavar=("TRAIN", "HELDOUT"), help="own verl parquet files")
    p.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a hydra override for every run; may be repeated",
    )
    p.add_argument("--jobs", type=int, default=1, help="runs at a time (default 1); each needs a core and about 7 GiB")
    instead = p.add_mutually_exclusive_group()
    instead.add_argument(
        "--dry-run", action="store_true", help="check everything, show the plan and what it would cost, start nothing"
    )
    instead.add_argument("--report", action="store_true", help="only write the report again, of what the folder holds")
    instead.add_argument(
        "--compare", type=Path, nargs="+", metavar="STUDY", help="only compare these folders of studies or reports"
    )
    return p


def _epilog() -> str:
    lines = ["presets:"] + [f"  {p.name:<14} {p.about}" for p in PRESETS.values()]
    lines += ["", "stress settings:"] + [f"  {s.name:<14} {s.about}" for s in STRESSES.values()]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """0 when every run and evaluation is done, 1 when one failed, 2 for a wrong argument, 130 when interrupted."""
    args = parser().parse_args(argv)
    with ending_signals.handled(_interrupt):
        return _main(args, arguments.given(parser(), argv))


def _main(args: argparse.Namespace, given: set[str]) -> int:
    """given: names of the options on the command line."""
    try:
        arguments.check_alone(given)
        if args.compare:
            return _compare(args)
        return _report(args.out) if args.report else run(args)
    except (StudyError, OSError) as error:
        text = folder.explained(error) if isinstance(error, OSError) else str(error)
        print(f"quads study: {text}", file=sys.stderr)
        return WRONG
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return INTERRUPTED


def _interrupt(*_: object) -> None:
    """Another one is ignored: it would cut short the ending of the trainers, and the report."""
    ending_signals.ignore()
    raise KeyboardInterrupt


def _report(out: Path | None) -> int:
    from quads_recipe.study import report

    if out is None:
        raise StudyError("--report: needs --out, the folder of a study")
    about = out / "about.json"
    if not about.is_file():
        raise StudyError(f"--out: {out} holds no study that was started; give the folder of one")
    folder.require_parts(out)
    remedy = "start the study again with the same arguments, which writes it"
    results = report.write(out, read_object(about, remedy))
    print("\n".join([*report.terminal_lines(results), f"report: {out / 'report' / report.PAGE}"]))
    return 0


def _compare(args: argparse.Namespace) -> int:
    from quads_recipe.study import compare

    out = args.out or Path("runs") / "study-compare"
    print("\n".join(compare.write(args.compare, out)))
    return 0


# -- a study


def run(args: argparse.Namespace) -> int:
    """Trains, evaluates and reports. Raises StudyError, OSError, KeyboardInterrupt."""
    from quads_recipe.study import estimate, prepare
    from quads_recipe.study.runner import lock, working

    prepared = prepare.prepare(args)
    lines = prepare.describe(prepared) + estimate.describe(prepared.plan, prepared.policy, args.jobs)
    if args.dry_run:
        lines += [f"can't start here: {one}" for one in prepared.lacking]
        if working(prepared.layout.study):
            lines.append("can't start now: another `quads study` is running in this folder; wait for it, or end it")
        print("\n".join(lines))
        return 0
    print("\n".join(lines), flush=True)
    with lock(prepared.layout.study):  # before the plan: a start beside a running study changes nothing
        prepare.commit(prepared)
        return _work(prepared, args.jobs)


def _work(prepared, jobs: int) -> int:
    from quads_recipe.study import report
    from quads_recipe.study.machine import code_digest
    from quads_recipe.study.progress import StudyDisplay
    from quads_recipe.study.runner import Runner

    plan, layout = prepared.plan, prepared.layout
    with StudyDisplay(plan, layout, jobs=jobs) as display:
        runner = Runner(plan, layout, prepared.policy, display, code_digest(), prepared.own_data)
        try:
            failed = _train_and_evaluate(prepared, runner, display, jobs)
        finally:  # of an interrupted study too: what there is
            results = report.write(layout.study, prepared.about)
    print("\n".join(report.terminal_lines(results)))
    for name, cause in failed.items():
        print(f"FAILED {name}: {' | '.join(cause)}", file=sys.stderr)
    print(f"report: {layout.report / report.PAGE}")
    print(f"tensorboard: tensorboard --logdir {shlex.quote(str(layout.study / 'runs'))}")
    return FAILED if failed else 0


def _train_and_evaluate(prepared, runner, display, jobs: int) -> dict[str, list[str]]:
    """Name -> cause of every run and evaluation that failed."""
    from quads_recipe.study import evaluate

    plan, layout = prepared.plan, prepared.layout
    engines = evaluate.engines(prepared.blocks)
    settings = evaluate.settings_of(prepared.config, plan, runner.files(plan.seeds[0]))
    failed = evaluate.evaluate(evaluate.start_jobs(layout, prepared.policy, engines), settings, layout, display)
    with closing(runner.train(layout.runs(plan), jobs)) as ended:  # interrupted, it ends the trainers
        for run_, done in ended:
            if not done:
                failed[run_.name] = run_.failure()["cause"]
            elif not plan.keep_weights:
                evaluations = evaluate.run_jobs(layout, run_, engines)
                failed |= evaluate.evaluate(evaluations, settings, layout, display)
                evaluate.drop_weights(evaluations, run_)
    finished = [run_ for run_ in layout.runs(plan) if run_.done()]
    evaluations = [job for run_ in finished for job in evaluate.run_jobs(layout, run_, engines)]
    return failed | evaluate.evaluate(evaluations, settings, layout, display)


if __name__ == "__main__":
    sys.exit(main())
