"""Residual activation compensation in a layer of the rollout: its masks, and the statistics they are chosen from.

A mask is frozen between two weight syncs. While tokens are generated, the residual's energy is summed in place; at a
sync, `end_period` folds the sums into a moving average and `choose` chooses new masks. Before there are any statistics,
the mask comes from the weights (`prior`): the blocks whose weights have the largest squared norm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from quads_ops import dispatch
from quads_ops.formats import BLOCK_SIZE
from quads_ops.residual import Residual, ResidualMask, TokenMask, select_masks
from quads_ops.residual_budget import Demand
from quads_ops.settings import ResidualSettings
from quads_ops.vllm_method.compat_vllm import RealTokens, real_tokens, serving_real_tokens


@dataclass
class RollReport:
    """What one sync did to the masks. Shares are sums over masks; divide by their counts."""

    covered: float = 0.0
    measured: int = 0
    """Masks that saw tokens in the period just ended; `covered` is the sum of their shares of residual energy."""
    moved: int = 0
    entries: int = 0
    """Mask entries that changed, of how many."""
    from_prior: int = 0
    """Masks now in force that still come from the weights."""
    by_sensitivity: int = 0
    """Masks now in force that gradients chose."""
    masks: int = 0
    spent: float = 0.0
    cost: float = 0.0
    """Extra GEMM FLOPs that the masks spend, of those of ratio 1, in relative units."""
    ratios: list[float] = field(default_factory=list)
    """Share of the entries compensated, a number for each layer's input."""

    def __iadd__(self, other: RollReport) -> RollReport:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)
        return self

    @property
    def spent_ratio(self) -> float | None:
        """Extra GEMM FLOPs that the masks spend, as a share of those of ratio 1; None without masks."""
        return self.spent / self.cost if self.cost else None

    def summary(self, ratio: float) -> dict[str, float | bool | None]:
        """For metrics; None where not measured.

        ratio: what to report as such. ratio_min, ratio_max: of the layers' masks, by entries. cost: `spent_ratio`.
        """
        return {
            "ratio": ratio,
            "ratio_min": min(self.ratios, default=None),
            "ratio_max": max(self.ratios, default=None),
            "cost": self.spent_ratio,
            "energy_covered": self.covered / self.measured if self.measured else None,
            "mask_moved": self.moved / self.entries if self.entries else None,
            "from_prior": self.from_prior > 0,
            "by_sensitivity": self.by_sensitivity / self.masks if self.masks else None,
        }


