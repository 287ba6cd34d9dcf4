"""Router logits to experts, in torch: vLLM's CPU build has no operator for it."""

from __future__ import annotations

import torch


def check_routing(layer: torch.nn.Module, name: str, on_cpu: bool) -> None:
    """Raise ValueError for ways of routing that are not supported: on a CPU, those that `route` does not know."""
    unknown = {"router weights on the input": layer.apply_router_weight_on_input}
    if on_cpu:
        unknown |= {
            "grouped top-k": layer.use_grouped_topk,
            "a custom routing function": layer.custom_routing_function is not None,
            f"scoring function {layer.scoring_func!r}": layer.scoring_func not in ("softmax", "sigmoid"),
        }
    found = [what for what, present in unknown.items() if present]
    if found:
        raise ValueError(
            f"quads_nvfp4: {name} routes with {', '.join(found)}, which is not supported"
            f"{' on a CPU' if on_cpu else ''}. Leave it out with quads.exclude"
        )


def route(layer: torch.nn.Module, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Top-k experts of each token.

    logits: [T, E]. Returns weights (FP32 [T, k]) and global expert ids (int64 [T, k]); score and normalization in FP32.
    """
    logits = logits.float()
    scores = torch.softmax(logits, -1) if layer.scoring_func == "softmax" else logits.sigmoid()
    bias = layer.e_score_correction_bias
    ids = torch.topk(scores if bias is None else scores + bias, layer.top_k, -1, sorted=False).indices
    weights = scores.gather(-1, ids)
    if layer.renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    factor = layer.routed_scaling_factor
    return (weights if factor == 1.0 else weights * factor), ids
