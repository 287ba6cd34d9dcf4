"""Fake-quantized weights that are not kept until backward.

Multiplying with a fake-quantized weight makes autograd keep it: an unsharded copy of every quantized matrix, which
undoes FSDP. While a module's forward runs, saved tensors that are (views of) its fake-quantized weight are replaced by
a recipe: the parameter's own storage, which FSDP has gathered again by the time backward needs it, and the global
scale. Other saved tensors go to whatever hooks were active outside (activation offload), or are kept as usual.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from quads_ops import cpu_qdq, dispatch
from quads_ops.backends import choose
from quads_ops.fake_quant_scales import is_gathered

# Elements quantized at a time where torch does it: bounds the FP32 temporaries, and on a CPU keeps them in the cache.
_CHUNK = {"cpu": 1 << 16}
_DEFAULT_CHUNK = 1 << 25


class Source(NamedTuple):
    """A weight and its scale, as one forward found them."""

    weight: torch.Tensor
    """[N, K], or [E, N, K] for fused experts; what FSDP provides, any float dtype."""
    global_scale_dec: torch.Tensor
    """FP32 [] or [E]."""


@contextmanager
def fake_quantized(sources: Sequence[Source], dtype: torch.dtype, *, recompute: bool) -> Iterator[list[torch.Tensor]]:
    """The fake-quantized weights in `dtype`, with straight-through gradients to `source.weight`.

    recompute: inside this context, autograd saves a recipe instead of them. If False they live as long as the graph;
    right under gradient checkpointing, where the graph of a layer lives only while its backward runs.
    """
    recipes = [_Recipe(source, dtype) for source in sources]
    tensors = [_StraightThrough.apply(s.weight, r) for s, r in zip(sources, recipes, strict=True)]
    if not (recompute and torch.is_grad_enabled()):
        yield tensors
        return
    by_storage = {t.untyped_storage().data_ptr(): r for t, r in zip(tensors, recipes, strict=True) if t.numel()}
    with _saving_recipes(by_storage):
        yield tensors


def fake_quantize(w: torch.Tensor, g: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`dispatch.fake_quantize_weight(w.to(dtype), g)` with bounded temporaries. w: [..., N, K]; g: FP32 [...]."""
    if w.dtype == dtype and not _in_plain_torch(w):
        return dispatch.fake_quantize_weight(w, g)
    out = torch.empty(w.shape, dtype=dtype, device=w.device)
    matrices, scales = w.flatten(0, -3) if w.dim() > 2 else w.unsqueeze(0), g.reshape(-1)
    result = out.view(matrices.shape)
    limit = _CHUNK.get(w.device.type, _DEFAULT_CHUNK)
    rows = max(1, limit // max(1, w.shape[-1]))
    step = max(1, rows // max(1, w.shape[-2]))  # whole matrices at a time, where several fit
    for first in range(0, matrices.shape[0], step):
        stack = slice(first, first + step)
        for row in range(0, w.shape[-2], rows):
            part = slice(row, row + rows)
            result[stack, part] = dispatch.fake_quantize_weight(matrices[stack, part].to(dtype), scales[stack])
    return out


def _in_plain_torch(w: torch.Tensor) -> bool:
    """Whether QDQ of `w` makes FP32 temporaries of its size; the Triton kernels and the compiled CPU path make none."""
    return choose("fake_quantize_weight", w.device, w.dtype, w.shape[-1]) == "torch" and not cpu_qdq.takes(w)


class _Recipe:
    """Builds one fake-quantized weight, in forward and again in backward."""

    def __init__(self, source: Source, dtype: torch.dtype):
        self._weight = source.weight.detach()
        self._version = self._weight._version if torch.is_grad_enabled() else None
        self._scale = source.global_scale_dec
        self._dtype = dtype
        # Without a gradient nothing tells when backward is done with it, so it is not kept between two uses.
        self._keep = source.weight.requires_grad
        self._kept: torch.Tensor | None = None

    def build(self) -> torch.Tensor:
        if not is_gathered(self._weight, self._weight.shape):
            raise RuntimeError(
                f"a weight of shape {tuple(self._weight.shape)} is not gathered while it is needed: FSDP has freed it"
            )
        return fake_quantize(self._weight, self._scale, self._dtype)

    def rebuild(self) -> torch.Tensor:
        """The same tensor again; kept until `release`, because experts read it once per expert."""
        if self._weight._version != self._version:
            raise RuntimeError(
                f"a fake-quantized weight of shape {tuple(self._weight.shape)} was changed in place between forward "
                "and backward; run backward before the optimizer step"
            )
        if self._kept is not None:
            return self._kept
        tensor = self.build()
        if self._keep:
            self._kept = tensor
        return tensor

    def release(self) -> None:
        self._kept = None


class _StraightThrough(torch.autograd.Function):
    """Forward: the fake-quantized weight. Backward: the gradient as it is, in the parameter's dtype."""

    @staticmethod
    def forward(ctx, weight: torch.Tensor, recipe: _Recipe) -> torch.Tensor:
        ctx.recipe, ctx.dtype = recipe, weight.dtype
        return recipe.build()

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        ctx.recipe.release()  # every use of the weight has had its backward by now
        return grad.to(ctx.dtype), None


class _SavedWeight(NamedTuple):
    """Stands for a view of a fake-quantized weight in autograd's graph."""

    recipe: _Recipe
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _SavedTensor(NamedTuple):
    """Any other saved tensor. Hooks switch off autograd's own check for changes in place, so it is done here."""

    tensor: torch.Tensor
    version: int


@contextmanager
def _saving_recipes(by_storage: dict[int, _Recipe]) -> Iterator[None]:
    # Only the innermost hooks are called; those outside are asked here (torch >= 2.8; no public way to read them).
    outer = torch._C._autograd._top_saved_tensors_default_hooks(True)

    def pack(tensor: torch.Tensor):
        recipe = by_storage.get(tensor.untyped_storage().data_ptr())
        if recipe is not None:
            return _SavedWeight(recipe, tensor.size(), tensor.stride(), tensor.storage_offset())
        return outer[0](tensor) if outer else _SavedTensor(tensor, tensor._version)

    def unpack(packed):
        if isinstance(packed, _SavedWeight):
            return packed.recipe.rebuild().as_strided(packed.size, packed.stride, packed.offset)
        if outer:
            return outer[1](packed)
        if packed.tensor._version != packed.version:
            raise RuntimeError(
                f"a tensor of shape {tuple(packed.tensor.shape)} needed for backward was changed in place"
            )
        return packed.tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
