"""What benchmarks/gpu_bench.py times: the kernels of this project, and what they compete with, on the same operands.

Every function returns {name: Provider}, leaving out what this machine does not have. vLLM's operators are looked up
where they are, in the installed version; NVFP4 ones need Blackwell. Where vLLM is installed and lacks one, or refuses
these operands, that is said, and the rest is timed.
"""

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from gpu_check import activations, quantized_sums, random_weight

from quads_kernels import activation
from quads_kernels.gemm import w4a4_gemm
from quads_ops import dispatch
from quads_ops.gemm import compensated_weight, w4a4_linear, w4a4_moe
from quads_ops.residual import ResidualMask
from quads_ops.weights import dequantize_weight

RATIOS = (0.0, 0.25, 0.5, 1.0)
VLLM_OPERATORS = {
    "scaled_fp8_quant": "dynamic_per_token_scaled_fp8_quant",
    "cutlass_scaled_mm": "cutlass_scaled_mm",
    "scaled_fp4_quant": "scaled_fp4_quant",
    "cutlass_scaled_fp4_mm": "cutlass_scaled_fp4_mm",
}
"""Function of vllm._custom_ops -> the compiled operator that it calls here."""


@dataclass
class Provider:
    run: Callable[[], object]
    ratio: float | None = None
    bytes: float = 0.0
    """Read and written in device memory, where that is what counts."""
    operations: float = 0.0
    """Useful ones: padding and the residual's are not counted."""


