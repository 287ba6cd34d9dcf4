"""The trainer's squared gradients on their way to the residual masks: vectors in the weight stream, one for each input.

A vector is the mean over tokens of (dlogp/dx)^2, FP32 [K] of a quantized input x, or [E, K] where each expert has its
own (down projections). They are of whole inputs; a worker takes its part of K, and its experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from quads_ops.listing import first_names
from quads_ops.vllm_method.names import input_name
from quads_ops.vllm_method.projection import Projection


class SensitivityError(ValueError):
    """Gradients that do not fit the rollout's model; the message names the input and what is wrong."""


def take(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A copy of one vector that may be overwritten afterwards. name: without the prefix.

    Raises:
        SensitivityError: not FP32, NaN or Inf, or negative.
    """
    if tensor.dtype != torch.float32:
        raise SensitivityError(f"the trainer sent the sensitivity of {name} as {tensor.dtype}; float32 is needed")
    own = tensor.detach().to("cpu", copy=True)
    if not bool(own.isfinite().all()) or bool((own < 0).any()):
        raise SensitivityError(f"the trainer sent NaN, Inf or a negative value in the sensitivity of {name}")
    return own


def apply(projections: Iterable[Projection], vectors: Mapping[str, torch.Tensor]) -> None:
    """Give every compensated input its gradients, or none of them if something is wrong.

    vectors: input (`quads_ops.vllm_method.names.input_name`) -> squared gradient.

    Raises:
        SensitivityError: an input without a vector, a vector without an input, or a wrong shape.
    """
    wanted = {input_name(p.layer_name, p.stem): p for p in projections if p.compensation is not None}
    missing = sorted(wanted.keys() - vectors.keys())
    if missing:
        raise SensitivityError(f"the trainer sent sensitivities without that of {first_names(missing, 8)}")
    unknown = sorted(vectors.keys() - wanted.keys())
    if unknown:
        raise SensitivityError(f"the trainer sent the sensitivity of {first_names(unknown, 8)}, which is not quantized")
    parts = {projection: part_of(projection, vectors[name]) for name, projection in wanted.items()}
    for projection, part in parts.items():
        projection.compensation.set_gradient(part)


def part_of(projection: Projection, whole: torch.Tensor) -> torch.Tensor:
    """This worker's part of K, and its experts: FP32 [K] or [E, K].

    Raises:
        SensitivityError: `whole` is not that of this input.
    """
    first = projection.shards[0]
    k = first.full_shape[1]
    experts = None
    if projection.compensation.experts is not None:
        experts = [int(shard.name.split(".")[-2]) for shard in projection.shards]
    fits = whole.shape == (k,) if experts is None else whole.dim() == 2 and whole.shape[1] == k
    if not fits or (experts is not None and (max(experts) >= len(whole) or projection.stack not in (None, len(whole)))):
        of = f"[{k}]" if experts is None else f"[{projection.stack or 'experts'}, {k}]"
        name = input_name(projection.layer_name, projection.stem)
        raise SensitivityError(
            f"the trainer sent the sensitivity of {name} with shape {tuple(whole.shape)}; needed {of}"
        )
    columns = slice(first.col0, first.col0 + first.columns)
    return whole[columns] if experts is None else whole[experts, columns]
