"""What residual compensation costs by count: bytes and operations of W4A4 with and without it, and the roofline time.

    python benchmarks/cost_model.py         write benchmarks/results/cost_model.md

Counted: one layer's linear parts of Qwen3-30B-A3B (q|k|v, o, experts' gate|up and down) with everything the kernels of
this project read and write in device memory: weights and their scales, activations before and after quantization,
residual codes, intermediate results. Not counted: attention, norms, the router, launches (compensation adds none),
and data that is read again from the L2 cache.

A kernel's time is the largest of bytes / bandwidth, operations / tensor core peak and, where codes are dequantized in
registers (Hopper), integer instructions / their peak; a layer's time is the sum over its kernels. Residual compensation
at ratio r adds r K channels to the codes that are written and read, and r of the operations; no byte of any weight.
Emulated products take FP16 sums of activation and residual (quads_ops.backends.takes_sums): 2 bytes a
channel at every ratio, written by the quantizer and read; no operation more, and no dequantization but of weights. "two
products" is QUADS_EXACT_RESIDUAL=1, which multiplies codes twice.

Experts: uniform routing of T tokens to k of E experts touches E (1 - (1 - k/E)^T) of them on average; only their
weights are read. Each expert's tokens (binomially many) fill whole tiles of the size that kernels/configs.py chooses;
operations are counted for the padded rows.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path

from quads_kernels import configs
from quads_kernels.configs import Tile

RESULTS = Path(__file__).resolve().parent / "results"

TOKENS = (1, 16, 64, 256, 4096)
RATIOS = (0.25, 0.5, 1.0)
DECODE_TOKENS = 64
LIMITS = {0.5: 0.05, 1.0: 0.09}
"""Largest overhead at decode, by ratio."""

CODE = 0.5 + 1 / 16
"""Bytes of an NVFP4 element with its share of the block scale."""


@dataclass(frozen=True)
class Device:
    name: str
    bandwidth: float
    """Bytes a second."""
    peak: float
    """Operations a second in the tensor cores that multiply (a multiply-add is two)."""
    integer: float | None
    """32-bit integer instructions a second; None where codes go to the tensor core as they are."""
    capability: int
    processors: int
    two_products: bool = False
    """Of activation and residual apart, where the choice would be their sum."""

    @property
    def native(self) -> bool:
        return self.integer is None


# B200: NVIDIA DGX B200 data sheet, eight GPUs with 64 TB/s and 72 PFLOPS of dense FP4.
# H200: NVIDIA H200 data sheet (SXM): 4.8 TB/s, 1979 TFLOPS of FP16 with sparsity, half of it dense. Integer: CUDA
# programming guide, arithmetic instructions of compute capability 9.0, 64 a clock and multiprocessor for shifts and
# logic; 132 multiprocessors, at the clock that the FP16 peak implies (4096 operations a clock each).
B200 = Device("B200, native", 64e12 / 8, 72e15 / 8, None, 100, 148)
H200 = Device("H200, emulated", 4.8e12, 1979e12 / 2, 64 * 1979e12 / 2 / 4096, 90, 132)
H200_EXACT = replace(H200, name="H200, emulated, two products", two_products=True)
DEVICES = (B200, H200, H200_EXACT)

INSTRUCTIONS_PER_CODE = 2.0
"""Shifts and logic to dequantize one code in registers: two of each for two codes (kernels/gemm_tile.py)."""

INSTRUCTIONS_PER_CODE_FOR_SUMS = 1.5
"""For eight codes three shifts, four of logic, four of bytes and a conversion (kernels/gemm_sums_tile.py)."""


@dataclass(frozen=True)
class Model:
    hidden: int = 2048
    heads: int = 32
    kv_heads: int = 4
    head_dim: int = 128
    experts: int = 128
    topk: int = 8
    intermediate: int = 768


@dataclass(frozen=True)
class Kernel:
    """One launch."""

    name: str
    bytes: float
    operations: float = 0.0
    integer: float = 0.0


def touched(model: Model, tokens: int) -> float:
    """Expected number of different experts that `tokens` tokens are routed to, uniformly."""
    return model.experts * (1 - (1 - model.topk / model.experts) ** tokens)


def expected_blocks(tokens: int, share: float, block: int) -> float:
    """Expected blocks of one expert that gets each of `tokens` tokens with probability `share`."""
    log_odds = math.log(share) - math.log1p(-share)
    total, log_p = 0.0, tokens * math.log1p(-share)
    for count in range(tokens + 1):
        total += math.exp(log_p) * math.ceil(count / block)
        log_p += math.log((tokens - count) / (count + 1)) + log_odds if count < tokens else 0.0
    return total


def takes_sums(device: Device, ratio: float) -> bool:
    """Whether products take sums; see `quads_ops.backends.takes_sums`."""
    return not (device.native or (device.two_products and ratio))


def quantizer(name: str, rows: float, k: int, ratio: float, sums: bool, read_width: int = 1) -> Kernel:
    """Reads BF16 [rows, read_width * k], writes g, and codes, scales and the kept residual's, or sums."""
    written = 2 * k if sums else CODE * k * (1 + ratio)
    return Kernel(name, rows * (2 * read_width * k + written + 4))


