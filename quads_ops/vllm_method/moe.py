"""vLLM's fused experts with quantized weights: an FP32 GEMM per expert on a CPU, one operator on a GPU."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.utils import set_weight_attrs
from vllm.platforms import current_platform

from quads_ops import gemm
from quads_ops.moe_reference import gated, local_experts
from quads_ops.settings import RolloutSettings
from quads_ops.vllm_method import opaque
from quads_ops.vllm_method.compat_vllm import captures_graphs, initialize_online_processing
from quads_ops.vllm_method.linear import _DONE
from quads_ops.vllm_method.projection import Projection
from quads_ops.vllm_method.routing import check_routing, route
from quads_ops.vllm_method.shards import check_k, expert_shards

_ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu}
_CHANGED = ("swiglu_limit", "swiglu_alpha", "swiglu_beta")
"""Attributes of a vLLM layer whose SwiGLU has limits or factors; None of one that has none."""


class QuadsMoEMethod(FusedMoEMethodBase):
    """vLLM's interface to the two `Projection`s of fused experts: gate and up joined (w13), and down (w2).

    Args:
        rollout: mode and residual settings.
        moe: vLLM's description of the layer.
        module: canonical name, `...mlp.experts`.
    """

    uses_meta_device = True

    def __init__(self, rollout: RolloutSettings, moe: FusedMoEConfig, module: str):
        super().__init__(moe)
        self.rollout, self.module = rollout, module

    @property
    def is_monolithic(self) -> bool:
        # vLLM's router needs operators that the CPU build does not have; there it hands over the logits.
        return current_platform.is_cpu()

    def get_fused_moe_quant_config(self, layer: torch.nn.Module) -> None:
        return None

    def create_weights(
        self,
        layer: torch.nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs,
    ) -> None:
        """Raises ValueError on a K that is no multiple of 16, or on a kind of layer that is not supported."""
        self._check(layer, hidden_size, intermediate_size_per_partition)
        gate_up, down = expert_shards(
            self.module,
            _local_experts(layer, num_experts),
            hidden_size,
            intermediate_size_per_partition,
            self.moe.tp_rank,
            self.moe.tp_size,
        )
        for name, shape in (
            ("w13_weight", (num_experts, 2 * intermediate_size_per_partition, hidden_size)),
            ("w2_weight", (num_experts, hidden_size, intermediate_size_per_partition)),
        ):
            weight = torch.nn.Parameter(torch.empty(shape, dtype=params_dtype, device="meta"), requires_grad=False)
            layer.register_parameter(name, weight)
            set_weight_attrs(weight, extra_weight_attrs)
        stack = self.moe.num_experts
        layer.quads_projections = (
            Projection(
                self.module, "w13", "w13_weight", gate_up, self.rollout, hidden_size,
                uses=self.moe.experts_per_token, stack=stack,
            ),
            Projection(
                self.module, "w2", "w2_weight", down, self.rollout, intermediate_size_per_partition,
                masks=num_experts, stack=stack,
            ),
        )  # fmt: skip
        self._act = _ACTIVATIONS[_activation_name(layer)]
        opaque.remember(self.module, layer)
        initialize_online_processing(layer)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        if getattr(layer, _DONE, False):
            return
        for projection in layer.quads_projections:
            projection.load(layer)
            # Asked for experts that come after this worker's are complete, and takes none of them.
            getattr(layer, projection.source).weight_loader = layer.weight_loader
        setattr(layer, _DONE, True)

    def apply(
        self,
        layer: torch.nn.Module,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts=None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return opaque.experts(self.module, partial(self.run, layer), x, topk_weights, topk_ids)

    def apply_monolithic(
        self,
        layer: torch.nn.Module,
        x: torch.Tensor,
        router_logits: torch.Tensor,
        input_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return opaque.experts(self.module, partial(self.run, layer), x, router_logits, None)

    def run(
        self, layer: torch.nn.Module, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor | None
    ) -> torch.Tensor:
        """x: [T, H]. weights, ids: of the routed experts, [T, k]; without ids, `weights` are the router's logits.

        Returns [T, H] in the dtype of x.
        """
        weights, ids = route(layer, weights) if ids is None else (weights.float(), ids)
        if layer.quads_projections[0].operators:
            return _operator(layer, x, weights, ids)
        w13, w2 = layer.quads_projections
        order, counts = _by_expert(layer, ids.long())
        token = order // ids.shape[1]
        hidden = _each_expert(w13.activation.one(x)[token], w13.dense(), counts).to(x.dtype)
        out = _each_expert(w2.activation.grouped(gated(hidden, self._act), counts), w2.dense(), counts)
        out *= weights.flatten()[order].unsqueeze(-1)
        # Adds each token's experts in the order of their ids, whatever else is in the batch.
        return torch.zeros(x.shape, dtype=torch.float32, device=x.device).index_add_(0, token, out).to(x.dtype)

    def _check(self, layer: torch.nn.Module, hidden_size: int, intermediate: int) -> None:
        check_k(f"{self.module} (gate and up)", hidden_size, 1)
        check_k(f"{self.module} (down)", intermediate, self.moe.tp_size)
        check_routing(layer, self.module, on_cpu=current_platform.is_cpu())
        self._check_activation(layer)
        if self.rollout.mode != "w4a4" and captures_graphs(get_current_vllm_config()):
            raise ValueError(
                f"quads_nvfp4: mode {self.rollout.mode} reads on the host how many tokens each expert has, which CUDA "
                "graphs can't hold. Set enforce_eager (in verl: actor_rollout_ref.rollout.enforce_eager=true), or "
                f"leave {self.module} out with quads.exclude"
            )

    def _check_activation(self, layer: torch.nn.Module) -> None:
        # The GPU's operator has SwiGLU alone.
        known = _ACTIVATIONS if current_platform.is_cpu() or self.rollout.mode != "w4a4" else {"silu": F.silu}
        if not self.moe.is_act_and_mul or _activation_name(layer) not in known or self.moe.has_bias:
            raise ValueError(
                f"quads_nvfp4: {self.module} has activation {_activation_name(layer)!r}"
                f"{', and biases' if self.moe.has_bias else ''}; only gated {' or '.join(known)} without biases is "
                "supported. Leave it out with quads.exclude"
            )
        changed = [f"{name} {value}" for name in _CHANGED if (value := getattr(layer, name, None)) is not None]
        if changed:
            raise ValueError(
                f"quads_nvfp4: {self.module} has a SwiGLU with {', '.join(changed)}, which is not supported. Leave it "
                "out with quads.exclude"
            )


def _operator(layer: torch.nn.Module, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The product of `quads_ops.gemm`; no step waits for the device, so that a CUDA graph can hold it."""
    w13, w2 = layer.quads_projections
    x, stats13, real = w13.compensation.prepare(x)
    if real is not None:
        ids = torch.where(real.rows, ids, -1)
    return gemm.w4a4_moe(
        x,
        w13.operand(),
        w2.operand(),
        weights,
        ids,
        expert_map=layer.expert_map,
        stats13=stats13,
        stats2=w2.compensation.collect_routed(lambda: _tokens_of_experts(layer, ids), real),
    )


