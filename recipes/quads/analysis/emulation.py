"""The rollout's rounding in the trainer's own forward.

While `running`, the modules of a Hugging Face model that the rollout quantizes multiply with the weights and
activations of one leg. Everything else, and the dtype of every product and sum, stays the trainer's: a leg differs from
its neighbour in one thing only, and where it asks for what the actor does anyway, the results are equal in every bit.

Nothing of the model changes but the `forward` attribute of those modules, for that time. Needs no gradient, works on
plain models and on models under FSDP (whose modules run with gathered weights).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from quads_ops.fake_quant_control import compute_dtype
from quads_ops.fake_quant_recompute import fake_quantize
from quads_ops.fake_quant_scales import ScaleGroup, expert_scales
from quads_ops.fp8 import fp8_qdq, row_amax
from quads_ops.matrix_plan import PlannedParameter
from quads_ops.residual import compensate
from quads_recipe.analysis.legs import Leg
from quads_recipe.analysis.masks import MaskError, Residuals, for_expert
from quads_recipe.analysis.sites import Site, find_sites

_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


class Observer(Protocol):
    """Sees every quantized product of a forward, before its activation is quantized."""

    def product(self, seen: Product) -> None: ...


@dataclass(frozen=True)
class Product:
    """One matrix (or gate and up joined, of one expert) and its input."""

    site: Site
    parameter: str
    expert: int | None
    x: torch.Tensor
    """[M, K], compute dtype, not quantized."""
    tokens: torch.Tensor | None
    """int64 [M]: the token of each row; None: row i is token i."""
    weight: torch.Tensor
    """[N, K], compute dtype, full precision."""
    quantized: torch.Tensor
    """[N, K], compute dtype, as the leg rounds it."""


@dataclass(frozen=True)
class _State:
    leg: Leg
    residuals: Residuals
    spared: frozenset[str]
    observer: Observer | None


class Emulation:
    """The quantized modules of one model.

    Args:
        model: plain, or wrapped by FSDP. May have been converted by `quads_ops.fake_quant.convert`.
        plan: its quantized parameters (`quads_ops.matrix_plan.plan_parameters`, made before FSDP wraps it).
        experts_per_token: see `quads_recipe.analysis.sites`; only sizes depend on it.
    """

    def __init__(self, model: nn.Module, plan: Mapping[str, PlannedParameter], experts_per_token: int = 1):
        self.sites = find_sites(plan, experts_per_token)
        self._modules = named_modules(model, {name for site in self.sites.values() for name in site.modules})
        self._state: _State | None = None

    @contextmanager
    def running(
        self,
        leg: Leg,
        residuals: Residuals | None = None,
        *,
        spared: frozenset[str] = frozenset(),
        observer: Observer | None = None,
    ) -> Iterator[None]:
        """Forwards within it are those of `leg`. For use without gradients.

        residuals: site -> residual, for a compensated leg. spared: sites whose activations are left as they are.

        Raises:
            MaskError: a compensated leg without a residual for every site.
        """
        missing = [name for name in self.sites if leg.compensated and name not in (residuals or {})]
        if missing:
            raise MaskError(f"no residual mask for {', '.join(missing[:4])}; the rollout quantizes other layers")
        if self._state is not None:
            raise RuntimeError("an emulated forward is running already")
        self._state = _State(leg, residuals or {}, spared, observer)
        try:
            with kept_forwards(self._modules.values()):
                self._install()
                yield
        finally:
            self._state = None

    def _install(self) -> None:
        for site in self.sites.values():
            for parameter, name in zip(site.parameters, site.modules, strict=True):
                module = self._modules[name]
                if not site.experts:
                    group = ScaleGroup(site.modules, tuple(self._modules[m] for m in site.modules))
                    module.forward = functools.partial(self._linear, module, site, parameter, group)
        for gate_up in self.sites.values():
            if gate_up.experts and gate_up.name.endswith(".gate_up_proj"):
                module = self._modules[gate_up.modules[0]]
                down = self.sites[f"{gate_up.modules[0]}.down_proj"]
                module.forward = functools.partial(self._experts, module, gate_up, down)

    # -- forwards

    def _linear(
        self, module: nn.Linear, site: Site, parameter: str, group: ScaleGroup, input: torch.Tensor
    ) -> torch.Tensor:
        dtype = compute_dtype(module.weight)
        weight = self._weight(module.weight, dtype, lambda: group.scale(dtype))
        rows = input.to(dtype).flatten(0, -2) if input.dim() > 1 else input.to(dtype).unsqueeze(0)
        if self._state.observer is not None:
            source = module.weight.detach().to(dtype)
            self._state.observer.product(Product(site, parameter, None, rows, None, source, weight))
        return F.linear(self._activation(site, rows, dtype).view(input.shape), weight, module.bias)

    def _experts(
        self, module: nn.Module, gate_up: Site, down: Site, hidden_states: torch.Tensor,
        top_k_index: torch.Tensor, top_k_weights: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """As the forward of transformers' experts: [T, H], int64 [T, k], float [T, k] -> [T, H]."""
        state, dtype = self._state, compute_dtype(module.gate_up_proj)
        weights = [
            self._weight(w, dtype, functools.partial(expert_scales, w, dtype, gate_up.modules[0]))
            for w in (module.gate_up_proj, module.down_proj)
        ]
        if state.leg.activations == "none" and state.observer is None:
            stand = _Stand(module, *weights)
            return _own_forward(module)(stand, hidden_states, top_k_index, top_k_weights)
        rows = hidden_states.to(dtype)
        x = self._activation(gate_up, rows, dtype)
        out = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique().tolist():
            token, slot = torch.where(top_k_index == expert)
            if state.observer is not None:
                self._observe(gate_up, expert, rows[token], token, module.gate_up_proj, weights[0])
            gate, up = F.linear(x[token], weights[0][expert]).chunk(2, dim=-1)
            inner = module.act_fn(gate) * up
            if state.observer is not None:
                self._observe(down, expert, inner, token, module.down_proj, weights[1])
            result = F.linear(self._activation(down, inner, dtype, expert), weights[1][expert])
            out.index_add_(0, token, (result * top_k_weights[token, slot, None]).to(out.dtype))
        return out

    def _observe(self, site: Site, expert: int, x, token, source: torch.Tensor, quantized: torch.Tensor) -> None:
        weight = source[expert].detach().to(quantized.dtype)
        parameter = site.parameters[0]
        self._state.observer.product(Product(site, parameter, expert, x, token, weight, quantized[expert]))

    # -- rounding

    def _weight(self, w: torch.Tensor, dtype: torch.dtype, scale) -> torch.Tensor:
        kind = self._state.leg.weights
        if kind == "nvfp4":
            return fake_quantize(w.detach(), scale(), dtype)
        w = w.detach().to(dtype)
        return fp8_qdq(w, row_amax(w)).to(dtype) if kind == "fp8" else w

    def _activation(self, site: Site, x: torch.Tensor, dtype: torch.dtype, expert: int | None = None) -> torch.Tensor:
        """x: [M, K] in compute dtype."""
        state = self._state
        if state.leg.activations == "none" or site.name in state.spared:
            return x
        if state.leg.activations == "fp8":
            return fp8_qdq(x, row_amax(x)).to(dtype)
        residual = for_expert(state.residuals[site.name], expert) if state.leg.compensated else None
        return compensate(x, "w4a4", residual).to(dtype)


