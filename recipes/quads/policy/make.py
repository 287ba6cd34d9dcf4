"""`quads make-policy`: builds a policy and writes it as a Hugging Face checkpoint folder."""

import json
import platform
from collections.abc import Callable
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

import torch

from quads_recipe.policy.outliers import OutlierSettings, add_outliers
from quads_recipe.policy.pretrain import PassRate, TrainingSettings, one_thread, pass_rate, round_to_bf16, train

VARIANTS = ("natural", "outlier")
PASS_RANGE = (0.35, 0.6)
CARD = "policy.json"


class PolicyRefused(RuntimeError):
    """The policy is outside the range that leaves reinforcement learning something to do."""


def make_policy(
    out: Path,
    variant: str = "natural",
    training: TrainingSettings | None = None,
    outliers: OutlierSettings | None = None,
    source: Path | None = None,
    force: bool = False,
    n_problems: int = 512,
    report: Callable[[str], None] = print,
) -> dict:
    """Trains (or, with `source`, loads) a natural policy, adds outliers if asked, measures it and writes it to `out`.

    Returns the card that is written next to the weights: how it was made and its pass@1, on `n_problems` held-out
    problems, with the weights as stored.
    Raises:
        ValueError: unknown variant.
        FileExistsError: `out` already holds something.
        PolicyRefused: pass@1 outside PASS_RANGE, unless `force`; nothing is written.
    """
    if variant not in VARIANTS:
        raise ValueError(f"variant: {variant!r} is unknown; use one of {', '.join(VARIANTS)}")
    if out.exists() and any(out.iterdir()):
        raise FileExistsError(f"--out: {out} is not empty; give another folder or remove it")
    training, outliers = training or TrainingSettings(), outliers or OutlierSettings()
    with one_thread():
        model, tokenizer = load(source) if source else train(training, report)
        if variant == "outlier":
            add_outliers(model, outliers)
        round_to_bf16(model)
        sampled, greedy = measure(model, tokenizer, n_problems, report)
    if not force and not PASS_RANGE[0] <= sampled.mean <= PASS_RANGE[1]:
        raise PolicyRefused(
            f"pass@1 is {sampled.mean:.3f}, outside {PASS_RANGE[0]} to {PASS_RANGE[1]}; nothing was written. "
            "Change the number of steps or the seed, or write it anyway with --force"
        )
    card = {
        "variant": variant,
        "training": asdict(training) if source is None else _training_of(source),
        "outliers": asdict(outliers) if variant == "outlier" else None,
        "pass_at_1": asdict(sampled),
        "greedy": asdict(greedy),
        "versions": _versions(),
    }
    write(out, model, tokenizer, card)
    return card


def load(folder: Path):
    """(model fp32, tokenizer) of a checkpoint folder. Raises FileNotFoundError if it has no config.json."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder} has no config.json; give a Hugging Face checkpoint folder")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(folder)


def _training_of(folder: Path) -> dict | str:
    """How the policy in `folder` was trained, by its card."""
    card = folder / CARD
    return json.loads(card.read_text())["training"] if card.is_file() else f"unknown: {folder.name} has no {CARD}"


def measure(
    model, tokenizer, n_problems: int = 512, report: Callable[[str], None] = print
) -> tuple[PassRate, PassRate]:
    """(sampled, greedy) pass@1 on `n_problems` held-out problems."""
    sampled = pass_rate(model, tokenizer, n_problems)
    greedy = pass_rate(model, tokenizer, n_problems, greedy=True)
    for name, rate in (("pass@1 at temperature 1", sampled), ("greedy", greedy)):
        report(f"{name}: {rate.mean:.3f} +- {rate.standard_error:.3f} on held-out problems")
    return sampled, greedy


def write(out: Path, model, tokenizer, card: dict) -> None:
    """Writes weights in bf16, configuration, tokenizer and card."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    out.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / CARD).write_text(json.dumps(card, indent=2) + "\n")


def _versions() -> dict[str, str]:
    installed = {name: metadata.version(name) for name in ("torch", "transformers", "reasoning-gym")}
    return {"python": platform.python_version(), **installed}