def _tokens_of_experts(layer: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """How many tokens each local expert gets: int64 [experts]."""
    local = local_experts(ids, layer.expert_map).flatten()
    counts = torch.zeros(layer.local_num_experts + 1, dtype=torch.int64, device=ids.device)
    return counts.scatter_add_(0, local + 1, torch.ones_like(local))[1:]


def _activation_name(layer: torch.nn.Module) -> str:
    return str(getattr(layer.activation, "value", layer.activation)).lower()


def _local_experts(layer: torch.nn.Module, num_experts: int) -> list[int]:
    """Global index of each expert of this worker, in its local order."""
    if layer.expert_map is None:
        return list(range(num_experts))
    pairs = [(local, expert) for expert, local in enumerate(layer.expert_map.tolist()) if local >= 0]
    return [expert for _, expert in sorted(pairs)]


def _by_expert(layer: torch.nn.Module, ids: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    """Positions in the flattened ids, sorted by local expert, and how many belong to each; without other workers'."""
    flat = local_experts(ids, layer.expert_map).flatten()
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat + 1, minlength=layer.local_num_experts + 1).tolist()
    return order[counts[0] :], counts[1:]


def _each_expert(x: torch.Tensor, w: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """x: FP32 [R, K] sorted by expert. w: FP32 [E, N, K]. Returns FP32 [R, N]."""
    out = torch.empty(x.shape[0], w.shape[1], dtype=torch.float32, device=x.device)
    start = 0
    for expert, count in enumerate(counts):
        if count:
            rows = slice(start, start + count)
            torch.mm(x[rows], w[expert].t(), out=out[rows])
            start += count
    return out