class _Stand:
    """Stands for the experts module in its own forward: other weights, everything else from the module."""

    def __init__(self, module: nn.Module, gate_up_proj: torch.Tensor, down_proj: torch.Tensor):
        self._module, self.gate_up_proj, self.down_proj = module, gate_up_proj, down_proj

    def __getattr__(self, name: str):
        return getattr(self._module, name)


def _own_forward(module: nn.Module):
    """The forward of transformers' class, also of a module that was converted."""
    return getattr(type(module), "quads_original", type(module)).forward


@contextmanager
def kept_forwards(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Modules may be given another forward within it; at the end they have their own again."""
    previous = [(module, module.__dict__.get("forward")) for module in modules]
    try:
        yield
    finally:
        for module, forward in previous:
            module.__dict__.pop("forward", None)
            if forward is not None:
                module.forward = forward


def named_modules(model: nn.Module, wanted: set[str]) -> dict[str, nn.Module]:
    """The wanted modules by name, whatever wraps them. Raises KeyError if one is not there."""
    found = {}
    for name, module in model.named_modules():
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")
        if name in wanted:
            found[name] = module  # a wrapped module comes after its wrapper, under the same name
    missing = wanted - found.keys()
    if missing:
        raise KeyError(f"the model has no module {', '.join(sorted(missing)[:4])}")
    return found
