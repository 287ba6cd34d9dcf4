"""Residual activation compensation in a layer of the rollout: its masks, and the statistics they are chosen from.

A mask is frozen between two weight syncs. While tokens are generated, the residual's energy is summed in place; at a
sync, `roll` folds the sums into a moving average and chooses new masks. Before there are any statistics, the mask
comes from the weights (`prior`): the blocks whose weights have the largest squared norm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from quads_ops import dispatch
from quads_ops.formats import BLOCK_SIZE
from quads_ops.residual import Residual, ResidualMask, TokenMask, select_mask
from quads_ops.settings import ResidualSettings
from quads_ops.vllm_method.compat_vllm import RealTokens, real_tokens, serving_real_tokens


@dataclass
class RollReport:
    """What one `roll` did. Shares are sums over masks; divide by their counts."""

    covered: float = 0.0
    measured: int = 0
    """Masks that saw tokens in the period just ended; `covered` is the sum of their shares of residual energy."""
    moved: int = 0
    entries: int = 0
    """Mask entries that changed, of how many."""
    from_prior: int = 0
    """Masks now in force that still come from the weights."""
    masks: int = 0

    def __iadd__(self, other: RollReport) -> RollReport:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)
        return self

    def summary(self, ratio: float) -> dict[str, float | bool | None]:
        """For metrics: ratio, energy_covered, mask_moved (None where not measured) and from_prior."""
        return {
            "ratio": ratio,
            "energy_covered": self.covered / self.measured if self.measured else None,
            "mask_moved": self.moved / self.entries if self.entries else None,
            "from_prior": self.from_prior > 0,
        }


class Compensation:
    """Quantizes the input of one weight, and its residual.

    Args:
        settings: ratio, granularity, scope, score and ema.
        name: of the layer, for messages.
        k: this worker's K.
        experts: a mask per expert (the down projection's input), or None: one mask for all tokens.
    """

    def __init__(self, settings: ResidualSettings, name: str, k: int, experts: int | None):
        self.settings, self.name, self.k, self.experts = settings, name, k, experts
        self.size = k // BLOCK_SIZE if settings.granularity == "block" else k
        self._state: dict[str, torch.Tensor] = {}
        self._masks: list[ResidualMask] = []
        self.version = 0
        """Grows whenever masks or ratio may have changed."""
        self.host_mask: torch.Tensor | None = None
        """The masks on the CPU, bool [masks, entries]: an engine that sleeps has given its device memory back."""

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
        return 0 < self.settings.ratio < 1 and self.settings.scope == "step"

    def set_ratio(self, ratio: float) -> None:
        """Change the ratio; masks are chosen anew from what is known. Raises SettingsError outside [0, 1]."""
        self.settings = replace(self.settings, ratio=ratio)
        self.choose()

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

    def roll(self) -> RollReport:
        """End a period: fold its sums into the moving average, choose new masks, begin anew.

        Raises:
            ValueError: the statistics are not finite.
        """
        if not self.frozen:
            return RollReport()
        before, energy, seen = self.mask.clone(), self.energy, self.tokens > 0
        covered = _share(energy, self.mask)[seen]
        period = energy / self.tokens.clamp(min=1).unsqueeze(-1)
        mixed = torch.lerp(period, self.average, self.settings.ema)
        current = torch.where(self.known.unsqueeze(-1), mixed, period)
        self.average.copy_(torch.where(seen.unsqueeze(-1), current, self.average))
        self.known |= seen
        self.statistics.zero_()
        self.tokens.zero_()
        self.choose()
        return RollReport(
            covered=float(covered.sum()),
            measured=len(covered),
            moved=int((before ^ self.mask).sum()),
            entries=self.mask.numel(),
            from_prior=int((~self.known).sum()),
            masks=len(self.known),
        )

    def choose(self) -> None:
        """Choose the masks from the moving average, or from the weights where there is none yet."""
        self.version += 1
        if not self.frozen:
            return
        score = self.average * self.weight_energy if self.settings.score == "weighted" else self.average
        score = torch.where(self.known.unsqueeze(-1), score, self.weight_energy)
        for row, line in enumerate(score):
            try:
                chosen = select_mask(line, self.settings.ratio, self.settings.granularity)
            except ValueError as error:
                raise ValueError(f"{self.name}: {error}") from None
            self.mask[row].copy_(chosen.flags)
        self.host_mask = self.mask.to("cpu", copy=True)

    def forget(self) -> None:
        """Drop all statistics; the masks stay until the next choice, which then comes from the weights."""
        self.statistics.zero_()
        self.tokens.zero_()
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
            summary["chosen"] = self.mask.sum(-1).tolist()
            summary["entries"] = self.size
            summary["from_prior"] = (~self.known).tolist()
            summary["tokens"] = self.tokens.tolist()
        return summary


def _share(energy: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """For each mask the part of the energy that lies under it, 1 where there is none: [masks, entries] -> [masks]."""
    total = energy.sum(-1)
    return torch.where(total > 0, torch.where(mask, energy, 0.0).sum(-1) / total, 1.0)
