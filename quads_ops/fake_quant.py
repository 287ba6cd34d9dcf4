"""Quantization-aware training in NVFP4: `convert` makes a Hugging Face model multiply with fake-quantized weights.

A converted module keeps its parameters, their names and its place in the model; only its class changes. In every
forward it takes the weight as FSDP provides it, in compute dtype, rounds it to NVFP4 and back, and multiplies with
that; the gradient goes straight through to the parameter. Nothing is cached between forwards.

Source of the straight-through gradient: Bengio, Leonard, Courville (2013), arXiv:1308.3432.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from quads_ops import compat
from quads_ops.fake_quant_control import FakeQuantControl, compute_dtype
from quads_ops.fake_quant_experts import ExpertsQuant, experts_class
from quads_ops.fake_quant_recompute import Source, fake_quantized
from quads_ops.fake_quant_scales import ScaleGroup
from quads_ops.matrix_plan import PlannedParameter, plan_parameters
from quads_ops.settings import SettingsError
from quads_ops.targets import Targets


@dataclass(frozen=True, eq=False)
class LinearQuant:
    """What a converted linear knows beyond its parameters."""

    name: str
    group: ScaleGroup
    control: FakeQuantControl


class QuadsLinear(nn.Linear):
    """nn.Linear that multiplies with its fake-quantized weight. Made by `convert` from an existing nn.Linear."""

    quads: LinearQuant

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input: [..., K]. Returns [..., N] in the dtype nn.Linear would give."""
        control = self.quads.control
        if control.mode == "none":
            return super().forward(input)
        control.runs[self.quads.name] += 1
        dtype = compute_dtype(self.weight)
        source = Source(control.weight(self.weight), self.quads.group.scale(dtype))
        x = control.activation(input, dtype)
        with fake_quantized([source], dtype, recompute=control.recompute) as (weight,):
            return F.linear(x, weight, self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, nvfp4 {self.quads.control.mode}"


def convert(model: nn.Module, targets: Targets, mode: str, *, recompute: bool = True) -> FakeQuantControl:
    """Make the targeted modules of `model` compute with fake-quantized weights, in place. Call before FSDP wraps it.

    Args:
        model: a Hugging Face model; may lie on the meta device.
        targets: which modules (`quads_ops.targets.Targets`).
        mode: `w4a16` (weights) or `w4a4` (weights and activations).
        recompute: see `FakeQuantControl`.

    Returns:
        The control of the converted model; `.names` lists what was converted.

    Raises:
        SettingsError: from `plan_parameters`, mode none, a model that was converted before, or a module whose forward
            was replaced.
    """
    if mode == "none":
        raise SettingsError("quads.actor.mode", mode, "converts nothing; leave the model as it is")
    compat.let_batched_mm_train()
    plan = plan_parameters(model, targets)
    modules = {p.module: model.get_submodule(p.module) for p in plan.values()}
    control = FakeQuantControl(modules, mode, recompute=recompute)
    for name, module in modules.items():
        if hasattr(module, "quads"):
            raise SettingsError("quads.targets", name, "is fake-quantized already; convert a model once")
        if "forward" in vars(module):  # as liger-kernel does to fused experts
            bypass = "has a forward of its own, which would bypass fake quantization"
            raise SettingsError("quads.targets", name, f"{bypass}; switch off model.use_liger, or exclude the module")
    for parameter in plan.values():
        module = modules[parameter.module]
        if isinstance(module, nn.Linear):
            _convert_linear(module, parameter, modules, control)
    for name, module in modules.items():
        if not isinstance(module, nn.Linear):
            module.__class__ = experts_class(type(module))
            module.quads = ExpertsQuant(name, control)
    return control


def _convert_linear(
    module: nn.Linear, parameter: PlannedParameter, modules: dict[str, nn.Module], control: FakeQuantControl
) -> None:
    names = tuple(p.removesuffix(".weight") for p in parameter.group)
    group = ScaleGroup(names, tuple(modules[name] for name in names))
    module.__class__ = QuadsLinear
    module.quads = LinearQuant(parameter.module, group, control)
