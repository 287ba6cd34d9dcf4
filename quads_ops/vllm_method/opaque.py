"""Quantized layers as single operators for torch.compile, which vLLM uses unless `enforce_eager` is set.

A layer's Python (masks, statistics, loops over experts) is not to be traced. The compiled graph asks for the layer by
name when it runs. The name is vLLM's LayerName, which torch makes an input of the graph: as a constant it would make
every layer's part of the model another graph, and vLLM compile each of them instead of one.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakValueDictionary

import torch

from quads_ops.vllm_method.compat_vllm import (
    LayerNameType,
    direct_register_custom_op,
    encode_layer_name,
    resolve_layer_name,
)

_layers: WeakValueDictionary[str, torch.nn.Module] = WeakValueDictionary()


def remember(name: str, layer: torch.nn.Module) -> None:
    """Make `layer` known under `name`. Of two models in a process with the same names, the later one counts."""
    _layers[name] = layer


def linear(name: str, run: Callable, x: torch.Tensor, bias: torch.Tensor | None, size: int) -> torch.Tensor:
    """run(x, bias) -> [M, size], as one operator while compiling."""
    if torch.compiler.is_compiling():
        return torch.ops.quads.vllm_linear(x, bias, size, encode_layer_name(name))
    return run(x, bias)


def experts(name: str, run: Callable, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
    """run(x, a, b) -> [M, K] as x, as one operator while compiling. a, b: router logits, or weights and ids."""
    if torch.compiler.is_compiling():
        return torch.ops.quads.vllm_experts(x, a, b, encode_layer_name(name))
    return run(x, a, b)


def _linear(x: torch.Tensor, bias: torch.Tensor | None, size: int, name: LayerNameType) -> torch.Tensor:
    layer = _layers[resolve_layer_name(name)]
    return layer.quant_method.run(layer, x, bias)


def _linear_shape(x: torch.Tensor, bias: torch.Tensor | None, size: int, name: LayerNameType) -> torch.Tensor:
    return x.new_empty((x.shape[0], size))


def _experts(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor | None, name: LayerNameType) -> torch.Tensor:
    layer = _layers[resolve_layer_name(name)]
    return layer.quant_method.run(layer, x, a, b)


def _experts_shape(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor | None, name: LayerNameType) -> torch.Tensor:
    return torch.empty_like(x)


_library = torch.library.Library("quads", "FRAGMENT")
for _name, _run, _shape in (
    ("vllm_linear", _linear, _linear_shape),
    ("vllm_experts", _experts, _experts_shape),
):
    direct_register_custom_op(
        _name, _run, fake_impl=_shape, target_lib=_library, tags=(torch.Tag.needs_fixed_stride_order,)
    )