def residual(ratio: float, k: int, device: torch.device):
    """A residual mode that keeps this share of the blocks, spread over K."""
    if ratio in (0.0, 1.0):
        return "all" if ratio else None
    blocks = torch.arange(k // 16, device=device)
    return ResidualMask(blocks=(blocks * ratio).long() != ((blocks + 1) * ratio).long())


def quantizers(tokens: int, k: int, device: torch.device) -> dict[str, Provider]:
    x = activations(tokens, k, device)
    found = {}
    for ratio in RATIOS:
        kept = round(ratio * k / 16)
        order = torch.randperm(k // 16, device=device).int() if 0 < ratio < 1 else None
        moved = tokens * (2 * k + (0.5 + 1 / 16) * (k + 16 * kept) + 4)
        run = lambda kept=kept, order=order: activation.quantize(x, kept=kept, order=order)  # noqa: E731
        found[f"quads ratio {ratio:g}"] = Provider(run, ratio, moved)
    return found | {"torch copy": _copy(x)} | _peers(_vllm_quantizer, x, device)


def weight_quantizers(n: int, k: int, device: torch.device) -> dict[str, Provider]:
    w = torch.randn(n, k, device=device).bfloat16()
    g = torch.tensor(1e-3, device=device)
    fake = Provider(lambda: dispatch.fake_quantize_weight(w, g, backend="emulated"), None, 4.0 * n * k)
    packed = Provider(lambda: dispatch.quantize_weight(w, g, backend="emulated"), None, (2 + 0.5 + 1 / 16) * n * k)
    return {"quads weight qdq": fake, "quads weight packed": packed, "torch copy": _copy(w)}


def _copy(x: torch.Tensor) -> Provider:
    """What moving so little costs at best: starting a kernel takes a part of it."""
    target = torch.empty_like(x)
    return Provider(lambda: target.copy_(x), None, 2.0 * x.nbytes)


def linears(tokens: int, n: int, k: int, device: torch.device, backend: str) -> dict[str, Provider]:
    """Products alone, and with the quantization of their input ("linear")."""
    x, packed = activations(tokens, k, device), random_weight(n, k, device=device)
    operations = 2.0 * tokens * n * k
    dense = dequantize_weight(packed).bfloat16()
    found = {"torch bf16": Provider(lambda: F.linear(x, dense), operations=operations)}
    sums = (False, True) if backend == "emulated" else (False,)
    for ratio in RATIOS:
        weight = compensated_weight(packed, residual(ratio, k, device))
        for summed in sums:
            quantize = quantized_sums if summed else activation.quantize
            rows = quantize(x, kept=weight.form.kept, order=weight.form.order)
            note = f"{backend}{' fp16 sum' if summed else ''} ratio {ratio:g}"
            options = dict(out_dtype=torch.bfloat16, native=backend == "native")
            gemm = lambda rows=rows, w=weight.weight, options=options: w4a4_gemm(rows, w, **options)  # noqa: E731
            found[f"quads gemm {note}"] = Provider(gemm, ratio, operations=operations)
        linear = lambda weight=weight: w4a4_linear(x, weight, backend=backend)  # noqa: E731
        found[f"quads linear {backend} ratio {ratio:g}"] = Provider(linear, ratio, operations=operations)
    return found | _peers(_vllm_linears, x, dense, operations, device)


def experts(
    tokens: int, count: int, topk: int, hidden: int, inner: int, device: torch.device, backend: str
) -> dict[str, Provider]:
    x = activations(tokens, hidden, device)
    packed13, packed2, dense13, dense2 = _expert_weights(count, hidden, inner, device)
    ids = torch.rand(tokens, count, device=device).topk(topk).indices.int()
    weights = torch.rand(tokens, topk, device=device).softmax(-1)
    operations = 6.0 * tokens * topk * hidden * inner
    found = {}
    for ratio in RATIOS:
        w13 = compensated_weight(packed13, residual(ratio, hidden, device))
        mask = residual(ratio, inner, device)
        w2 = compensated_weight(packed2, [mask] * count if isinstance(mask, ResidualMask) else mask)
        run = lambda w13=w13, w2=w2: w4a4_moe(x, w13, w2, weights, ids, backend=backend)  # noqa: E731
        found[f"quads experts {backend} ratio {ratio:g}"] = Provider(run, ratio, operations=operations)
    found["torch bf16"] = Provider(_torch_experts(x, dense13, dense2, weights, ids), operations=operations)
    return found | _peers(_vllm_experts, x, dense13, dense2, weights, ids, operations)


@functools.cache
def _expert_weights(count: int, hidden: int, inner: int, device: torch.device) -> tuple:
    """w13 and w2, packed and in BF16: the same for every number of tokens."""
    packed = [random_weight(count, *sizes, device=device) for sizes in ((2 * inner, hidden), (hidden, inner))]
    return *packed, *(dequantize_weight(weight).bfloat16() for weight in packed)


def _torch_experts(x, w13, w2, weights, ids) -> Callable[[], torch.Tensor]:
    """Sorted once, outside: grouped BF16 products, SwiGLU, and the sum."""
    flat = ids.flatten().long()
    order = flat.argsort(stable=True)
    token = order // ids.shape[1]
    ends = torch.bincount(flat, minlength=len(w13)).cumsum(0).int()
    share = weights.flatten()[order, None].to(x.dtype)
    grouped = getattr(F, "grouped_mm", None) or torch._grouped_mm

    def run() -> torch.Tensor:
        gate, up = grouped(x[token], w13.transpose(1, 2), offs=ends).chunk(2, -1)
        rows = grouped(F.silu(gate) * up, w2.transpose(1, 2), offs=ends) * share
        return torch.zeros_like(x).index_add_(0, token, rows)

    return run


def _peers(make: Callable[..., dict[str, Provider]], *args) -> dict[str, Provider]:
    """What `make` returns, or nothing where the installed vLLM does not take these operands, which is said."""
    try:
        return make(*args)
    except Exception as error:  # another version's interface fails in any way; this project's providers need none of it
        print(f"not timed, {make.__name__.strip('_')}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return {}


def _vllm_quantizer(x: torch.Tensor, device: torch.device) -> dict[str, Provider]:
    if not (_blackwell(device) and _vllm_has("scaled_fp4_quant")):
        return {}
    from vllm import _custom_ops as ops

    scale = torch.ones(1, device=device)
    return {"vllm nvfp4": Provider(lambda: ops.scaled_fp4_quant(x, scale), None, x.numel() * (2 + 0.5 + 1 / 16))}


def _vllm_linears(x, w, operations: float, device: torch.device) -> dict[str, Provider]:
    found = {}
    if _vllm_has("cutlass_scaled_mm") and _vllm_has("scaled_fp8_quant"):
        from vllm import _custom_ops as ops

        w8, scale = ops.scaled_fp8_quant(w, use_per_token_if_dynamic=True)

        def fp8() -> torch.Tensor:
            x8, scale_x = ops.scaled_fp8_quant(x, use_per_token_if_dynamic=True)
            return ops.cutlass_scaled_mm(x8, w8.t(), scale_x, scale.view(1, -1), x.dtype)

        found["vllm fp8 linear"] = Provider(fp8, operations=operations)
    if _blackwell(device) and _vllm_has("cutlass_scaled_fp4_mm"):
        from vllm import _custom_ops as ops

        gx, gw = (2688 / t.abs().amax().float().reshape(1) for t in (x, w))
        w4, scale_w = ops.scaled_fp4_quant(w, gw)
        alpha = 1 / (gx * gw)

        def fp4() -> torch.Tensor:
            x4, scale_x = ops.scaled_fp4_quant(x, gx)
            return ops.cutlass_scaled_fp4_mm(x4, w4, scale_x, scale_w, alpha, x.dtype)

        found["vllm nvfp4 linear"] = Provider(fp4, operations=operations)
    return found


def _vllm_experts(x, w13, w2, weights, ids, operations: float) -> dict[str, Provider]:
    if not _vllm_has("scaled_fp8_quant"):
        return {}
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

    def fp8(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scale = ops.scaled_fp8_quant(w.flatten(0, 1), use_per_token_if_dynamic=True)
        return codes.view(w.shape), scale.view(*w.shape[:2], 1)

    (w13_8, scale13), (w2_8, scale2) = fp8(w13), fp8(w2)
    config = fp8_w8a8_moe_quant_config(scale13, scale2, per_act_token_quant=True, per_out_ch_quant=True)
    return {
        "vllm bf16 experts": Provider(lambda: fused_experts(x, w13, w2, weights, ids), operations=operations),
        "vllm fp8 experts": Provider(
            lambda: fused_experts(x, w13_8, w2_8, weights, ids, quant_config=config), operations=operations
        ),
    }


@functools.cache
def _vllm_has(name: str) -> bool:
    """Whether a vLLM is installed that has this function of VLLM_OPERATORS, compiled; said once if not."""
    try:
        from vllm import _custom_ops as ops
    except ImportError as error:
        print(f"not timed, vLLM's {name}: {error}", file=sys.stderr, flush=True)
        return False
    found = hasattr(ops, name) and hasattr(torch.ops._C, VLLM_OPERATORS[name])
    if not found:
        print(f"not timed, vLLM's {name}: it has no {VLLM_OPERATORS[name]}", file=sys.stderr, flush=True)
    return found


def _blackwell(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 10
