"""Which parameters of a Hugging Face model are quantized, which matrices they hold, and which share a global scale.

Found from the module structure alone (a model on the meta device will do), before FSDP wraps anything. The
fake-quantized forward, the weight export and the check of both sides at start-up read the same plan.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from quads_ops.formats import BLOCK_SIZE
from quads_ops.settings import SettingsError
from quads_ops.targets import Targets
from quads_ops.vllm_method.names import EXPERT_PROJECTIONS, FUSED, expert_matrices

# Fused-expert classes of transformers 5 with gate_up_proj [E, 2I, H] (gate first) and down_proj [E, H, I], no biases.
# A class is listed once its rollout was tested too.
FUSED_EXPERT_CLASSES = ("Qwen2MoeExperts", "Qwen3MoeExperts", "MixtralExperts")

_EXPERT_PARAMETERS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


@dataclass(frozen=True)
class PlannedParameter:
    """One parameter whose matrices are quantized."""

    name: str
    """Key in the state dict: `model.layers.0.self_attn.q_proj.weight`, `model.layers.0.mlp.experts.gate_up_proj`."""
    module: str
    """What patterns match: `model.layers.0.self_attn.q_proj`, `model.layers.0.mlp.experts`."""
    shape: tuple[int, ...]
    """[N, K], or [E, N, K] for fused experts."""
    group: tuple[str, ...]
    """Names of the parameters that share one global scale with this one, itself included, in the model's order."""
    projections: tuple[str, ...] = ()
    """What a fused-expert parameter holds, stacked along N in equal parts; empty for a linear."""

    def matrices(self) -> tuple[tuple[str, ...], ...]:
        """Names of the matrices: one row per projection, in it one name per expert (a linear: a single name)."""
        if not self.projections:
            return ((self.module,),)
        experts = [expert_matrices(self.module, e) for e in range(self.shape[0])]
        return tuple(tuple(names[EXPERT_PROJECTIONS.index(p)] for names in experts) for p in self.projections)


def quantizable_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Linears, and modules that hold 3-D parameters (fused experts), by name in the model's order.

    Whether one of them is to be quantized is for `quads_ops.targets.Targets` to say.
    """
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) or _holds_stacked_matrices(module)
    }


def plan_parameters(model: nn.Module, targets: Targets) -> dict[str, PlannedParameter]:
    """The parameters of all modules that `targets` wants, by name.

    Raises:
        SettingsError: a pattern matches nothing; fused experts of an unknown class; a linear of an unknown subclass;
            K not a multiple of 16; or only some members of a group that the rollout fuses are wanted.
    """
    modules = quantizable_modules(model)
    wanted = set(targets.plan(modules).quantized)
    planned: dict[str, PlannedParameter] = {}
    for name in modules:
        if name in wanted:
            found = _linear(name, modules, targets) if isinstance(modules[name], nn.Linear) else _experts(name, modules)
            planned |= {p.name: p for p in found}
    for parameter in planned.values():
        _check_k(parameter)
    return planned


def _holds_stacked_matrices(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.conv._ConvNd):
        return False
    return any(p.dim() == 3 for p in module.parameters(recurse=False))


def _linear(name: str, modules: dict[str, nn.Module], targets: Targets) -> list[PlannedParameter]:
    module = modules[name]
    if type(module) is not nn.Linear and not getattr(module, "quads", None):
        raise SettingsError("quads.targets", name, f"is a {type(module).__name__}, not a plain nn.Linear; exclude it")
    members = _fused_with(name, modules)
    missing = [m for m in members if not targets.wants(m)]
    if missing:
        field, value = targets.setting_of(missing[0])
        raise SettingsError(
            field,
            value,
            f"splits what the rollout multiplies as one matrix: {name} is quantized, {', '.join(missing)} is not; "
            f"quantize all of {', '.join(members)}, or none",
        )
    group = tuple(f"{m}.weight" for m in members)
    return [PlannedParameter(f"{name}.weight", name, tuple(module.weight.shape), group)]


def _fused_with(name: str, modules: dict[str, nn.Module]) -> tuple[str, ...]:
    parent, _, last = name.rpartition(".")
    prefix = f"{parent}." if parent else ""
    for family in FUSED.values():
        if last in family:
            return tuple(prefix + m for m in family if isinstance(modules.get(prefix + m), nn.Linear))
    return (name,)


def _experts(name: str, modules: dict[str, nn.Module]) -> list[PlannedParameter]:
    module = modules[name]
    parameters = dict(module.named_parameters(recurse=False))
    if type(module).__name__ not in FUSED_EXPERT_CLASSES or set(parameters) != set(_EXPERT_PARAMETERS):
        raise SettingsError(
            "quads.targets",
            name,
            f"holds fused experts of class {type(module).__name__} (parameters {', '.join(parameters)}), which QUADS "
            f"does not know; it knows {', '.join(FUSED_EXPERT_CLASSES)}. Exclude it, or use another model",
        )
    return [
        PlannedParameter(f"{name}.{p}", name, tuple(parameters[p].shape), (f"{name}.{p}",), projections)
        for p, projections in _EXPERT_PARAMETERS.items()
    ]


def _check_k(parameter: PlannedParameter) -> None:
    k = parameter.shape[-1]
    if k == 0 or k % BLOCK_SIZE:
        raise SettingsError(
            "quads.targets",
            parameter.module,
            f"its parameter {parameter.name} has K = {k}, which is not a multiple of {BLOCK_SIZE}; exclude it "
            f"(quads.exclude) or use a model whose sizes are multiples of {BLOCK_SIZE}",
        )
