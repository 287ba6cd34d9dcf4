"""Everything this package uses of vLLM beyond its documented plugin interface, in one place.

Run with the CPU builds of 0.24.0 (torch 2.11) and 0.28.0 (torch 2.13), which need no difference here.
`vllm.model_executor.model_loader.reload` is vLLM's own machinery for loading checkpoint tensors into a model that
already has its kernel format; three of its private names are needed to undo a load that failed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size, get_tp_group
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import (
    _place_kernel_tensors,
    get_layerwise_info,
    initialize_online_processing,
)
from vllm.model_executor.model_loader.utils import get_model_architecture
from vllm.platforms import current_platform
from vllm.utils.torch_utils import LayerNameType, direct_register_custom_op
from vllm.utils.torch_utils import _encode_layer_name as encode_layer_name
from vllm.utils.torch_utils import _resolve_layer_name as resolve_layer_name

__all__ = [
    "LayerNameType",
    "LogitsProcessor",
    "RealTokens",
    "RoutedExperts",
    "UnquantizedFusedMoEMethod",
    "VocabParallelEmbedding",
    "abort_layerwise_reload",
    "captures_graphs",
    "direct_register_custom_op",
    "encode_layer_name",
    "finalize_layerwise_reload",
    "get_model_architecture",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_world_size",
    "initialize_layerwise_reload",
    "initialize_online_processing",
    "real_tokens",
    "resolve_layer_name",
    "serving_real_tokens",
    "tp_gather",
    "tp_reduce_",
]


def tp_reduce_(tensor: torch.Tensor, op: torch.distributed.ReduceOp) -> torch.Tensor:
    """All-reduce in place over the tensor parallel group (which holds the expert parallel group of one engine)."""
    if get_tensor_model_parallel_world_size() > 1:
        torch.distributed.all_reduce(tensor, op=op, group=get_tp_group().device_group)
    return tensor


def tp_gather(value: object) -> list[object]:
    """One picklable object from every worker of the tensor parallel group, in the order of ranks."""
    size = get_tensor_model_parallel_world_size()
    if size == 1:
        return [value]
    gathered: list[object] = [None] * size
    torch.distributed.all_gather_object(gathered, value, group=get_tp_group().cpu_group)
    return gathered


def captures_graphs(vllm_config: VllmConfig) -> bool:
    """Whether vLLM captures the model's forward in CUDA graphs, as it does unless `enforce_eager` is set."""
    mode = vllm_config.compilation_config.cudagraph_mode
    return current_platform.is_cuda_alike() and mode not in (None, CUDAGraphMode.NONE)


class RealTokens(NamedTuple):
    """Which rows of a batch are tokens of requests."""

    rows: torch.Tensor
    """bool [M, 1]"""
    count: torch.Tensor
    """int64 []"""
    zero: torch.Tensor
    """[], of the activations' dtype. For torch.where: a number costs it a kernel."""


def real_tokens(x: torch.Tensor) -> RealTokens | None:
    """Which rows of activations [M, K] of this forward are tokens of requests; None where vLLM does not say.

    vLLM pads batches to the sizes of its CUDA graphs, and the padding is whatever the memory held, for attention leaves
    it unwritten. Its warm-up runs have no request at all. Such rows have no slot in the KV cache: their slot is -1. It
    is read on the device, from a buffer that vLLM fills in place, so a captured graph is right at every replay.
    """
    if not is_forward_context_available():
        return None
    context = get_forward_context()
    slots = next(iter(context.slot_mapping.values()), None) if isinstance(context.slot_mapping, dict) else None
    if slots is None or len(slots) != len(x):
        return None
    # Once per forward; but a graph must not read what was computed outside it, nor one stream what another computes.
    where = None
    if slots.is_cuda:
        where = torch.cuda.current_stream(slots.device).cuda_stream, torch.cuda.is_current_stream_capturing()
    known: dict[object, RealTokens] = context.__dict__.setdefault("quads_real_tokens", {})
    if where not in known:
        rows = (slots >= 0).unsqueeze(-1)
        known[where] = RealTokens(rows, rows.sum(), x.new_zeros(()))
    return known[where]


def serving_real_tokens() -> bool:
    """Where `real_tokens` does not know: False in vLLM's profiling and warm-up runs, which have no attention metadata.

    True while a CUDA graph is captured: nothing runs then, but what is captured will serve.
    """
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return True
    return is_forward_context_available() and get_forward_context().attn_metadata is not None


def abort_layerwise_reload(model: torch.nn.Module) -> None:
    """Put back the kernel tensors of every layer that `initialize_layerwise_reload` opened and that is not complete."""
    if hasattr(model, "_original_do_torchao_reload"):
        model._do_torchao_reload = model._original_do_torchao_reload
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load() and info.kernel_tensors is not None:
            _place_kernel_tensors(layer, info)
        info.reset()
