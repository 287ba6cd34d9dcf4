"""Correctness on this very GPU, which benchmarks/gpu_bench.py wants to see before it times anything.

Quantizers must equal the torch definition in every bit; products an FP64 reference within the order of sums; routed
experts must also give the same result from a captured CUDA graph, with a routing that the capture did not see.
"""

from collections.abc import Iterator

import torch

from quads_kernels import activation, configs
from quads_kernels.gemm import w4a4_gemm
from quads_ops import dispatch, nvfp4
from quads_ops.gemm import compensated_weight, w4a4_moe
from quads_ops.residual import ResidualMask
from quads_ops.weights import PackedWeight, quantize_weight, weight_amax

BOUND = 2e-6
"""Largest error of a product as a share of sum |x| |w|: K FP32 additions in unknown order, and three roundings."""

SHAPES = [(1, 2048, 2048), (7, 1536, 768), (16, 5120, 2048), (64, 2048, 4096), (300, 2048, 2880), (1000, 512, 2048)]
"""(tokens, N, K)"""


class CheckFailed(AssertionError):
    """A kernel is wrong on this GPU."""


def verify(device: torch.device, backend: str, shapes=SHAPES) -> Iterator[str]:
    """Check everything that the benchmark times, and say each time what was checked. Raises CheckFailed."""
    torch.manual_seed(0)
    yield quantizers(device, shapes)
    yield products(device, backend == "native", shapes)
    yield experts(device, backend)
    if device.type == "cuda":
        yield captured_experts(device, backend)


def activations(tokens: int, k: int, device: torch.device) -> torch.Tensor:
    """BF16 [tokens, k] with heavy tails and a few large channels, as activations have."""
    heavy = torch.distributions.StudentT(torch.tensor(4.0, device=device)).sample((tokens, k))
    return (heavy * torch.where(torch.rand(k, device=device) < 0.02, 20.0, 1.0)).bfloat16()


def random_weight(*shape: int, device: torch.device) -> PackedWeight:
    w = (torch.randn(shape, device=device) * 0.05).bfloat16()
    return quantize_weight(w, nvfp4.global_scale_dec(weight_amax(w)))


