"""Which experts each token went to, and the same forward with another forward's experts.

An activation rounded differently can send a token to another expert, which changes its logprobs by leaps. Replaying the
experts of an undisturbed forward tells how much of a difference such flips made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from quads_ops.matrix_plan import FUSED_EXPERT_CLASSES

Choices = dict[str, torch.Tensor]
"""Router -> experts of each token, int64 [T, k]."""


class Routing:
    """The routers of one model: `gate` beside every `experts` of a known class. A dense model has none."""

    def __init__(self, model: nn.Module):
        self.routers: dict[str, nn.Module] = {}
        modules = dict(model.named_modules())
        for name, module in modules.items():
            if name.endswith(".experts") and _class_name(module) in FUSED_EXPERT_CLASSES:
                self.routers[name.removesuffix("experts") + "gate"] = modules[name.removesuffix("experts") + "gate"]

    @contextmanager
    def recorded(self) -> Iterator[Choices]:
        """The choices of the forward that runs within it."""
        choices: Choices = {}

        def note(name: str):
            def hook(_module, _args, output):
                choices[name] = output[2]

            return hook

        with _hooks({name: (router, note(name)) for name, router in self.routers.items()}):
            yield choices

    @contextmanager
    def replayed(self, choices: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """A forward within it goes to the given experts, weighted by its own router's probabilities of them."""

        def replace(name: str, router: nn.Module):
            def hook(_module, _args, output):
                logits, weights, _ = output
                chosen = logits.float().softmax(-1).gather(-1, choices[name])
                if getattr(router, "norm_topk_prob", True):  # Mixtral has no such setting, and normalizes
                    chosen = chosen / chosen.sum(-1, keepdim=True)
                return logits, chosen.to(weights.dtype), choices[name]

            return hook

        with _hooks({name: (router, replace(name, router)) for name, router in self.routers.items()}):
            yield


def flipped(before: Choices, after: Choices) -> torch.Tensor:
    """bool [T, routers]: whether a token's set of experts differs in each layer. Zero routers: [T, 0] can't be told,
    so the result is [0, 0]."""
    columns = [(before[name].sort(-1).values != after[name].sort(-1).values).any(-1) for name in before]
    return torch.stack(columns, -1) if columns else torch.zeros(0, 0, dtype=torch.bool)


@contextmanager
def _hooks(hooks: Mapping[str, tuple[nn.Module, object]]) -> Iterator[None]:
    handles = [module.register_forward_hook(hook) for module, hook in hooks.values()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _class_name(module: nn.Module) -> str:
    return getattr(type(module), "quads_original", type(module)).__name__
