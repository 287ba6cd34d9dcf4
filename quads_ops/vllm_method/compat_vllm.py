"""Everything this package uses of vLLM beyond its documented plugin interface, in one place.

Run with the CPU builds of 0.24.0 (torch 2.11) and 0.28.0 (torch 2.13), which need no difference here.
`vllm.model_executor.model_loader.reload` is vLLM's own machinery for loading checkpoint tensors into a model that
already has its kernel format; three of its private names are needed to undo a load that failed.
"""

from __future__ import annotations

import torch
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size, get_tp_group
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import (
    _place_kernel_tensors,
    get_layerwise_info,
    initialize_online_processing,
)
from vllm.model_executor.model_loader.utils import get_model_architecture

__all__ = [
    "RoutedExperts",
    "UnquantizedFusedMoEMethod",
    "VocabParallelEmbedding",
    "abort_layerwise_reload",
    "finalize_layerwise_reload",
    "get_model_architecture",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_world_size",
    "initialize_layerwise_reload",
    "initialize_online_processing",
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


def serving_real_tokens() -> bool:
    """False in vLLM's profiling and warm-up runs, which have no attention metadata and nothing to learn from.

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
