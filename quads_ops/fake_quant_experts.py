"""Fake-quantized fused experts: transformers 5 keeps all experts of a layer in two 3-D parameters.

The experts' own forward runs (eager, grouped_mm or batched_mm, as the model's configuration says) and finds the
fake-quantized weights in place of its own: each is quantized once per forward, not once per expert or token.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from quads_ops.fake_quant_control import FakeQuantControl, compute_dtype
from quads_ops.fake_quant_recompute import Source, fake_quantized
from quads_ops.fake_quant_scales import expert_scales


@dataclass(frozen=True, eq=False)
class ExpertsQuant:
    """What converted experts know beyond their parameters."""

    name: str
    control: FakeQuantControl


class QuadsExperts(nn.Module):
    """Mixed in before a fused-experts class of transformers; see `experts_class`."""

    quads: ExpertsQuant
    quads_original: type[nn.Module]

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden_states: [T, H]. top_k_index: int64 [T, k]. top_k_weights: float [T, k]. Returns [T, H]."""
        control = self.quads.control
        original = self.quads_original.forward
        if control.mode == "none":
            return original(self, hidden_states, top_k_index, top_k_weights)
        control.runs[self.quads.name] += 1
        dtype = compute_dtype(self.gate_up_proj)
        weights = (self.gate_up_proj, self.down_proj)
        sources = [Source(w, expert_scales(w, dtype, self.quads.name)) for w in weights]
        with fake_quantized(sources, dtype, recompute=control.recompute) as (gate_up, down):
            if control.mode == "w4a4":
                product = QuantizedExperts(gate_up, down, self.act_fn, control)
                return product(hidden_states, top_k_index, top_k_weights)
            return original(_Stand(self, gate_up, down), hidden_states, top_k_index, top_k_weights)

    def extra_repr(self) -> str:
        experts, rows, hidden = self.gate_up_proj.shape
        return f"experts={experts}, hidden={hidden}, intermediate={rows // 2}, nvfp4 {self.quads.control.mode}"


@functools.cache
def experts_class(original: type[nn.Module]) -> type[nn.Module]:
    """The fake-quantized subclass of a fused-experts class.

    It keeps the class's name, so that an FSDP wrap policy that names the class still finds it.
    """
    return type(original.__name__, (QuadsExperts, original), {"quads_original": original, "__module__": __name__})


class _Stand:
    """Stands for the experts module while its own forward runs: other weights, everything else from the module."""

    def __init__(self, module: nn.Module, gate_up_proj: torch.Tensor, down_proj: torch.Tensor):
        self._module = module
        self.gate_up_proj = gate_up_proj
        self.down_proj = down_proj

    def __getattr__(self, name: str):
        return getattr(self._module, name)


class QuantizedExperts:
    """Experts that quantize their activations too (mode w4a4): the layer's input, and each expert's intermediate.

    transformers' own implementations offer no place for the second, hence this loop over the experts that are hit.
    """

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor, act_fn, control: FakeQuantControl):
        """gate_up: [E, 2I, H], down: [E, H, I], fake-quantized, in compute dtype."""
        self.gate_up, self.down, self.act_fn, self.control = gate_up, down, act_fn, control

    def __call__(self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """As `QuadsExperts.forward`."""
        dtype = self.gate_up.dtype
        x = self.control.activation(hidden, dtype)  # per token, so it is the same for every expert
        out = torch.zeros_like(hidden)
        for expert in top_k_index.unique().tolist():
            token, slot = torch.where(top_k_index == expert)
            result = self._expert(expert, x[token]) * top_k_weights[token, slot, None]
            out.index_add_(0, token, result.to(out.dtype))
        return out

    def _expert(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        gate, up = F.linear(x, self.gate_up[expert]).chunk(2, dim=-1)
        inner = self.control.activation(self.act_fn(gate) * up, self.down.dtype)
        return F.linear(inner, self.down[expert])
