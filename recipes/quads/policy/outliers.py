"""Function-preserving activation outliers.

Trained language models have a few activation channels that are many times larger than the rest, which is what makes
4-bit activations hard; a model of a million parameters has none. This scales up chosen channels where activations
are produced and scales down the weights that read them, so the function stays the same and the activations that
get quantized look like a large model's.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class OutlierSettings:
    """`strength`: factor on an outlier channel; a power of two keeps every weight exact in bf16.
    `norm_channels`: how many channels of each RMSNorm in front of attention and experts.
    `mlp_channels`: how many intermediate channels of each layer's experts (rows of up_proj).
    `seed`: which channels, drawn per layer."""

    strength: float = 16.0
    norm_channels: int = 4
    mlp_channels: int = 2
    seed: int = 3


@torch.no_grad()
def add_outliers(model, settings: OutlierSettings) -> None:
    """Adds outlier channels to a Qwen3-MoE model of transformers 5 (fused experts), in place.

    Raises ValueError for a strength that is not above 0, or more channels than there are.
    """
    _check(model.config, settings)
    generator = torch.Generator().manual_seed(settings.seed)
    for layer in model.model.layers:
        attention, experts = layer.self_attn, layer.mlp.experts
        _scale_norm(
            layer.input_layernorm,
            [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight],
            settings,
            generator,
        )
        # The router reads the same activations as the experts, so its weight gets the inverse as well.
        _scale_norm(layer.post_attention_layernorm, [layer.mlp.gate.weight, experts.gate_up_proj], settings, generator)
        _scale_up_projection(experts, settings, generator)


def _check(config, settings: OutlierSettings) -> None:
    if not settings.strength > 0:
        raise ValueError(f"outlier strength: {settings.strength} is not above 0; give a factor such as 16")
    limits = {"norm_channels": config.hidden_size, "mlp_channels": config.moe_intermediate_size}
    for name, limit in limits.items():
        value = getattr(settings, name)
        if not 0 <= value <= limit:
            raise ValueError(f"{name}: {value} is not within 0 and the {limit} channels that the model has")


def _scale_norm(norm, consumers: list[torch.Tensor], settings: OutlierSettings, generator: torch.Generator) -> None:
    """norm.weight [H] up, the columns of its consumers [..., H] down."""
    channels = torch.randperm(norm.weight.numel(), generator=generator)[: settings.norm_channels]
    norm.weight[channels] *= settings.strength
    for weight in consumers:
        weight[..., channels] /= settings.strength


def _scale_up_projection(experts, settings: OutlierSettings, generator: torch.Generator) -> None:
    """Rows of up [E, I of 2I, H] up, columns of down [E, H, I] down; SwiGLU is linear in up."""
    width = experts.down_proj.shape[-1]
    channels = torch.randperm(width, generator=generator)[: settings.mlp_channels]
    experts.gate_up_proj[:, width + channels] *= settings.strength
    experts.down_proj[..., channels] /= settings.strength
