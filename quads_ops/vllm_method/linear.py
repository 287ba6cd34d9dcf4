"""The linear layers of vLLM (column, row, merged, QKV, replicated) with a quantized weight."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from vllm.model_executor.layers.linear import LinearMethodBase
from vllm.model_executor.parameter import ModelWeightParameter

from quads_ops.settings import RolloutSettings
from quads_ops.vllm_method import opaque
from quads_ops.vllm_method.compat_vllm import get_tensor_model_parallel_rank, initialize_online_processing
from quads_ops.vllm_method.projection import Projection
from quads_ops.vllm_method.shards import check_k, linear_shards

_DONE = "_already_called_process_weights_after_loading"
"""vLLM deletes this attribute when it reloads the layer."""


class QuadsLinearMethod(LinearMethodBase):
    """vLLM's interface to one `Projection`.

    Args:
        rollout: mode and residual settings.
        module: canonical name of the layer (joined layers under vLLM's name, e.g. `...self_attn.qkv_proj`).
        matrices: canonical names of the matrices in it.
    """

    # Checkpoint weights are never materialized for the whole model: each layer is quantized as soon as it is complete.
    uses_meta_device = True

    def __init__(self, rollout: RolloutSettings, module: str, matrices: Sequence[str]):
        self.rollout, self.module, self.matrices = rollout, module, tuple(matrices)

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs,
    ) -> None:
        """Raises ValueError where this worker's part of K is not a multiple of 16."""
        check_k(self.module, input_size_per_partition, layer.tp_size if input_size_per_partition < input_size else 1)
        shards = linear_shards(
            layer,
            self.matrices,
            output_partition_sizes,
            input_size_per_partition,
            input_size,
            output_size,
            get_tensor_model_parallel_rank(),
        )
        weight = ModelWeightParameter(
            data=torch.empty(sum(output_partition_sizes), input_size_per_partition, dtype=params_dtype, device="meta"),
            input_dim=1,
            output_dim=0,
            weight_loader=extra_weight_attrs["weight_loader"],
        )
        layer.register_parameter("weight", weight)
        layer.quads_projections = (
            Projection(self.module, "weight", "weight", shards, self.rollout, input_size_per_partition),
        )
        opaque.remember(self.module, layer)
        initialize_online_processing(layer)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        if getattr(layer, _DONE, False):
            return
        layer.quads_projections[0].load(layer)
        setattr(layer, _DONE, True)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        size = layer.quads_projections[0].size
        y = opaque.linear(self.module, partial(self.run, layer), x.reshape(-1, x.shape[-1]), bias, size)
        return y.reshape(*x.shape[:-1], size)

    def run(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """[M, K] -> [M, N]."""
        return layer.quads_projections[0].multiply(x, bias)
