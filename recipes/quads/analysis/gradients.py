"""How sensitive the logprobs are to each quantized input: the squared gradients behind residual score `sensitivity`.

The rollout's residual r of an input x changes the logprob of a token by the inner product of r with dlogp/dx, to first
order. If r and the gradient are independent, and the errors of channels and of tokens too, E[(r dlogp/dx)^2] =
E[r^2] E[(dlogp/dx)^2] is what a channel adds to the expected squared error, comparable across layers. The first factor
is the rollout's own statistic; this module has the second.

One backward pass gives it for all tokens at once: the gradient of sum_t s_t logp_t with random signs s_t has, at every
x, the expected square sum_t (dlogp_t/dx)^2.

While `watching`, the modules of a Hugging Face model that the rollout quantizes let their inputs' gradients be seen.
They multiply as they do anyway, but no gradient reaches their weights.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from quads_ops.fake_quant_control import FakeQuantControl, compute_dtype
from quads_ops.fake_quant_recompute import Source, fake_quantized
from quads_ops.fake_quant_scales import expert_scales
from quads_ops.matrix_plan import PlannedParameter
from quads_recipe.analysis.emulation import kept_forwards, named_modules
from quads_recipe.analysis.sites import Site, find_sites


class GradientError(RuntimeError):
    """The gradients of an input could not be seen; the message names it."""


@dataclass
class Squares:
    """Of one input, summed over tokens."""

    sums: torch.Tensor
    """FP64 [K], or [E, K] where each expert has its own input: sum of (dlogp/dx)^2"""
    tokens: torch.Tensor
    """FP64 [], or [E]"""

    @property
    def mean(self) -> torch.Tensor:
        """FP32, of the shape of the sums. An expert without a token gets the others' mean, the same for all channels:
        nothing is known of it, and 0 would say that it can't matter."""
        seen = self.tokens > 0
        each = self.sums / self.tokens.clamp(min=1).unsqueeze(-1)
        if self.tokens.dim():
            each = torch.where(seen.unsqueeze(-1), each, each[seen].mean())
        return each.float()


class Sums:
    """What backward passes found, site by site. Set `valid` (bool [tokens], False for padding) before each forward."""

    def __init__(self, sites: Mapping[str, Site]):
        self.valid: torch.Tensor | None = None
        self._sites, self._found = sites, {}

    def add(self, site: Site, expert: int | None, valid: torch.Tensor, gradient: torch.Tensor) -> None:
        """gradient: [.., K], of the rows that `valid` (bool [rows]) is about."""
        squares = gradient.detach().flatten(0, -2)[valid].float().square().sum(0)
        into = self._found.setdefault(site.name, _empty(site, gradient.device))
        at = () if expert is None else expert
        into.sums[at] += squares
        into.tokens[at] += valid.sum()

    def by_site(self, device: torch.device) -> dict[str, Squares]:
        """Every site, in the model's order, on `device`; zeros where nothing came."""
        found = {name: self._found.get(name) or _empty(site, device) for name, site in self._sites.items()}
        return {name: Squares(of.sums.to(device), of.tokens.to(device)) for name, of in found.items()}


def means(by_site: Mapping[str, Squares]) -> dict[str, torch.Tensor]:
    """Site -> mean over tokens of (dlogp/dx)^2, FP32 [K] or [E, K].

    Raises:
        GradientError: a site saw no gradient, not that of every token, or one that is not finite.
    """
    tokens = max((float(of.tokens) for of in by_site.values() if not of.tokens.dim()), default=0.0)
    for name, of in by_site.items():
        count = float(of.tokens.sum())
        if not count or (not of.tokens.dim() and count != tokens):
            raise GradientError(
                f"the gradient of the input of {name} was seen for {count:g} tokens instead of {tokens:g}: something "
                "bypasses the forward of its modules, or gives them different tensors. Leave it out with "
                "quads.exclude, or use quads.rollout.residual.score=residual"
            )
        if not bool(of.sums.isfinite().all()):
            raise GradientError(f"the gradient of the input of {name} is not finite")
    return {name: of.mean for name, of in by_site.items()}


