"""Operands, reference and error bound for the tests of W4A4 products."""

from dataclasses import dataclass

import support_interpreter
import torch

from quads_kernels import configs
from quads_kernels.activation import Quantized
from quads_kernels.sum_order import in_sum_order
from quads_ops import nvfp4, packed_activation
from quads_ops.formats import BLOCK_SIZE
from quads_ops.packed_activation import PackedActivation
from quads_ops.residual import token_scale
from quads_ops.weights import PackedWeight, quantize_weight, weight_amax

DEVICE = support_interpreter.DEVICE

BOUND = 1e-6
"""Largest error of a product against FP64, as a share of sum |x| |w|.

Products are exact. Adding K of them in FP32 in any order errs by at most K 2^-24 of that sum; what adders and tensor
cores do in practice grows like its square root (seen here: 6e-8). The epilogue adds three roundings.
"""

FORMS = ("few tokens", "many tokens")
"""From codes."""
SUMS = ("few sums", "many sums")
"""From FP16 sums, which round: the tests take that apart."""


def tile(form: str, native: bool) -> configs.Tile:
    """A tile of this form that runs where the tests run."""
    tokens, sums = 16 if form.startswith("few") else 4096, form in SUMS
    if DEVICE == "cpu":
        size = 16 if form == "few sums" else configs.INTERPRETER.tokens
        return configs.INTERPRETER._replace(tokens=size, weights_on_m=form != "many tokens")
    major, minor = torch.cuda.get_device_capability()
    return configs.dense_candidates(10 * major + minor, native, tokens, sums)[0]


@dataclass
class Activations:
    rows: Quantized
    values: torch.Tensor
    """FP64 [M, K]: Xq + Rq, with the global scale"""


def activations(m: int, k: int, kept: int) -> Activations:
    """Heavy-tailed tokens with a few large channels; the residual of the first `kept` blocks is kept."""
    x = torch.distributions.StudentT(4.0).sample((m, k)) * torch.where(torch.rand(k) < 0.05, 20.0, 1.0)
    return quantized(x, kept)


def quantized(x: torch.Tensor, kept: int) -> Activations:
    x = x.float()
    g = token_scale(x)
    codes, scales = nvfp4.quantize(x, g)
    values = nvfp4.unscaled(codes, scales).double()
    parts = [g, None, nvfp4.pack(codes), scales, None, None]
    if kept:
        rest = (x - nvfp4.dequantize(codes, scales, g))[:, : kept * BLOCK_SIZE]
        residual = nvfp4.quantize(rest, g)
        values[:, : kept * BLOCK_SIZE] += nvfp4.unscaled(*residual).double()
        parts[4:] = [nvfp4.pack(residual[0]), residual[1]]
    rows = Quantized(*(None if part is None else part.to(DEVICE) for part in parts))
    return Activations(rows, values * g.double()[:, None])


def in_form(a: Activations, form: str) -> Activations:
    """As codes, or for a form of SUMS as FP16 sums; `values` are those of the sums, as they were rounded."""
    if form not in SUMS:
        return a
    rows = Quantized(*(None if part is None else part.cpu() for part in a.rows))
    sums = packed_activation.sums(PackedActivation(rows.global_scale_dec, *rows[2:6]))
    values = in_channel_order(sums).double() * 2**10 * rows.global_scale_dec.double()[:, None]
    held = Quantized(rows.global_scale_dec, *[None] * 5, sums)
    return Activations(Quantized(*(None if part is None else part.to(DEVICE) for part in held)), values)


def in_channel_order(sums: torch.Tensor) -> torch.Tensor:
    channels = in_sum_order(torch.arange(sums.shape[1])[None, :])[0]
    return sums[:, torch.argsort(channels)]


def weight(*shape: int) -> PackedWeight:
    """A random weight [..., N, K]."""
    w = torch.randn(shape) * 0.05
    packed = quantize_weight(w, nvfp4.global_scale_dec(weight_amax(w)))
    return PackedWeight(*(part.to(DEVICE) for part in packed))


def weight_values(packed: PackedWeight) -> torch.Tensor:
    """FP64 [..., N, K] on the CPU."""
    codes, scales, g = (part.cpu() for part in packed)
    g = g[..., None] if g.dim() == codes.dim() - 1 else g[..., None, None]
    return nvfp4.unscaled(nvfp4.unpack(codes), scales).double() * g.double()


def assert_product(out: torch.Tensor, x: torch.Tensor, w: torch.Tensor, extra: torch.Tensor | float = 0.0) -> None:
    """`out` is x w^T + extra within BOUND; x [M, K] and w [N, K] in FP64."""
    expected = x @ w.t() + extra
    allowed = BOUND * (x.abs() @ w.abs().t() + abs(extra))
    error = (out.cpu().double() - expected).abs()
    assert not out.isnan().any(), f"{int(out.isnan().sum())} elements of {out.numel()} are NaN"
    worst = float((error / allowed.clamp(min=1e-300)).max()) if out.numel() else 0.0
    assert (error <= allowed).all(), f"error of {worst:.3g} times the bound"


def decoded(rows: Quantized, lines: slice, kept: int) -> torch.Tensor:
    """FP64 [lines, K]: Xq + Rq of some rows as the quantizer gives them, with the global scale."""
    if rows.sums is not None:
        sums, g = (part[lines].cpu().double() for part in (rows.sums, rows.global_scale_dec))
        return in_channel_order(sums) * 2**10 * g[:, None]
    packed, scales, g = (part[lines].cpu() for part in (rows.packed, rows.block_scales, rows.global_scale_dec))
    values = nvfp4.unscaled(nvfp4.unpack(packed), scales).double()
    if kept:
        codes, scales = rows.residual_packed[lines].cpu(), rows.residual_block_scales[lines].cpu()
        values[:, : kept * BLOCK_SIZE] += nvfp4.unscaled(nvfp4.unpack(codes), scales).double()
    return values * g.double()[:, None]