class Compensation:
    """Quantizes the input of one weight, and its residual.

    Args:
        settings: ratio, granularity, scope, score, allocation and ema.
        name: of the layer, for messages.
        k: this worker's K.
        experts: a mask per expert (the down projection's input), or None: one mask for all tokens.
        width: output channels that each token's entry is multiplied with, on all workers together.
    """

    def __init__(self, settings: ResidualSettings, name: str, k: int, experts: int | None, width: float = 1.0):
        self.settings, self.name, self.k, self.experts, self.width = settings, name, k, experts, width
        self.size = k // BLOCK_SIZE if settings.granularity == "block" else k
        self._state: dict[str, torch.Tensor] = {}
        self._masks: list[ResidualMask] = []
        self.version = 0
        """Grows whenever masks or ratio may have changed."""
        self.host_mask: torch.Tensor | None = None
        """The masks on the CPU, bool [masks, entries]: an engine that sleeps has given its device memory back."""
        self.sensitive = False
        """Whether the trainer has sent gradients."""

    # -- state

    def create(self, device: torch.device) -> None:
        """Allocate the state once; addresses never change afterwards."""
        if self._state:
            return
        rows = self.experts or 1
        self._state["statistics"] = dispatch.new_statistics(self.k, self.settings.granularity, device, self.experts)
        for name, dtype, shape in (
            ("mask", torch.bool, (rows, self.size)),
            ("tokens", torch.int64, (rows,)),
            ("average", torch.float32, (rows, self.size)),
            ("known", torch.bool, (rows,)),
            ("weight_energy", torch.float32, (rows, self.size)),
            ("gradient", torch.float32, (rows, self.size)),
            ("traffic", torch.float32, (rows,)),
        ):
            self._state[name] = torch.zeros(shape, dtype=dtype, device=device)
        self._masks = [ResidualMask(**{f"{self.settings.granularity}s": row}) for row in self._state["mask"]]
        self.host_mask = self._state["mask"].to("cpu", copy=True)

    def register(self, layer: torch.nn.Module, stem: str) -> None:
        """Make the state non-persistent buffers of `layer`, so that vLLM keeps it over sleep and wake-up."""
        for name, tensor in self._state.items():
            layer.register_buffer(f"{stem}_rac_{name}", tensor, persistent=False)

    def __getattr__(self, name: str) -> torch.Tensor:
        state = self.__dict__.get("_state", {})
        if name in state:
            return state[name]
        raise AttributeError(name)

    @property
    def energy(self) -> torch.Tensor:
        """Sum of r^2 in the period so far: FP32 [masks, entries]."""
        return self.statistics.sum(0).view(self.mask.shape)

    @property
    def masks(self) -> list[ResidualMask]:
        """One, or one per local expert, at fixed addresses."""
        return self._masks

    @property
    def frozen(self) -> bool:
        """True if a mask is in use: 0 < ratio < 1, chosen per step."""
        return self.settings.frozen

    def change(self, **settings) -> None:
        """Change fields of the settings; masks stay until they are next chosen. Raises SettingsError."""
        self.settings = replace(self.settings, **settings)

    def set_ratio(self, ratio: float) -> None:
        """Change the ratio; masks are chosen anew from what is known. Raises SettingsError outside [0, 1]."""
        self.change(ratio=ratio)
        self.choose()

    def set_gradient(self, squares: torch.Tensor) -> None:
        """squares: FP32 [K] or [E, K], mean over tokens of the squared gradient of the logprobs by this worker's input.

        Of a block the mean over its channels is kept: statistics hold the sum of r^2 over the block, so that their
        product is what independent r and gradient give where r^2 is spread evenly over the block.
        """
        squares = squares if squares.dim() == 2 else squares.unsqueeze(0)
        if self.settings.granularity == "block":
            squares = squares.unflatten(-1, (-1, BLOCK_SIZE)).mean(-1)
        self.gradient.copy_(squares)
        self.sensitive = True

    def set_weight_energy(self, squares: torch.Tensor) -> None:
        """squares: FP32 [K] or [E, K], the squared norm of each column of the dequantized weight (this worker's rows).

        A stack of experts behind one mask is summed.
        """
        squares = squares if squares.dim() == 2 else squares.unsqueeze(0)
        if self.experts is None:
            squares = squares.sum(0, keepdim=True)
        if self.settings.granularity == "block":
            squares = squares.unflatten(-1, (-1, BLOCK_SIZE)).sum(-1)
        self.weight_energy.copy_(squares)

    # -- while generating

    def one(self, x: torch.Tensor) -> torch.Tensor:
        """[M, K] -> FP32 [M, K], all tokens behind one mask."""
        stats = self.collect(x.shape[0])
        return dispatch.compensate(x, self.residual(), stats=None if stats is None else stats[0])

    def grouped(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """[M, K] sorted by expert, counts[e] rows each -> FP32 [M, K]; each expert has its own mask."""
        if not self.frozen:
            return dispatch.compensate(x, self.residual())
        stats = self.collect(torch.tensor(counts, device=x.device))
        return dispatch.compensate_grouped(x, counts, self.mask, stats=None if stats is None else stats[0])

    def collect(self, tokens: int | torch.Tensor) -> torch.Tensor | None:
        """Where the residual's energy of these tokens is to be added (`dispatch.new_statistics`), or None.

        tokens: how many, or int64 [experts].
        """
        return self._count(tokens) if self.frozen and serving_real_tokens() else None

    def prepare(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, RealTokens | None]:
        """The input [M, K] of an operator, of one mask: with zeros in rows that are no token and so have no energy.

        Returns x, where its energy is to be added or None, and which rows are tokens or None: not known, or not asked.
        The same happens in warm-up runs as in those that are captured after them: in a capture no kernel can be loaded.
        """
        real = real_tokens(x) if self.frozen else None
        if real is None:
            return x, self.collect(len(x)), None
        return torch.where(real.rows, x, real.zero), self._count(real.count), real

    def collect_routed(self, tokens: Callable[[], torch.Tensor], real: RealTokens | None) -> torch.Tensor | None:
        """As `collect`, of experts. tokens: gives int64 [experts]. real: what `prepare` said of their input."""
        counted = self.frozen and (real is not None or serving_real_tokens())
        return self._count(tokens()) if counted else None

    def _count(self, tokens: int | torch.Tensor) -> torch.Tensor:
        self.tokens += tokens
        return self.statistics

    def residual(self) -> Residual:
        """What the layer compensates; with a mask per expert, `masks` are meant."""
        ratio = self.settings.ratio
        if ratio in (0, 1):
            return "all" if ratio else None
        if self.settings.scope == "token":
            return TokenMask(ratio, self.settings.granularity)
        return self._masks[0]

    # -- at a sync

    def end_period(self) -> RollReport:
        """Fold the period's sums into the moving averages, and begin anew."""
        if not self.frozen:
            return RollReport()
        energy, seen = self.energy, self.tokens > 0
        covered = _share(energy, self.mask)[seen]
        period = energy / self.tokens.clamp(min=1).unsqueeze(-1)
        ema = self.settings.ema
        mixed = torch.lerp(period, self.average, ema)
        current = torch.where(self.known.unsqueeze(-1), mixed, period)
        self.average.copy_(torch.where(seen.unsqueeze(-1), current, self.average))
        if bool(seen.any()):  # the layer ran; an expert without a token is one that costs less
            tokens = self.tokens.float()
            self.traffic.copy_(torch.lerp(tokens, self.traffic, ema) if bool(self.known.any()) else tokens)
        self.known |= seen
        self.statistics.zero_()
        self.tokens.zero_()
        return RollReport(covered=float(covered.sum()), measured=len(covered))

    def choose(self, allocated: torch.Tensor | None = None) -> RollReport:
        """Choose the masks: `ratio` of the entries of largest score, from the weights where nothing is known yet.

        allocated: bool [masks, entries], what a shared budget chose for the masks that are known.

        Raises:
            ValueError: the statistics are not finite.
        """
        self.version += 1
        if not self.frozen:
            return RollReport()
        before = self.mask.clone()
        score = torch.where(self.known.unsqueeze(-1), self._score(), self.weight_energy)
        try:
            chosen = select_masks(score, self.settings.ratio)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None
        if allocated is not None:
            chosen = torch.where(self.known.unsqueeze(-1), allocated.to(chosen.device), chosen)
        self.mask.copy_(chosen)
        self.host_mask = self.mask.to("cpu", copy=True)
        return self._report(before)

    def roll(self) -> RollReport:
        """`end_period` and `choose`, for a layer by itself."""
        report = self.end_period()
        report += self.choose()
        return report

    def demand(self) -> Demand:
        """What a shared budget needs to know of the masks that are known; the others want nothing of it.

        Raises:
            ValueError: the statistics are not finite.
        """
        score = torch.where(self.known.unsqueeze(-1), self._score(), 0.0)
        if not bool(score.isfinite().all()):
            raise ValueError(f"{self.name}: the residual's statistics are not finite")
        return Demand(score, self.width, torch.where(self.known, self.traffic, 0.0))

    def _score(self) -> torch.Tensor:
        """FP32 [masks, entries], from the moving average: what compensating an entry is worth for one token."""
        if self.settings.score == "weighted":
            return self.average * self.weight_energy
        if self.settings.score == "sensitivity" and self.sensitive:
            return self.average * self.gradient
        return self.average

    def _report(self, before: torch.Tensor) -> RollReport:
        known = int(self.known.sum())
        # Before any token was seen, every mask counts alike.
        traffic = self.traffic.double() if float(self.traffic.sum()) else torch.ones_like(self.traffic).double()
        kept = self.mask.sum(-1).double()
        return RollReport(
            moved=int((before ^ self.mask).sum()),
            entries=self.mask.numel(),
            from_prior=len(self.known) - known,
            by_sensitivity=known if self.settings.score == "sensitivity" and self.sensitive else 0,
            masks=len(self.known),
            spent=float((kept * traffic).sum()) * self.width,
            cost=float(traffic.sum()) * self.width * self.size,
            ratios=[float(self.mask.float().mean())],
        )

    def forget(self) -> None:
        """Drop all statistics; the masks stay until the next choice, which then comes from the weights."""
        self.statistics.zero_()
        self.tokens.zero_()
        self.traffic.zero_()
        self.average.zero_()
        self.known.zero_()

    def describe(self) -> dict[str, object]:
        """A summary for people: plain numbers and text."""
        residual = self.residual()
        kind = {ResidualMask: "frozen mask", TokenMask: "mask per token"}.get(type(residual), residual or "none")
        summary: dict[str, object] = {"ratio": self.settings.ratio, "residual": kind, "k": self.k}
        if self.frozen:
            summary["granularity"] = self.settings.granularity
            summary["score"] = self.settings.score
            summary["allocation"] = self.settings.allocation
            summary["sensitive"] = self.sensitive
            summary["chosen"] = self.mask.sum(-1).tolist()
            summary["entries"] = self.size
            summary["from_prior"] = (~self.known).tolist()
            summary["tokens"] = self.tokens.tolist()
        return summary


def _share(energy: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """For each mask the part of the energy that lies under it, 1 where there is none: [masks, entries] -> [masks]."""
    total = energy.sum(-1)
    return torch.where(total > 0, torch.where(mask, energy, 0.0).sum(-1) / total, 1.0)