def product(
    name: str,
    rows: float,
    blocks: float,
    matrices: float,
    n: int,
    k: int,
    ratio: float,
    out: int,
    tile: Tile,
    sums: bool,
) -> Kernel:
    """Reads `matrices` weights [n, k] and rows of codes or sums, writes `out` bytes for each of rows * n.

    blocks: of tokens, each padded to a whole tile. A tile dequantizes its weights for its tokens alone, and its tokens,
    where they are codes, for its weights alone.
    """
    padded = blocks * tile.tokens
    weights, product = matrices * n * k * CODE, 2.0 * padded * n * k
    if sums:
        dequantized = INSTRUCTIONS_PER_CODE_FOR_SUMS * blocks * n * k
        return Kernel(name, weights + rows * (2 * k + 4 + out * n), product, dequantized)
    dequantized = blocks * n * k + math.ceil(n / tile.weights) * padded * k * (1 + ratio)
    return Kernel(
        name,
        weights + rows * (k * CODE * (1 + ratio) + 4 + out * n),
        product * (1 + ratio),
        INSTRUCTIONS_PER_CODE * dequantized,
    )


def layer(model: Model, device: Device, tokens: int, ratio: float) -> list[Kernel]:
    """The launches of one layer's linear parts."""
    attention = model.heads * model.head_dim
    hidden, inner = model.hidden, model.intermediate
    pairs, active = tokens * model.topk, touched(model, tokens)
    where = (device.capability, device.native)
    sums = takes_sums(device, ratio)

    def dense(name: str, n: int, k: int) -> Kernel:
        tile = configs.choose_dense(*where, tokens, n, k, device.processors, sums=sums)
        return product(name, tokens, math.ceil(tokens / tile.tokens), 1, n, k, ratio, 2, tile, sums)

    routed = configs.choose_grouped(*where, pairs, model.experts, 2 * inner, hidden, device.processors, sums=sums)
    blocks = model.experts * expected_blocks(tokens, model.topk / model.experts, routed.tokens)
    return [
        quantizer("quantize q|k|v input", tokens, hidden, ratio, sums),
        dense("q|k|v", attention + 2 * model.kv_heads * model.head_dim, hidden),
        quantizer("quantize o input", tokens, attention, ratio, sums),
        dense("o", hidden, attention),
        quantizer("quantize experts' input", tokens, hidden, ratio, sums),
        product("experts gate|up", pairs, blocks, active, 2 * inner, hidden, ratio, 2, routed, sums),
        quantizer("SwiGLU, quantize", pairs, inner, ratio, sums, read_width=2),
        product("experts down", pairs, blocks, active, hidden, inner, ratio, 4, routed, sums),
        Kernel("add experts", pairs * 4 * hidden + tokens * 2 * hidden),
    ]


def seconds(kernel: Kernel, device: Device) -> float:
    """Roofline time of one launch."""
    times = [kernel.bytes / device.bandwidth, kernel.operations / device.peak]
    if device.integer is not None:
        times.append(kernel.integer / device.integer)
    return max(times)


def bound(kernel: Kernel, device: Device) -> str:
    """What a launch waits for."""
    times = {"memory": kernel.bytes / device.bandwidth, "tensor cores": kernel.operations / device.peak}
    if device.integer is not None:
        times["dequantization"] = kernel.integer / device.integer
    return max(times, key=times.get)


