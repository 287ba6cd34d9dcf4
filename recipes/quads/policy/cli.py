"""`quads make-policy`: trains a policy for the demo from a seed and writes a Hugging Face checkpoint folder."""

import argparse
import math
import os
import sys
from pathlib import Path

from quads_recipe.paths import given_folder

TRAINING = ("seed", "layers", "clean_steps", "imperfect_steps", "error_rate")
"""Options that become fields of `TrainingSettings`."""


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="quads make-policy", description=__doc__)
    p.add_argument("--out", type=_new_folder, required=True, help="folder to write; must be new or empty")
    p.add_argument("--variant", choices=("natural", "outlier"), default="natural", help="default natural")
    p.add_argument("--seed", type=_seed, help="of the weights, the data and their order (default 0)")
    p.add_argument("--layers", type=_layers, help="layers of the model (default 4)")
    p.add_argument("--clean-steps", type=_steps, help="steps on clean demonstrations")
    p.add_argument("--imperfect-steps", type=_steps, help="steps on imperfect demonstrations")
    p.add_argument("--error-rate", type=_rate, help="probability of a wrong running sum in an imperfect demonstration")
    p.add_argument("--outlier-strength", type=_strength, help="factor on an outlier channel (default 16)")
    p.add_argument(
        "--from", dest="source", type=given_folder, metavar="DIR", help="take this policy instead of training one"
    )
    p.add_argument("--force", action="store_true", help="write it whatever its pass@1 is")
    return p


def _new_folder(text: str) -> Path:
    """Checked before the training, which takes minutes."""
    folder = given_folder(text)
    there = given_folder(next(path for path in (folder, *folder.absolute().parents) if path.exists()))
    if not os.access(there, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(f"can't write in {there}; give another folder")
    if there == folder and any(folder.iterdir()):
        raise argparse.ArgumentTypeError(f"{folder} is not empty; give another folder or remove it")
    return folder


def _steps(text: str) -> int:
    if (steps := _number(int, text)) < 0:
        raise argparse.ArgumentTypeError(f"{text} is not a number of steps; give 0 or more")
    return steps


def _layers(text: str) -> int:
    if (layers := _number(int, text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} layers make no model; give 1 or more")
    return layers


def _seed(text: str) -> int:
    if not -(2**63) <= (seed := _number(int, text)) < 2**63:
        raise argparse.ArgumentTypeError(f"{text} is not within 64 bits; give a smaller one")
    return seed


def _rate(text: str) -> float:
    if not 0 <= (rate := _number(float, text)) < 1:  # also refuses nan
        raise argparse.ArgumentTypeError(f"{text} is no probability from 0 up to, but not, 1; give one such as 0.25")
    return rate


def _strength(text: str) -> float:
    if not 0 < (strength := _number(float, text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and finite; give a factor such as 16")
    return strength


def _number(kind: type, text: str):
    try:
        return kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no {'whole ' * (kind is int)}number") from None


def main(argv: list[str] | None = None) -> int:
    """0 when the policy was written, 1 when it was refused or --from can't be read; other arguments exit with 2."""
    args = parser().parse_args(argv)
    training = _given(**{name: getattr(args, name) for name in TRAINING})
    if args.source and training:
        option = "--" + next(iter(training)).replace("_", "-")
        parser().error(f"argument {option}: not with --from, which trains nothing; leave one of them out")
    if args.outlier_strength is not None and args.variant != "outlier":
        parser().error("argument --outlier-strength: there are no outliers without --variant outlier")
    from quads_recipe.policy.make import PolicyRefused, make_policy
    from quads_recipe.policy.outliers import OutlierSettings
    from quads_recipe.policy.pretrain import TrainingSettings

    try:
        make_policy(
            args.out,
            args.variant,
            TrainingSettings(**training),
            OutlierSettings(**_given(strength=args.outlier_strength)),
            args.source,
            args.force,
            report=_report,
        )
    except (ValueError, OSError, PolicyRefused) as error:
        print(f"quads make-policy: {error}", file=sys.stderr)
        return 1
    _report(f"written to {args.out}")
    return 0


def _given(**options) -> dict:
    return {name: value for name, value in options.items() if value is not None}


def _report(line: str) -> None:
    print(line, flush=True)
