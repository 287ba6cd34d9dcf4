"""`quads make-policy`: trains a policy for the demo from a seed and writes a Hugging Face checkpoint folder."""

import argparse
import sys
from pathlib import Path


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="quads make-policy", description=__doc__)
    p.add_argument("--out", type=Path, required=True, help="folder to write; must be new or empty")
    p.add_argument("--variant", choices=("natural", "outlier"), default="natural", help="default natural")
    p.add_argument("--seed", type=int, default=0, help="of the weights, the data and their order (default 0)")
    p.add_argument("--clean-steps", type=int, help="steps on clean demonstrations")
    p.add_argument("--imperfect-steps", type=int, help="steps on imperfect demonstrations")
    p.add_argument("--error-rate", type=float, help="probability of a wrong running sum in an imperfect demonstration")
    p.add_argument("--outlier-strength", type=float, help="factor on an outlier channel (default 16)")
    p.add_argument("--from", dest="source", type=Path, metavar="DIR", help="take this policy instead of training one")
    p.add_argument("--force", action="store_true", help="write it whatever its pass@1 is")
    return p


def main(argv: list[str] | None = None) -> int:
    """0 when the policy was written, 1 when it was refused or an argument was wrong."""
    args = parser().parse_args(argv)
    from quads_recipe.policy.make import PolicyRefused, make_policy
    from quads_recipe.policy.outliers import OutlierSettings
    from quads_recipe.policy.pretrain import TrainingSettings

    training = _given(
        seed=args.seed,
        clean_steps=args.clean_steps,
        imperfect_steps=args.imperfect_steps,
        error_rate=args.error_rate,
    )
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
