"""Which checkpoint weights a vLLM model needs, by canonical name, with the shape of the whole tensor.

Asked while the model is in its load format: new, or put back by `initialize_layerwise_reload`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from vllm.model_executor.layers.linear import LinearBase

from quads_ops.vllm_method import names
from quads_ops.vllm_method.compat_vllm import RoutedExperts, VocabParallelEmbedding

_NOT_WEIGHTS = re.compile(r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$")

_HEAD = "lm_head"


@dataclass(frozen=True)
class Wanted:
    """One tensor of the checkpoint. `shape` is None where only vLLM's loader knows."""

    shape: tuple[int, ...] | None
    dtype: torch.dtype
    parameter: str
    """vLLM's name of the parameter that it becomes, or becomes a part of."""
    module: str
    """Canonical name of the parameter's layer."""
    quantized: bool = False
    """Of a layer that is quantized as soon as enough elements were loaded."""
    elsewhere: bool = False
    """An expert of another worker (expert parallelism)."""


def ignorable(name: str, tied: bool) -> bool:
    """Tensors that a checkpoint may hold and the model doesn't load: old buffers, and a tied head's weight."""
    return _NOT_WEIGHTS.search(name) is not None or (tied and name == f"{_HEAD}.weight")


def has_tied_head(model: torch.nn.Module) -> bool:
    """True if lm_head shares the embedding's weight."""
    return bool(getattr(getattr(model, "config", None), "tie_word_embeddings", False))


def wanted_weights(model: torch.nn.Module, table: names.NameTable) -> dict[str, Wanted]:
    """All of them: canonical name with `.weight` or `.bias` -> what is expected."""
    tied = has_tied_head(model)
    wanted: dict[str, Wanted] = {}
    others = [module for module in model.modules() if not isinstance(module, RoutedExperts)]
    elsewhere = {id(tensor) for module in others for tensor in module.parameters(recurse=False)}
    for path, module in model.named_modules():
        if tied and path == _HEAD:
            continue
        for parameter, tensor in module.named_parameters(recurse=False):
            if isinstance(module, RoutedExperts) and id(tensor) in elsewhere:
                continue  # the router's e_score_correction_bias, which vLLM makes a parameter of the experts too
            whose = dict(
                dtype=tensor.dtype,
                parameter=f"{path}.{parameter}",
                module=table.canonical(getattr(module, "layer_name", path)),
                quantized=hasattr(module, "quads_projections"),
            )
            for name, shape in _of_parameter(path, module, parameter, tensor, table):
                wanted[table.canonical(name)] = Wanted(shape, **whose)
        if isinstance(module, RoutedExperts):
            for matrix in _matrices_elsewhere(module, table):
                wanted[matrix] = replace(wanted[matrix], elsewhere=True)
    return wanted


def _matrices_elsewhere(module: RoutedExperts, table: names.NameTable) -> Iterator[str]:
    for expert, local in enumerate(() if module.expert_map is None else module.expert_map.tolist()):
        if local < 0:
            for matrix in names.expert_matrices(table.canonical(module.layer_name), expert):
                yield f"{matrix}.weight"


def _of_parameter(
    path: str, module: torch.nn.Module, parameter: str, tensor: torch.Tensor, table: names.NameTable
) -> Iterator[tuple[str, tuple[int, ...] | None]]:
    if isinstance(module, RoutedExperts):
        yield from _of_experts(module, parameter, table)
    elif isinstance(module, LinearBase):
        yield from _of_linear(module, parameter, tensor, table)
    elif isinstance(module, VocabParallelEmbedding):
        shape = (module.org_vocab_size, *tensor.shape[1:])
        yield f"{path}.{parameter}", shape
    else:
        yield f"{path}.{parameter}", tuple(tensor.shape)


def _of_experts(
    module: torch.nn.Module, parameter: str, table: names.NameTable
) -> Iterator[tuple[str, tuple[int, ...] | None]]:
    name = table.canonical(module.layer_name)
    moe = module.moe_config
    sizes = (moe.intermediate_size, moe.hidden_dim)
    stem, _, kind = parameter.partition("_")
    if stem not in ("w13", "w2"):
        yield f"{name}.{parameter}", None
        return
    for expert in range(moe.num_experts):
        gate, up, down = names.expert_matrices(name, expert)
        for matrix, shape in ((gate, sizes), (up, sizes)) if stem == "w13" else ((down, sizes[::-1]),):
            yield f"{matrix}.{kind}", shape if kind == "weight" else None


def _of_linear(
    module: LinearBase, parameter: str, tensor: torch.Tensor, table: names.NameTable
) -> Iterator[tuple[str, tuple[int, ...] | None]]:
    prefix = table.canonical(module.prefix)
    sizes = getattr(module, "output_partition_sizes", [tensor.shape[0]])
    members = names.members(prefix, len(sizes)) if names.is_known(prefix, len(sizes)) else (prefix,)
    if len(members) != len(sizes):
        yield f"{prefix}.{parameter}", None
        return
    copies = getattr(module, "num_kv_head_replicas", 1)
    split_n = sum(sizes) < module.output_size
    for index, (member, size) in enumerate(zip(members, sizes, strict=True)):
        rows = size * module.tp_size // (copies if index else 1) if split_n else size
        yield f"{member}.{parameter}", (rows, module.input_size) if tensor.dim() == 2 else (rows,)