class InputGradients:
    """The quantized modules of one model.

    Args:
        model: plain, or wrapped by FSDP. May have been converted by `quads_ops.fake_quant.convert`.
        plan: its quantized parameters (`quads_ops.matrix_plan.plan_parameters`, made before FSDP wraps it).
        control: of a converted model.
    """

    def __init__(self, model: nn.Module, plan: Mapping[str, PlannedParameter], control: FakeQuantControl | None = None):
        self.sites = find_sites(plan)
        self._model, self._control = model, control
        self._modules = named_modules(model, {name for site in self.sites.values() for name in site.modules})
        self._sums: Sums | None = None
        self._joined: dict[str, _Joined] = {}
        self._leaf: torch.Tensor | None = None

    @contextmanager
    def watching(self) -> Iterator[Sums]:
        """Forwards within it record, `backward` fills the sums."""
        embedding = self._model.get_input_embeddings().register_forward_hook(self._embedded)
        try:
            self._sums = Sums(self.sites)
            with kept_forwards(self._modules.values()):
                self._install()
                with nullcontext() if self._control is None else self._control.detached():
                    yield self._sums
        finally:
            embedding.remove()
            self._sums, self._joined, self._leaf = None, {}, None

    def backward(self, loss: torch.Tensor) -> None:
        """Back to the embeddings of the last forward. No parameter gets a gradient; existing ones stay as they are."""
        torch.autograd.grad(loss, self._leaf)

    def _embedded(self, module: nn.Module, inputs: tuple, output: torch.Tensor) -> torch.Tensor:
        self._leaf = output.detach().requires_grad_()
        return self._leaf.view_as(self._leaf)  # hooks of FSDP1 on a layer's input want none that is a leaf

    def _install(self) -> None:
        for site in self.sites.values():
            for name in site.modules if not site.experts else ():
                module = self._modules[name]
                module.forward = functools.partial(self._linear, module, site)
        for gate_up in self.sites.values():
            if gate_up.experts and gate_up.name.endswith(".gate_up_proj"):
                module = self._modules[gate_up.modules[0]]
                down = self.sites[f"{gate_up.modules[0]}.down_proj"]
                module.forward = functools.partial(self._experts, module, gate_up, down)

    # -- forwards

    def _linear(self, module: nn.Linear, site: Site, input: torch.Tensor) -> torch.Tensor:
        return type(module).forward(module, self._shared(site, input))

    def _experts(
        self, module: nn.Module, gate_up: Site, down: Site, hidden_states: torch.Tensor,
        top_k_index: torch.Tensor, top_k_weights: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """As the forward of transformers' experts, expert by expert: [T, H], int64 [T, k], float [T, k] -> [T, H]."""
        dtype, valid = compute_dtype(module.gate_up_proj), self._sums.valid
        weights = _ExpertWeights(module, gate_up.modules[0], dtype, self._control)
        x = weights.activation(self._seen(gate_up, None, valid, hidden_states))
        out = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique().tolist():
            token, slot = torch.where(top_k_index == expert)
            with weights.of(expert) as (w13, w2):
                gate, up = F.linear(x[token], w13).chunk(2, dim=-1)
                inner = self._seen(down, expert, valid[token], module.act_fn(gate) * up)
                result = F.linear(weights.activation(inner), w2)
            out = out.index_add(0, token, (result * top_k_weights[token, slot, None]).to(out.dtype))
        return out

    # -- inputs

    def _shared(self, site: Site, x: torch.Tensor) -> torch.Tensor:
        """One watched copy of the input of q, k and v, or of gate and up, whose gradients add up there."""
        joined = self._joined.get(site.name)
        if joined is None or joined.x is not x:
            joined = self._joined[site.name] = _Joined(x, self._seen(site, None, self._sums.valid, x))
        joined.uses += 1
        if joined.uses == len(site.modules):  # not to hold on to the graph
            del self._joined[site.name]
        return joined.watched

    def _seen(self, site: Site, expert: int | None, valid: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """x, as a tensor of its own: the gradient of other uses of x stays out of it."""
        if not torch.is_grad_enabled():
            return x
        watched = x.view_as(x)
        watched.register_hook(functools.partial(self._sums.add, site, expert, valid))
        return watched


@dataclass
class _Joined:
    x: torch.Tensor
    watched: torch.Tensor
    uses: int = 0


class _ExpertWeights:
    """The weights of one expert at a time, as the module's own forward multiplies with them, without gradients."""

    def __init__(self, module: nn.Module, name: str, dtype: torch.dtype, control: FakeQuantControl | None):
        self._dtype = dtype
        self._weights = [module.gate_up_proj.detach(), module.down_proj.detach()]
        self._control = control if control is not None and control.mode != "none" else None
        if self._control is not None:
            self._control.runs[name] += 1
            self._scales = [expert_scales(w, dtype, name) for w in self._weights]

    @contextmanager
    def of(self, expert: int) -> Iterator[list[torch.Tensor]]:
        """[2I, H] and [H, I] in compute dtype, or for autocast to cast."""
        weights = [w[expert] for w in self._weights]
        if self._control is None:
            yield weights
            return
        sources = [Source(w, scale[expert]) for w, scale in zip(weights, self._scales, strict=True)]
        with fake_quantized(sources, self._dtype, recompute=self._control.recompute) as quantized:
            yield quantized

    def activation(self, x: torch.Tensor) -> torch.Tensor:
        return x if self._control is None else self._control.activation(x, self._dtype)


def random_signs(count: int, generator: torch.Generator) -> torch.Tensor:
    """FP32 [count], 1 or -1, from `generator` (on the CPU) alone."""
    return torch.randint(0, 2, (count,), generator=generator).mul(2).sub(1).float()


def _empty(site: Site, device: torch.device) -> Squares:
    experts = (site.experts,) if site.experts and site.name.endswith(".down_proj") else ()
    return Squares(
        torch.zeros(*experts, site.k, dtype=torch.float64, device=device),
        torch.zeros(experts, dtype=torch.float64, device=device),
    )
