"""What the operators of `quads_ops.dispatch` and `quads_ops.gemm` accept, checked before any backend runs.

Types, dtypes, shapes and devices are checked on every device; none of that waits for a GPU. Values are looked at only
where they lie in the CPU's memory, and never inside torch.compile: in the operators of `custom_ops`.
"""

from collections.abc import Iterable, Sequence

import torch

from quads_ops.formats import BLOCK_SIZE
from quads_ops.residual_layout import CompensatedWeight, ResidualForm
from quads_ops.weights import PackedWeight

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes of weights and activations that every backend takes."""
INTEGERS = (torch.int32, torch.int64)


def tensor(
    name: str,
    value: object,
    dtypes: torch.dtype | Sequence[torch.dtype],
    shape: Sequence[int | None] | None = None,
    device: torch.device | None = None,
) -> None:
    """One error where `value` is no tensor (TypeError), or one of a wrong dtype, shape or device (ValueError).

    name: operator and argument. None in shape stands for any size.
    """
    dtypes = (dtypes,) if isinstance(dtypes, torch.dtype) else dtypes
    wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor of {wanted}, got {_said(value)}; use torch.tensor(...)")
    if value.dtype not in dtypes:
        raise ValueError(f"{name} must be {wanted}, got {value.dtype}; cast it with .to(torch.{wanted.split()[0]})")
    if shape is not None and not _fits(value.shape, shape):
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} must have shape [{sizes}], got {list(value.shape)}")
    if device is not None and value.device != device:
        raise ValueError(f"{name} is on {value.device}, the operator runs on {device}; move it there")


def weight_and_scale(op: str, w: object, g: object) -> None:
    """w: [..., N, K] with one global scale per matrix. Shapes of the two are checked where they are used."""
    tensor(f"{op}: the weight w", w, FLOATS)
    tensor(f"{op}: the global scale g", g, torch.float32, device=w.device)


def packed_weight(op: str, weight: object) -> None:
    """A PackedWeight (or three tensors like one) with its parts in the right dtypes."""
    if not isinstance(weight, tuple) or len(weight) != len(PackedWeight._fields):
        raise TypeError(f"{op}: weight must be a PackedWeight, from quantize_weight; got {_said(weight)}")
    packed, block_scales, g = weight
    tensor(f"{op}: weight.packed", packed, torch.uint8)
    lead = packed.shape[:-1]
    shape = (*lead, packed.shape[-1] * 2 // BLOCK_SIZE if packed.dim() else 0)
    tensor(f"{op}: weight.block_scales", block_scales, torch.uint8, shape, packed.device)
    tensor(f"{op}: weight.global_scale_dec", g, torch.float32, device=packed.device)


def scale_values(op: str, g: torch.Tensor) -> None:
    """Raise ValueError on a global scale that no tensor has: not positive, or infinite. Looks at CPU tensors only.

    NaN is allowed: `nvfp4.global_scale_dec` gives it to a group of matrices that holds NaN or Inf, all of whose values
    become NaN, and where that is an error the message can name the matrix (`quads_ops.vllm_method`).
    """
    if g.device.type != "cpu":
        return
    wrong = (g <= 0) | g.isinf()
    if bool(wrong.any()):
        raise ValueError(
            f"{op}: the global scale g must be positive and finite, got {g[wrong].flatten()[0].item():g}; "
            "take it from quads_ops.nvfp4.global_scale_dec(weight_amax(w))"
        )


def activation(op: str, x: object, k: int | None = None, name: str = "x") -> None:
    """x: [M, K] in a dtype that every backend takes."""
    tensor(f"{op}: {name}", x, FLOATS)
    if x.dim() != 2:
        raise ValueError(f"{op}: {name} must have shape [M, K], got {list(x.shape)}; flatten the leading dimensions")
    if k is not None and x.shape[-1] != k:
        raise ValueError(f"{op}: {name} has K = {x.shape[-1]}, the weight has K = {k}")


def statistics(op: str, stats: object, k: int, lead: Iterable[int | None], device: torch.device) -> None:
    """stats: None, or FP32 [*lead, K/16] or [*lead, K]."""
    if stats is None:
        return
    tensor(f"{op}: stats", stats, torch.float32, device=device)
    sizes = [(*lead, k // BLOCK_SIZE), (*lead, k)]
    if not any(_fits(stats.shape, shape) for shape in sizes):
        either = " or ".join(str(["any" if n is None else n for n in shape]) for shape in sizes)
        raise ValueError(f"{op}: stats must have shape {either}, got {list(stats.shape)}; see new_statistics")


def residual_form(op: str, form: object, k: int, experts: int | None, device: torch.device) -> None:
    """form: a ResidualForm for K channels, one line for all rows or (with `experts`) one for each expert."""
    if not isinstance(form, ResidualForm):
        raise TypeError(f"{op}: form must be a ResidualForm, from residual_form(mask, K); got {_said(form)}")
    blocks = k // BLOCK_SIZE
    if isinstance(form.kept, bool) or not isinstance(form.kept, int) or not 0 <= form.kept <= blocks:
        raise ValueError(f"{op}: form.kept must be an integer from 0 to {blocks} (K/16), got {form.kept!r}")
    lines = [()] if experts is None else [(), (experts,)]
    if form.order is not None:
        tensor(f"{op}: form.order", form.order, INTEGERS, device=device)
        _one_of(f"{op}: form.order", form.order, [(*line, blocks) for line in lines])
    if form.keep is not None:
        tensor(f"{op}: form.keep", form.keep, torch.bool, device=device)
        _one_of(f"{op}: form.keep", form.keep, [(*line, size) for line in lines for size in (blocks, k)])
        if form.kept != blocks:
            raise ValueError(f"{op}: form.keep needs form.kept = {blocks} (K/16, every block), got {form.kept}")


def compensated_weight(op: str, name: str, weight: object, dims: int, device: torch.device) -> tuple[int, ...]:
    """A CompensatedWeight of `dims` dimensions on the device; returns the shape of its matrix, [..., N, K]."""
    if not isinstance(weight, CompensatedWeight):
        raise TypeError(
            f"{op}: {name} must be a CompensatedWeight, from compensated_weight(packed, residual); got {_said(weight)}"
        )
    packed_weight(f"{op}: {name}", weight.weight)
    packed, _, g = weight.weight
    if packed.dim() != dims:
        raise ValueError(f"{op}: {name}.packed must have {dims} dimensions, got shape {list(packed.shape)}")
    if packed.device != device:
        raise ValueError(f"{op}: {name} is on {packed.device}, x on {device}; move one of them")
    shape = (*packed.shape[:-1], 2 * packed.shape[-1])
    experts = shape[0] if dims == 3 else None
    if g.numel() not in ((1, shape[-2]) if experts is None else (experts,)):
        count = f"{experts} entries, one per expert" if experts else f"one entry, or {shape[-2]}, one per row"
        raise ValueError(f"{op}: {name}.global_scale_dec needs {count}; got shape {list(g.shape)}")
    residual_form(f"{op}: {name}", weight.form, shape[-1], experts, device)
    return shape


def out_dtype(op: str, dtype: object, name: str = "out_dtype") -> None:
    """Raise ValueError on anything but one of FLOATS."""
    if dtype not in FLOATS:
        wanted = ", ".join(str(one) for one in FLOATS)
        raise ValueError(f"{op}: {name} must be one of {wanted}; got {_said(dtype)}")


def _one_of(name: str, value: torch.Tensor, shapes: Sequence[tuple[int, ...]]) -> None:
    if tuple(value.shape) not in shapes:
        wanted = " or ".join(dict.fromkeys(str(list(shape)) for shape in shapes))
        raise ValueError(f"{name} must have shape {wanted}, got {list(value.shape)}")


def _fits(shape: Sequence[int], wanted: Sequence[int | None]) -> bool:
    return len(shape) == len(wanted) and all(w is None or n == w for n, w in zip(shape, wanted, strict=True))


def _said(value: object) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 40 else text[:40] + '...'}"