def total(kernels: list[Kernel], device: Device) -> float:
    return sum(seconds(kernel, device) for kernel in kernels)


def overhead(model: Model, device: Device, tokens: int, ratio: float) -> float:
    """Share by which compensation lengthens the linear parts of a layer."""
    return total(layer(model, device, tokens, ratio), device) / total(layer(model, device, tokens, 0.0), device) - 1


def above_limits(model: Model, device: Device) -> list[str]:
    """Where the overhead at decode exceeds the goal."""
    return [
        f"{tokens} tokens, ratio {ratio:g}: {overhead(model, device, tokens, ratio):.1%}, goal {limit:.0%}"
        for ratio, limit in LIMITS.items()
        for tokens in TOKENS
        if tokens <= DECODE_TOKENS and overhead(model, device, tokens, ratio) > limit
    ]


def report(model: Model) -> str:
    lines = [
        "# Counted cost of residual compensation",
        "",
        "By `python benchmarks/cost_model.py` (the formula is in its first lines). Counted and computed, not measured:",
        "no kernel was timed for this table. One layer of Qwen3-30B-A3B, linear parts only.",
        "",
        "## Bytes and operations (tiles of B200)",
        "",
        "| tokens | experts touched | ratio | bytes (MB) | weights' share | operations (G) | bytes + | operations + |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for tokens in TOKENS:
        plain = layer(model, B200, tokens, 0.0)
        for ratio in (0.0, *RATIOS):
            lines.append(_count_row(model, tokens, ratio, plain))
    for device in DEVICES:
        lines += ["", f"## {device.name}", ""]
        lines += [
            f"{device.bandwidth / 1e12:g} TB/s, {device.peak / 1e12:g} T operations/s. Roofline time of one layer."
        ]
        lines += ["", "| tokens | plain (us) | " + " | ".join(f"ratio {ratio:g}" for ratio in RATIOS) + " | bound by |"]
        lines += ["|---|---|" + "---|" * len(RATIOS) + "---|"]
        lines += [_time_row(model, device, tokens) for tokens in TOKENS]
        lines += ["", _verdict(model, device)]
    return "\n".join(lines) + "\n"


def _count_row(model: Model, tokens: int, ratio: float, plain: list[Kernel]) -> str:
    kernels = layer(model, B200, tokens, ratio)
    moved, done = sum(kernel.bytes for kernel in kernels), sum(kernel.operations for kernel in kernels)
    more = moved / sum(kernel.bytes for kernel in plain) - 1, done / sum(kernel.operations for kernel in plain) - 1
    qkv = (model.heads + 2 * model.kv_heads) * model.head_dim
    dense = (qkv + model.heads * model.head_dim) * model.hidden
    weights = CODE * (dense + touched(model, tokens) * 3 * model.intermediate * model.hidden)
    return (
        f"| {tokens} | {touched(model, tokens):.1f} | {ratio:g} | {moved / 1e6:.2f} | {weights / moved:.0%} | "
        f"{done / 1e9:.2f} | {more[0]:.1%} | {more[1]:.0%} |"
    )


def _time_row(model: Model, device: Device, tokens: int) -> str:
    plain = layer(model, device, tokens, 0.0)
    times = {}
    for kernel in plain:
        name = bound(kernel, device)
        times[name] = times.get(name, 0.0) + seconds(kernel, device)
    shares = ", ".join(f"{name} {time / total(plain, device):.0%}" for name, time in sorted(times.items()))
    cells = [f"+{overhead(model, device, tokens, ratio):.1%}" for ratio in RATIOS]
    return f"| {tokens} | {total(plain, device) * 1e6:.1f} | " + " | ".join(cells) + f" | {shares} |"


def _verdict(model: Model, device: Device) -> str:
    goals = ", ".join(f"{limit:.0%} at ratio {ratio:g}" for ratio, limit in LIMITS.items())
    above = above_limits(model, device)
    if not above:
        return f"The goal for decoding (up to {DECODE_TOKENS} tokens: {goals}) is met by count."
    return f"The goal for decoding (up to {DECODE_TOKENS} tokens: {goals}) is not met: " + "; ".join(above) + "."


def main() -> None:
    text = report(Model())
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "cost_model.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