def quantizers(device: torch.device, shapes) -> str:
    """Activations without residual, with part of it in another order of blocks, and with all; weights in each form."""
    for tokens, n, k in shapes:
        x, w = activations(tokens, k, device), torch.randn(n, k, device=device).bfloat16()
        for kept in (0, k // 32, k // 16):
            order = torch.randperm(k // 16, device=device).int() if 0 < kept < k // 16 else None
            _compare(f"[{tokens}, {k}], kept {kept}", *_quantized_twice(x, kept, order))
        _compare(f"[{n}, {k}]", *_weight_twice(w))
    return f"quantizers equal torch in every bit ({len(shapes)} shapes)"


def _quantized_twice(x: torch.Tensor, kept: int, order: torch.Tensor | None) -> tuple[dict, dict]:
    """What the kernel makes of activations, and what torch does."""
    found = activation.quantize(x, kept=kept, order=order)
    moved = x.float() if order is None else x.float().unflatten(-1, (-1, 16))[:, order.long()].flatten(-2)
    g = nvfp4.global_scale_dec(x.float().abs().amax(-1))
    codes, scales = nvfp4.quantize(moved, g)
    expected = {"g": g, "codes": nvfp4.pack(codes), "block scales": scales}
    actual = {"g": found.global_scale_dec, "codes": found.packed, "block scales": found.block_scales}
    if kept:
        rest = (moved - nvfp4.dequantize(codes, scales, g))[:, : 16 * kept]
        codes, scales = nvfp4.quantize(rest, g)
        expected |= {"residual codes": nvfp4.pack(codes), "residual block scales": scales}
        actual |= {"residual codes": found.residual_packed, "residual block scales": found.residual_block_scales}
    return actual, expected


def _weight_twice(w: torch.Tensor) -> tuple[dict, dict]:
    """What the kernels make of a weight, and what torch does."""
    g = nvfp4.global_scale_dec(weight_amax(w))
    parts = "packed weight", "weight scales"
    expected = dict(zip(parts, quantize_weight(w, g)[:2], strict=True))
    actual = dict(zip(parts, dispatch.quantize_weight(w, g, backend="emulated")[:2], strict=True))
    expected["fake-quantized weight"] = nvfp4.reference_qdq(w, g).to(w.dtype)
    actual["fake-quantized weight"] = dispatch.fake_quantize_weight(w, g, backend="emulated")
    return actual, expected


def _compare(shape: str, actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, wanted in expected.items():
        if not torch.equal(actual[name], wanted):
            wrong = int((actual[name] != wanted).sum())
            raise CheckFailed(f"quantizer, {shape}: {wrong} of {wanted.numel()} {name} differ from torch")


def products(device: torch.device, native: bool, shapes) -> str:
    worst = 0.0
    for tokens, n, k in shapes:
        weight, x = random_weight(n, k, device=device), activations(tokens, k, device)
        for kept in (0, k // 32, k // 16):
            rows = activation.quantize(x, kept=kept)
            exact = decoded(rows, kept), weight_values(weight)
            for sums in (False,) if native else (False, True):
                operand = quantized_sums(x, kept) if sums else rows
                for tile in _tiles(device, native, tokens, sums):
                    out = w4a4_gemm(operand, weight, out_dtype=torch.float32, native=native, tile=tile)
                    share = _share_of_bound(out, *exact, 2**-11 if sums and kept else 0.0)
                    worst = max(worst, share)
                    if not share <= 1:
                        name = f"product [{tokens}, {k}] x [{n}, {k}], kept {kept}, {tile}"
                        raise CheckFailed(f"{name}{', from sums' if sums else ''}: {share:.3g} x bound")
    return f"products within the order of sums of FP64 (worst {worst:.2f} of the bound, {len(shapes)} shapes)"


def quantized_sums(x: torch.Tensor, kept: int, order: torch.Tensor | None = None) -> activation.Quantized:
    """Tokens as emulated products take them."""
    return activation.quantize(x, kept=kept, order=order, packed=False, sums=True)


def experts(device: torch.device, backend: str) -> str:
    """All of it, few and many tokens, against the torch definition."""
    options = dict(out_dtype=torch.float32)
    for tokens in (1, 33, 500):
        x, w13, w2, weights, ids = expert_operands(tokens, device)
        expected = w4a4_moe(x, w13, w2, weights, ids, backend="torch", **options)
        for summed in (False, True) if backend == "emulated" else (None,):
            out = w4a4_moe(x, w13, w2, weights, ids, sum_residual=summed, backend=backend, **options)
            error = (out - expected).abs() / expected.abs().amax(-1, keepdim=True).clamp(min=1e-6)
            # A last bit of BF16 before SwiGLU moves a code now and then; most elements must not notice.
            if not (error < (1e-3 if summed else 1e-4)).float().mean() > 0.8 or not error.max() < 0.1:
                name = f"experts, {tokens} tokens{', FP16 sum' if summed else ''}"
                raise CheckFailed(f"{name}: largest error {error.max():.3g}, mean {error.mean():.3g}")
    return "routed experts equal the torch definition"


def captured_experts(device: torch.device, backend: str) -> str:
    """Capture with one routing, replay with another."""
    x, w13, w2, weights, ids = expert_operands(33, device)
    run = lambda: w4a4_moe(x, w13, w2, weights, ids, backend=backend)  # noqa: E731
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for routing in (ids.flip(0).clone(), torch.zeros_like(ids) + torch.arange(ids.shape[1], device=device)):
        ids.copy_(routing)
        graph.replay()
        replayed = out.clone()
        if not torch.equal(replayed, run()):
            raise CheckFailed("experts: a captured graph gives another result with a new routing")
    return "routed experts can be captured, and follow a new routing"


def expert_operands(tokens: int, device: torch.device, hidden: int = 512, inner: int = 256, count: int = 16):
    masks = [ResidualMask(blocks=torch.arange(inner // 16, device=device) % 2 == e % 2) for e in range(count)]
    mask13 = ResidualMask(blocks=torch.arange(hidden // 16, device=device) % 3 == 0)
    w13 = compensated_weight(random_weight(count, 2 * inner, hidden, device=device), mask13)
    w2 = compensated_weight(random_weight(count, hidden, inner, device=device), masks)
    ids = torch.stack([torch.randperm(count)[:4] for _ in range(tokens)]).int().to(device)
    return activations(tokens, hidden, device), w13, w2, torch.rand(tokens, 4).to(device), ids


def decoded(rows: activation.Quantized, kept: int) -> torch.Tensor:
    """FP64 [M, K]: Xq + Rq."""
    values = nvfp4.unscaled(nvfp4.unpack(rows.packed), rows.block_scales).double()
    if kept:
        residual = nvfp4.unscaled(nvfp4.unpack(rows.residual_packed), rows.residual_block_scales)
        values[:, : 16 * kept] += residual.double()
    return values * rows.global_scale_dec.double()[:, None]


def weight_values(weight: PackedWeight) -> torch.Tensor:
    """FP64 [N, K]."""
    return nvfp4.unscaled(nvfp4.unpack(weight.packed), weight.block_scales).double() * weight.global_scale_dec.double()


def _tiles(device: torch.device, native: bool, tokens: int, sums: bool) -> tuple[configs.Tile, ...]:
    from quads_kernels.launch import capability

    return configs.dense_candidates(capability(device), native, tokens, sums)


def _share_of_bound(out: torch.Tensor, x: torch.Tensor, w: torch.Tensor, more: float) -> float:
    """Largest error as a share of (BOUND + more) sum |x| |w|; more: what the form rounds by itself."""
    if out.isnan().any():
        return float("nan")
    return float(((out - x @ w.t()).abs() / ((BOUND + more) * (x.abs() @ w.abs().t())).clamp(min=1e-300)).max())
