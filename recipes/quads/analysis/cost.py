"""What an arm costs in matrix products, against BF16.

Counts only, from shapes and the peak rates of GPUs with NVFP4 units: FP8 multiplies at twice, NVFP4 at four times the
rate of BF16. Attention itself, normalization and communication are left out. Prefill is bound by these products;
decoding is bound by reading weights, so both are given.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from quads_ops.settings import ResidualSettings, RolloutSettings
from quads_recipe.analysis.sites import Site

RATE = {"bf16": 1.0, "fp8": 2.0, "w4a16": 1.0, "w4a4": 4.0}
"""Products per unit of time. W4A16 is dequantized and multiplied in BF16."""
BITS = {"bf16": 16.0, "fp8": 8.0, "w4a16": 4.5, "w4a4": 4.5}
"""Of one weight, block scales included."""


@dataclass(frozen=True)
class Cost:
    """Relative to a BF16 rollout, which is 1."""

    products: float
    """Time of all matrix products at peak rate."""
    weights: float
    """Bytes of weights."""
    residual: float
    """The residual's part of `products`."""


@dataclass(frozen=True)
class Shape:
    """The matrix products of a model, per token."""

    sites: Mapping[str, Site]
    other_flops: int
    """Of the products that are never quantized or left out: head, routers, excluded modules."""
    other_elements: int


def cost(shape: Shape, rollout: RolloutSettings, spared: Iterable[str] = ()) -> Cost:
    """Cost of a rollout; the activations of the spared sites are not quantized (W4A16 there)."""
    spared = set(spared)
    flops = sum(site.flops for site in shape.sites.values())
    quantized = sum(site.flops for name, site in shape.sites.items() if name not in spared)
    kept_mode = "w4a16" if rollout.mode == "w4a4" else "bf16"
    residual = quantized / RATE["w4a4"] * multiplied(rollout.residual) if rollout.mode == "w4a4" else 0.0
    time = quantized / RATE[rollout.mode] + (flops - quantized) / RATE[kept_mode] + residual + shape.other_flops
    elements = sum(site.elements for site in shape.sites.values())
    bits = elements * BITS[rollout.mode] + shape.other_elements * 16.0
    whole = flops + shape.other_flops
    return Cost(
        products=time / whole, weights=bits / (16.0 * (elements + shape.other_elements)), residual=residual / whole
    )


def multiplied(residual: ResidualSettings) -> float:
    """Share of the product that is computed a second time: masks of channels or per token save nothing."""
    if residual.granularity == "block" and residual.scope == "step":
        return residual.ratio
    return 1.0 if residual.ratio > 0 else 0.0
