"""The measurements of `quads diagnose`: arms, the ratio series, layers, and layers left out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quads_ops.settings import ARMS, ActorSettings, QuadsSettings
from quads_recipe.analysis import decompose
from quads_recipe.analysis.cost import Cost, cost
from quads_recipe.analysis.decompose import Parts, Summary
from quads_recipe.analysis.layers import LayerErrors
from quads_recipe.analysis.legs import Leg, path_of
from quads_recipe.analysis.rollouts import RolloutKey, TokenSet, key_of, with_rollout
from quads_recipe.analysis.routing import flipped
from quads_recipe.analysis.sites import exclusion_units
from quads_recipe.analysis.trainer_side import Forward, TrainerSide


@dataclass(frozen=True)
class Flips:
    """Routing of an arm's tokens: actor against the emulated rollout."""

    layers: torch.Tensor
    """bool [tokens, routers]: the token that predicts this one went to other experts in that layer."""
    before: torch.Tensor
    """int64 [tokens]: how many earlier tokens of the sequence went to other experts somewhere."""
    replayed: torch.Tensor
    """FP64 [tokens]: d_weight + d_act when the emulated rollout is made to use the actor's experts."""


@dataclass(frozen=True)
class ArmResult:
    """One arm on the tokens that its own rollout sampled, or one ratio on the common tokens."""

    arm: str
    settings: QuadsSettings
    tokens: TokenSet
    parts: Parts
    summary: dict[str, Summary]
    cost: Cost
    flips: Flips | None

    @property
    def emulated(self) -> torch.Tensor:
        """d_weight + d_act: what the trainer can see of the rollout's rounding."""
        return self.parts.weight + self.parts.act

    def flip_share(self) -> float | None:
        """Share of mean |d_weight + d_act| that disappears when routing is replayed."""
        whole = self.emulated.abs().mean()
        if self.flips is None or whole == 0:
            return None
        return (1 - self.flips.replayed.abs().mean() / whole).item()


@dataclass(frozen=True)
class LeftOut:
    """Sites whose activations stay unquantized (the weights are still NVFP4), at one ratio, on the common tokens."""

    unit: str
    """Joined linears or a layer's experts, see `sites.exclusion_units`."""
    modules: tuple[str, ...]
    """What to put into quads.exclude."""
    mean: float
    """mean |d_act|, nats"""
    removed: float
    """Share of mean |d_act| that this removes."""
    error: float
    """Standard error of `removed`, from the same sequences with and without."""
    cost: Cost


def arm_settings(settings: QuadsSettings, arm: str) -> QuadsSettings:
    """The settings with an arm's modes and ratio; targets and the residual's other fields stay."""
    changed = with_rollout(settings, key_of(arm))
    return dataclasses.replace(changed, arm=arm, actor=ActorSettings(mode=ARMS[arm][0]))


class Measurements:
    """Runs forwards on one `TrainerSide`, each only once."""

    def __init__(self, trainer: TrainerSide):
        self.trainer = trainer
        self.shape = trainer.shape()
        self._done: dict[tuple, Forward] = {}

    def arm(self, settings: QuadsSettings, tokens: TokenSet) -> ArmResult:
        """Decompose d of `settings` on the rollout's tokens."""
        path = path_of(settings)
        actor = self._actor(tokens, settings.actor.mode)
        weights, activations = self._leg(tokens, path.weights), self._leg(tokens, path.activations)
        parts = decompose.decompose(tokens.logprobs, actor.logprobs, weights.logprobs, activations.logprobs)
        return ArmResult(
            arm=settings.arm,
            settings=settings,
            tokens=tokens,
            parts=parts,
            summary=decompose.summarize(parts, tokens.sequence),
            cost=cost(self.shape, settings.rollout),
            flips=self._flips(tokens, path.activations, actor, activations),
        )

    def layers(self, series: dict[float, TokenSet], limit: int) -> LayerErrors:
        """Errors of every site at the series' ratios, on about `limit` tokens of its samples."""
        samples = _first(next(iter(series.values())).samples, limit)
        return self.trainer.layer_errors(samples, {ratio: t.residuals for ratio, t in series.items()})

    def left_out(self, settings: QuadsSettings, tokens: TokenSet, units: Sequence[str]) -> list[LeftOut]:
        """Each unit in turn with unquantized activations."""
        path = path_of(settings)
        reference = self._leg(tokens, path.weights).logprobs
        whole = (self._leg(tokens, path.activations).logprobs - reference).abs()
        by_unit = exclusion_units(self.trainer.sites)
        results = []
        for unit in units:
            sites = frozenset(by_unit[unit])
            spared = self.trainer.leg(tokens.samples, path.activations, tokens.residuals, spared=sites)
            size = (spared.logprobs - reference).abs()
            # Of the ratio size.mean() / whole.mean(), both on the same sequences.
            ratio = (size.mean() / whole.mean()).item() if whole.mean() > 0 else 1.0
            _, error = decompose.mean_and_error(size - ratio * whole, tokens.sequence)
            results.append(
                LeftOut(
                    unit=unit,
                    modules=tuple(dict.fromkeys(m for site in by_unit[unit] for m in self.trainer.sites[site].modules)),
                    mean=size.mean().item(),
                    removed=1 - ratio,
                    error=error / whole.mean().item() if whole.mean() > 0 else 0.0,
                    cost=cost(self.shape, settings.rollout, sites),
                )
            )
        return results

    # -- forwards

    def _actor(self, tokens: TokenSet, mode: str) -> Forward:
        key = (tokens.samples, "actor", mode)
        if key not in self._done:
            self._done[key] = self.trainer.actor(tokens.samples, mode, record=True)
        return self._done[key]

    def _leg(self, tokens: TokenSet, leg: Leg) -> Forward:
        key = (tokens.samples, leg, tokens.key.ratio if leg.compensated else 0.0)
        if key not in self._done:
            self._done[key] = self.trainer.leg(tokens.samples, leg, tokens.residuals, record=True)
        return self._done[key]

    def _flips(self, tokens: TokenSet, leg: Leg, actor: Forward, emulated: Forward) -> Flips | None:
        if not self.trainer.routing.routers:
            return None
        batches = self.trainer.batches(tokens.samples)
        layers, before = [], []
        for batch, mine, theirs in zip(batches, actor.choices, emulated.choices, strict=True):
            changed = flipped(mine, theirs)
            layers.append(changed[batch.flat].cpu())
            anywhere = (changed.any(-1).view(batch.mask.shape) & batch.mask).long()
            before.append((anywhere.cumsum(-1) - anywhere)[batch.row, batch.position].cpu())
        layers = torch.cat(layers)
        if bool(layers.any()) or any(bool(b.any()) for b in before):
            replayed = self.trainer.leg(tokens.samples, leg, tokens.residuals, replay=actor.choices).logprobs
        else:
            replayed = emulated.logprobs
        return Flips(layers, torch.cat(before), replayed - actor.logprobs)


def series_settings(settings: QuadsSettings, ratio: float) -> QuadsSettings:
    """Arm quads at another ratio."""
    return with_rollout(arm_settings(settings, "quads"), RolloutKey("w4a4", ratio))


def _first(samples, limit: int) -> list:
    chosen, total = [], 0
    for sample in samples:
        if chosen and total + len(sample) > limit:
            break
        chosen.append(sample)
        total += len(sample)
    return chosen
