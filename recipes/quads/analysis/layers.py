"""How far each quantized product is from the unquantized one, on the inputs it really gets.

The inputs are those of the forward with the rollout's weights and unquantized activations: what a layer adds, not what
it inherits from the layers before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from quads_ops import nvfp4
from quads_ops.fp8 import fp8_qdq, row_amax
from quads_ops.residual import ResidualMask, compensate, residual_statistics, token_scale
from quads_recipe.analysis.emulation import Product
from quads_recipe.analysis.masks import Residuals, for_expert
from quads_recipe.analysis.sites import Site


@dataclass
class SiteErrors:
    """Sums over tokens of one site; the properties are what to read."""

    site: Site
    output: float = 0.0
    """Squared norm of the products with quantized weights and unquantized activations."""
    exact: float = 0.0
    """The same with unquantized weights."""
    weights: float = 0.0
    """Squared difference of these two."""
    fp8: float = 0.0
    """Squared difference that FP8 weights and activations make."""
    energy: float = 0.0
    """Of the activations' quantization residual, sum r^2."""
    error: dict[float, float] = field(default_factory=dict)
    """Ratio -> squared difference that quantized, compensated activations make."""
    covered: dict[float, float] = field(default_factory=dict)
    """Ratio -> energy of the residual behind the mask."""
    left: dict[float, float] = field(default_factory=dict)
    """Ratio -> energy of what compensation leaves over."""
    rows: int = 0

    @property
    def weight_error(self) -> float:
        """Relative error of the output, from the weights alone."""
        return _root(self.weights, self.exact)

    @property
    def fp8_error(self) -> float:
        """Relative error of the output in FP8, weights and activations."""
        return _root(self.fp8, self.exact)

    def activation_error(self, ratio: float) -> float:
        """Relative error of the output, from the activations alone."""
        return _root(self.error[ratio], self.output)

    def energy_covered(self, ratio: float) -> float:
        """Share of the residual's energy that the mask selects."""
        return self.covered[ratio] / self.energy if self.energy else 1.0

    def energy_removed(self, ratio: float) -> float:
        """Share of the residual's energy that is gone after its own quantization."""
        return 1 - self.left[ratio] / self.energy if self.energy else 1.0

    def add(self, other: SiteErrors) -> None:
        """Take other tokens, or another layer of the same kind, into the sums. `site` stays."""
        for name in ("output", "exact", "weights", "fp8", "energy", "rows"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("error", "covered", "left"):
            mine = getattr(self, name)
            for ratio, value in getattr(other, name).items():
                mine[ratio] = mine.get(ratio, 0.0) + value


class LayerErrors:
    """An observer (see `emulation`) that fills `by_site`.

    Args:
        residuals: ratio -> the rollout's residuals at that ratio; empty: activations are left as they are.
        fp8: also what FP8 would do to each product.

    Products are computed in FP32, whatever autocast the forward runs under, and differences from differences of the
    operands, so that rounding adds nothing to small errors.

    Set `valid` (bool [tokens]) before each forward; padding does not count.
    """

    def __init__(self, residuals: Mapping[float, Residuals], *, fp8: bool = True):
        self._residuals, self._fp8 = residuals, fp8
        self.by_site: dict[str, SiteErrors] = {}
        self.valid: torch.Tensor | None = None

    def product(self, seen: Product) -> None:
        valid = self.valid if seen.tokens is None else self.valid[seen.tokens]
        x = seen.x[valid].float()
        if not x.shape[0]:
            return
        sums = self.by_site.setdefault(seen.site.name, SiteErrors(seen.site))
        with torch.autocast(x.device.type, enabled=False):
            self._weights(seen, sums, x)
            self._activations(seen, sums, x)

    def _weights(self, seen: Product, sums: SiteErrors, x: torch.Tensor) -> None:
        source, quantized = seen.weight.float(), seen.quantized.float()
        exact, change = x @ source.t(), x @ (quantized - source).t()
        sums.exact += _norm(exact)
        sums.weights += _norm(change)
        sums.output += _norm(exact + change)
        if self._fp8:
            sums.fp8 += _norm(fp8_qdq(x, row_amax(x)) @ fp8_qdq(source, row_amax(source)).t() - exact)

    def _activations(self, seen: Product, sums: SiteErrors, x: torch.Tensor) -> None:
        quantized = seen.quantized.float()
        # q, k and v, or gate and up, are several products of one activation, which counts once.
        first = seen.parameter == seen.site.parameters[0]
        if first:
            sums.rows += x.shape[0]
            sums.energy += _norm(x - nvfp4.qdq(x, token_scale(x)))
        for ratio, residuals in self._residuals.items():
            residual = for_expert(residuals[seen.site.name], seen.expert)
            rest = compensate(x, "w4a4", residual) - x
            sums.error[ratio] = sums.error.get(ratio, 0.0) + _norm(rest @ quantized.t())
            if first:
                left = _norm(rest)
                sums.left[ratio] = sums.left.get(ratio, 0.0) + left
                sums.covered[ratio] = sums.covered.get(ratio, 0.0) + _covered(x, residual, left)


def by_kind(sites: Mapping[str, SiteErrors]) -> dict[str, SiteErrors]:
    """Kind of layer -> sums over its sites. `site` is the first of them."""
    return _total((errors.site.kind, errors) for errors in sites.values())


def merge(ranks: Iterable[Mapping[str, SiteErrors]]) -> dict[str, SiteErrors]:
    """Site -> sums over ranks that saw different tokens. Every rank's may lack sites, as experts that none chose."""
    return _total(entry for rank in ranks for entry in rank.items())


def _total(entries: Iterable[tuple[str, SiteErrors]]) -> dict[str, SiteErrors]:
    totals: dict[str, SiteErrors] = {}
    for name, errors in entries:
        totals.setdefault(name, SiteErrors(errors.site)).add(errors)
    return totals


def _covered(x: torch.Tensor, residual, left: float) -> float:
    """Energy behind the mask. A mask per token is known by what it removes only."""
    if residual is None:
        return 0.0
    if isinstance(residual, ResidualMask):
        energy = residual_statistics(x, residual.granularity)
        return float(energy.double()[residual.flags].sum())
    total = _norm(x - nvfp4.qdq(x, token_scale(x)))
    return total if isinstance(residual, str) else max(0.0, total - left)


def _norm(x: torch.Tensor) -> float:
    """Squared norm, summed in FP64 without a copy of x in it."""
    return float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2


def _root(part: float, whole: float) -> float:
    return (part / whole) ** 0.5 if whole else 0.0
