"""Quantized layers as single operators for torch.compile, which vLLM uses unless `enforce_eager` is set.

A layer's Python (masks, statistics, loops over experts) is not to be traced. The compiled graph holds the layer's name
and asks for the layer when it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakValueDictionary

import torch

_layers: WeakValueDictionary[str, torch.nn.Module] = WeakValueDictionary()


def remember(name: str, layer: torch.nn.Module) -> None:
    """Make `layer` known under `name`. Of two models in a process with the same names, the later one counts."""
    _layers[name] = layer


def linear(name: str, run: Callable, x: torch.Tensor, bias: torch.Tensor | None, size: int) -> torch.Tensor:
    """run(x, bias) -> [M, size], as one operator while compiling."""
    return torch.ops.quads.vllm_linear(x, bias, size, name) if torch.compiler.is_compiling() else run(x, bias)


def experts(name: str, run: Callable, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
    """run(x, a, b) -> [M, K] as x, as one operator while compiling. a, b: router logits, or weights and ids."""
    return torch.ops.quads.vllm_experts(x, a, b, name) if torch.compiler.is_compiling() else run(x, a, b)


@torch.library.custom_op("quads::vllm_linear", mutates_args=())
def _linear(x: torch.Tensor, bias: torch.Tensor | None, size: int, name: str) -> torch.Tensor:
    layer = _layers[name]
    return layer.quant_method.run(layer, x, bias)


@_linear.register_fake
def _(x, bias, size, name):
    return x.new_empty((x.shape[0], size))


@torch.library.custom_op("quads::vllm_experts", mutates_args=())
def _experts(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor | None, name: str) -> torch.Tensor:
    layer = _layers[name]
    return layer.quant_method.run(layer, x, a, b)


@_experts.register_fake
def _(x, a, b, name):
    return torch.empty_like(x)
