"""What the rollout says: responses with their logprobs, for every arm's rollout and for the ratios on common tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from quads_ops.settings import ARMS, QuadsSettings
from quads_recipe.analysis.masks import SiteResidual
from quads_recipe.analysis.rollout_engine import EngineOptions, Generated, RolloutEngine
from quads_recipe.analysis.score import Sample
from quads_recipe.words import plural

MASK_RATIO = 0.5
"""Ratio while gathering statistics. They do not depend on it, but an engine at ratio 0 or 1 gathers none."""
_OTHER_SEED = 1_000_000


@dataclass(frozen=True)
class RolloutKey:
    """What distinguishes one rollout from another; arms with the same key share its tokens."""

    mode: str
    ratio: float = 0.0


@dataclass(frozen=True)
class TokenSet:
    """Responses and what one rollout reported for them."""

    key: RolloutKey
    samples: tuple[Sample, ...]
    logprobs: torch.Tensor
    """FP64 [tokens], sample after sample."""
    sequence: torch.Tensor
    """int64 [tokens]: the sample of each token."""
    residuals: dict[str, SiteResidual] | None
    """Site -> residual in force, None where activations are not NVFP4."""


@dataclass
class Collected:
    """Everything from the engines."""

    own: dict[RolloutKey, TokenSet] = field(default_factory=dict)
    """Tokens that the rollout itself sampled."""
    series: dict[float, TokenSet] = field(default_factory=dict)
    """Ratio -> the same responses, scored by the rollout at that ratio; empty without a series."""


@dataclass(frozen=True)
class Job:
    """What to collect: responses of every key and every ratio. prompts and calibration: token ids; the latter only feed
    the masks' statistics."""

    options: EngineOptions
    settings: QuadsSettings
    keys: tuple[RolloutKey, ...]
    ratios: tuple[float, ...]
    prompts: Sequence[Sequence[int]]
    calibration: Sequence[Sequence[int]]
    max_new: int
    seed: int


def key_of(arm: str) -> RolloutKey:
    _, mode, ratio = ARMS[arm]
    return RolloutKey(mode, ratio)


def with_rollout(settings: QuadsSettings, key: RolloutKey) -> QuadsSettings:
    """The settings with another rollout mode and ratio."""
    residual = dataclasses.replace(settings.rollout.residual, ratio=key.ratio)
    return dataclasses.replace(
        settings, rollout=dataclasses.replace(settings.rollout, mode=key.mode, residual=residual)
    )


def collect(job: Job, say: Callable[[str], None]) -> Collected:
    """One engine per weight format, one after the other; ratios are switched in the running engine."""
    collected = Collected()
    for mode in dict.fromkeys(key.mode for key in job.keys):
        say(f"rollout {mode}: starting vLLM")
        ratio = MASK_RATIO if mode == "w4a4" else 0.0
        with RolloutEngine(job.options, with_rollout(job.settings, RolloutKey(mode, ratio))) as engine:
            if mode == "w4a4":
                _collect_w4a4(engine, job, collected, say)
            else:
                key = RolloutKey(mode)
                collected.own[key] = _sampled(engine, job, key)
                say(f"rollout {mode}: {plural(collected.own[key].logprobs.numel(), 'token')}")
    return collected


def _collect_w4a4(engine: RolloutEngine, job: Job, collected: Collected, say: Callable[[str], None]) -> None:
    engine.generate(job.calibration, job.max_new, job.seed + _OTHER_SEED)
    engine.choose_masks()
    for key in _ordered(job):
        engine.set_ratio(key.ratio)
        collected.own[key] = _sampled(engine, job, key)
        tokens = plural(collected.own[key].logprobs.numel(), "token")
        say(f"rollout w4a4, residual ratio {key.ratio:g}: {tokens}")
    if not job.ratios:
        return
    # Common tokens, or the ratios would differ by the luck of sampling too. The largest ratio is closest to the actor.
    common = collected.own[RolloutKey("w4a4", max(job.ratios))].samples
    for ratio in job.ratios:
        engine.set_ratio(ratio)
        scored = engine.score(common)
        collected.series[ratio] = token_set(RolloutKey("w4a4", ratio), scored, engine.residuals())
    say(f"residual ratios {', '.join(f'{r:g}' for r in job.ratios)} scored on common tokens")


def _ordered(job: Job) -> list[RolloutKey]:
    keys = [key for key in job.keys if key.mode == "w4a4"]
    return list(dict.fromkeys(keys + [RolloutKey("w4a4", ratio) for ratio in job.ratios]))


def _sampled(engine: RolloutEngine, job: Job, key: RolloutKey) -> TokenSet:
    generated = engine.generate(job.prompts, job.max_new, job.seed)
    return token_set(key, generated, engine.residuals() if key.mode == "w4a4" else None)


def token_set(key: RolloutKey, generated: Iterable[Generated], residuals: dict | None) -> TokenSet:
    """From what an engine returned."""
    generated = list(generated)
    counts = torch.tensor([len(g.logprobs) for g in generated])
    return TokenSet(
        key=key,
        samples=tuple(g.sample for g in generated),
        logprobs=torch.tensor([value for g in generated for value in g.logprobs], dtype=torch.float64),
        sequence=torch.repeat_interleave(torch.arange(len(generated)), counts),
        residuals=residuals,
    )
