"""The rollout's quantized products, found in a Hugging Face model.

vLLM joins q, k and v, and gate and up: each such group multiplies one activation, which is quantized once, behind one
residual mask. A site is that activation together with the matrices it meets.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from quads_ops.matrix_plan import PlannedParameter
from quads_ops.vllm_method.names import FUSED

_OWNERS = {"self_attn": "attention", "shared_expert": "shared expert", "shared_experts": "shared expert"}
_PARTS = {"qkv_proj": "qkv", "o_proj": "out", "gate_up_proj": "gate+up", "down_proj": "down"}


@dataclass(frozen=True)
class Site:
    """One quantized activation and its matrices."""

    name: str
    """`model.layers.0.self_attn.qkv_proj`, or with experts `model.layers.0.mlp.experts.down_proj`."""
    parameters: tuple[str, ...]
    """Keys in the state dict, in the order of the joined rows."""
    modules: tuple[str, ...]
    """The modules that hold them, and that patterns match."""
    k: int
    """Length of the reduction dimension."""
    n: int
    """Output channels, of all its matrices together; of one expert, where there are experts."""
    experts: int = 0
    """Number of experts, 0 for linears."""
    experts_per_token: int = 1

    @property
    def layer(self) -> int | None:
        """Number of the decoder layer, None outside of them."""
        found = re.search(r"\.layers\.(\d+)\.", self.name)
        return int(found[1]) if found else None

    @property
    def kind(self) -> str:
        """What its counterparts in other layers have in common, in words: `experts down`, `attention qkv`."""
        owner, last = self.name.split(".")[-2:]
        return f"{_OWNERS.get(owner, owner)} {_PARTS.get(last, last)}"

    @property
    def flops(self) -> int:
        """Of one token: two per multiplication and addition."""
        return 2 * self.k * self.n * self.experts_per_token

    @property
    def elements(self) -> int:
        """Weights, of all experts."""
        return self.k * self.n * max(1, self.experts)


def find_sites(plan: Mapping[str, PlannedParameter], experts_per_token: int = 1) -> dict[str, Site]:
    """The sites of the planned parameters, by name in the model's order."""
    sites = {}
    for parameter in plan.values():
        if parameter.name == parameter.group[0]:
            site = _site([plan[name] for name in parameter.group], experts_per_token)
            sites[site.name] = site
    return sites


def exclusion_units(sites: Mapping[str, Site]) -> dict[str, tuple[str, ...]]:
    """What can be left out by itself -> its sites: joined linears, or all experts of a layer."""
    units: dict[str, tuple[str, ...]] = {}
    for site in sites.values():
        name = site.modules[0] if site.experts else site.name
        units[name] = (*units.get(name, ()), site.name)
    return units


def experts_per_token(config) -> int:
    """How many experts a token passes through, from a Hugging Face configuration; 1 for dense models."""
    return getattr(config, "num_experts_per_tok", None) or 1


def _site(group: list[PlannedParameter], experts_per_token: int) -> Site:
    first = group[0]
    experts = first.shape[0] if first.projections else 0
    return Site(
        name=first.name if experts else joined_name([p.module for p in group]),
        parameters=tuple(p.name for p in group),
        modules=tuple(p.module for p in group),
        k=first.shape[-1],
        n=sum(p.shape[-2] for p in group),
        experts=experts,
        experts_per_token=experts_per_token if experts else 1,
    )


def joined_name(modules: list[str]) -> str:
    """What vLLM calls the layer that joins these linears; the name itself for a single one."""
    if len(modules) == 1:
        return modules[0]
    parent, _, _ = modules[0].rpartition(".")
    members = tuple(name.rpartition(".")[2] for name in modules)
    last = next(joined for joined, parts in FUSED.items() if set(members) <= set(parts))
    return f"{parent}.{last}" if parent else last
