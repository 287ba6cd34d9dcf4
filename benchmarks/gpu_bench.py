"""Time the kernels on the GPU at hand, against a copy, torch's BF16, and vLLM's FP8 and NVFP4 operators.

    python benchmarks/gpu_bench.py                    check, time, append to benchmarks/results/gpu.csv
    python benchmarks/gpu_bench.py --minutes 9        the same, ended in time: what is left out is named
    python benchmarks/gpu_bench.py --tune             time every candidate tile first, and keep the winners
    python benchmarks/gpu_bench.py --only linear --tokens 16 4096

Nothing is timed unless the correctness check (benchmarks/gpu_check.py) passed in the same process. Times are medians of
triton.testing.do_bench, which clears the L2 cache between runs; what can be captured is replayed from a CUDA graph, so
that the host is not timed. Shapes are those of Qwen3-30B-A3B. Rows carry GPU, versions and commit, and are only added,
each as soon as it is known. Most of the time goes into compiling, which Triton's cache spares the next run.
"""

import argparse
import csv
import datetime
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

RESULTS = Path(__file__).resolve().parent / "results" / "gpu.csv"
TOKENS = (4096, 16, 64, 1, 1024, 256)
"""What the goals need comes first, in case the time ends."""
LINEARS = {"qkv": (5120, 2048), "o": (2048, 4096)}
"""(N, K)"""
EXPERTS = dict(count=128, topk=8, hidden=2048, inner=768)
SUBJECTS = ("quantizer", "linear", "experts")
QUANTIZER_GOAL, GEMM_GOAL, RESIDUAL_GOAL = 0.8, 0.6, 0.09


@dataclass
class Timing:
    """One line of the CSV."""

    time: str
    commit: str
    gpu: str
    capability: int
    torch: str
    triton: str
    vllm: str
    subject: str
    """quantizer, linear or experts"""
    shape: str
    tokens: int
    provider: str
    ratio: str
    """Of channels whose residual is kept; empty where there is no such thing."""
    captured: bool
    """Replayed from a CUDA graph."""
    median_us: float
    p20_us: float
    p80_us: float
    gb_per_s: float
    """0 where bytes were not counted."""
    tflops: float
    copy_gb_per_s: float
    """Bandwidth of a copy of 1 GiB, measured in the same run: read plus written bytes."""


class Case(NamedTuple):
    """Providers that are compared with each other, made when their turn comes."""

    subject: str
    shape: str
    tokens: int
    make: Callable[[], dict]

    def __str__(self) -> str:
        return f"{self.subject} {self.shape}, {self.tokens} tokens"


def main(arguments: list[str]) -> int:
    started = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("emulated", "native"), help="by default the best that this GPU has")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--only", choices=SUBJECTS, nargs="+", default=SUBJECTS)
    parser.add_argument("--tune", action="store_true", help="time all candidate tiles and keep the winners")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin nothing new after so long")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("gpu_bench needs a CUDA GPU; torch sees none. Nothing was timed.", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    backend = options.backend or ("native" if torch.cuda.get_device_capability(device)[0] >= 10 else "emulated")
    if not passes(device, backend):
        return 1
    if options.tune:
        tune(device, backend, options.tokens)
    facts, timings, left = environment(device), [], []
    found = cases(device, backend, options.only, options.tokens)
    for timing in measure(device, found, facts, started + 60 * options.minutes, left):
        timings.append(timing)
        append(options.out, [timing])
        name = f"{timing.subject:9} {timing.shape:14} {timing.tokens:5} {timing.provider:40}"
        print(f"{name} {timing.median_us:9.1f} us", flush=True)
    print(*goals(timings), sep="\n")
    print(f"{len(timings)} lines added to {options.out}, {time.monotonic() - started:.0f} s")
    if left:
        print(f"out of time (--minutes {options.minutes:g}), not timed: {'; '.join(map(str, left))}")
    return 0


def passes(device: torch.device, backend: str) -> bool:
    """Run the correctness check; print what it found."""
    import gpu_check

    try:
        for line in gpu_check.verify(device, backend):
            print(line, flush=True)
    except gpu_check.CheckFailed as error:
        print(f"the correctness check failed, nothing was timed: {error}", file=sys.stderr)
        return False
    return True


def measure(
    device: torch.device, found: list[Case], facts: dict, deadline: float, left: list[Case]
) -> Iterator[Timing]:
    """Time every provider of every case; cases that would begin after the deadline (time.monotonic) go to `left`.

    Where a competitor fails, that is said, and it is left out; a failure of this project's own is raised.
    """
    copy = copy_bandwidth(device)
    for case in found:
        if time.monotonic() > deadline:
            left.append(case)
            continue
        for name, provider in case.make().items():
            try:
                median, p20, p80, captured = time_us(provider.run)
            except Exception as error:
                if name.startswith("quads"):
                    raise
                print(f"not timed, {name} ({case}): {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                continue
            yield Timing(
                **facts, subject=case.subject, shape=case.shape, tokens=case.tokens, provider=name,
                ratio="" if provider.ratio is None else f"{provider.ratio:g}", captured=captured,
                median_us=round(median, 3), p20_us=round(p20, 3), p80_us=round(p80, 3),
                gb_per_s=round(provider.bytes / median / 1e3, 1), tflops=round(provider.operations / median / 1e6, 2),
                copy_gb_per_s=round(copy, 1),
            )  # fmt: skip


def cases(device: torch.device, backend: str, subjects, token_counts) -> list[Case]:
    """Everything there is to time, in order."""
    import gpu_providers as make

    where = dict(device=device, backend=backend)
    found = [
        Case("quantizer", f"weight {n}x{k}", 0, partial(make.weight_quantizers, n, k, device))
        for n, k in LINEARS.values()
    ]
    for tokens in token_counts:
        found += [
            Case("quantizer", f"K={k}", tokens, partial(make.quantizers, tokens, k, device)) for k in (2048, 4096)
        ]
        found += [
            Case("linear", shape, tokens, partial(make.linears, tokens, n, k, **where))
            for shape, (n, k) in LINEARS.items()
        ]
        found.append(Case("experts", "128 of 768", tokens, partial(make.experts, tokens, **EXPERTS, **where)))
    return [case for case in found if case.subject in subjects]


def time_us(run) -> tuple[float, float, float, bool]:
    """(median, 20%, 80%) in microseconds, and whether it was replayed from a CUDA graph."""
    from triton.testing import do_bench

    run()
    torch.cuda.synchronize()
    graph = capture(run)
    times = do_bench(graph.replay if graph else run, quantiles=[0.5, 0.2, 0.8])
    return *(1e3 * t for t in times), graph is not None


def capture(run):
    """A CUDA graph of run(), or None where it cannot be captured."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run()
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    return graph


def copy_bandwidth(device: torch.device) -> float:
    """GB/s, read plus written, of a device-to-device copy of 1 GiB."""
    source = torch.empty(2**30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    median = time_us(lambda: target.copy_(source))[0]
    return 2 * source.numel() / median / 1e3


def tune(device: torch.device, backend: str, token_counts) -> None:
    """Time the candidate tiles of every product, and keep the winners in the user's cache."""
    import gpu_providers

    from quads_kernels import activation, configs
    from quads_kernels.gemm import w4a4_gemm
    from quads_kernels.launch import capability

    native, gpu, winners = backend == "native", torch.cuda.get_device_name(device), {}
    for tokens in token_counts:
        for n, k in LINEARS.values():
            weight = gpu_providers.random_weight(n, k, device=device)
            sums = not native  # the form that is chosen
            quantize = gpu_providers.quantized_sums if sums else activation.quantize
            rows = quantize(gpu_providers.activations(tokens, k, device), kept=k // 32)
            options = dict(out_dtype=torch.bfloat16, native=native)
            times = {
                tile: time_us(lambda tile=tile: w4a4_gemm(rows, weight, tile=tile, **options))[0]  # noqa: B023
                for tile in configs.dense_candidates(capability(device), native, tokens, sums)
            }
            winners[configs.dense_key(native, tokens, n, k, sums)] = min(times, key=times.get)
        winners |= _tune_experts(device, native, tokens)
    print(f"tuned {len(winners)} products: {configs.save_tuned(gpu, winners)}")


def _tune_experts(device: torch.device, native: bool, tokens: int) -> dict:
    import gpu_providers

    from quads_kernels import activation, configs, moe
    from quads_kernels.launch import capability

    count, topk, hidden, inner = (EXPERTS[name] for name in ("count", "topk", "hidden", "inner"))
    w13 = gpu_providers.random_weight(count, 2 * inner, hidden, device=device)
    w2 = gpu_providers.random_weight(count, hidden, inner, device=device)
    sums = not native
    quantize = gpu_providers.quantized_sums if sums else activation.quantize
    rows = quantize(gpu_providers.activations(tokens, hidden, device), kept=hidden // 32)
    ids = torch.rand(tokens, count, device=device).topk(topk).indices.int()
    weights = torch.rand(tokens, topk, device=device)
    options = dict(native=native, out_dtype=torch.bfloat16, hidden_dtype=torch.bfloat16)
    half = moe.HiddenResidual(inner // 32)
    times = {
        tile: time_us(lambda tile=tile: moe.fused_moe(rows, w13, w2, weights, ids, hidden=half, tile=tile, **options))[
            0
        ]
        for tile in configs.grouped_candidates(capability(device), native, tokens * topk, count, sums)
    }
    return {configs.grouped_key(native, tokens * topk, count, 2 * inner, hidden, sums): min(times, key=times.get)}


def goals(timings: list[Timing]) -> list[str]:
    """How the goals of the kernels fare, one line each."""
    found = {(t.subject, t.shape, t.tokens, t.provider): t for t in timings}
    lines = []
    for (subject, shape, tokens, provider), timing in found.items():
        # A weight has no tokens. Fewer than 1024 are no matter of bandwidth.
        if subject == "quantizer" and (shape.startswith("weight") or tokens >= 1024) and provider.startswith("quads"):
            share = timing.gb_per_s / timing.copy_gb_per_s
            lines.append(_goal(f"{provider}, {shape}, {tokens} tokens: {share:.0%} of a copy", share >= QUANTIZER_GOAL))
        bf16 = found.get((subject, shape, tokens, "torch bf16"))
        if subject == "linear" and tokens == 4096 and provider.startswith("quads gemm") and bf16:
            share = bf16.median_us / timing.median_us
            lines.append(_goal(f"{provider}, {shape}, {tokens} tokens: {share:.2f} of torch bf16", share >= GEMM_GOAL))
        plain = found.get((subject, shape, tokens, provider.replace("ratio 0.5", "ratio 0")))
        if "ratio 0.5" in provider and plain and subject != "quantizer":
            more = timing.median_us / plain.median_us - 1
            lines.append(
                _goal(f"{provider}, {shape}, {tokens} tokens: {more:+.1%} over ratio 0", more <= RESIDUAL_GOAL)
            )
    return lines


def environment(device: torch.device) -> dict:
    """GPU, versions and commit, as fields of a Timing."""
    import triton

    major, minor = torch.cuda.get_device_capability(device)
    return dict(
        time=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        commit=commit(),
        gpu=torch.cuda.get_device_name(device),
        capability=10 * major + minor,
        torch=torch.__version__,
        triton=triton.__version__,
        vllm=_version_of("vllm"),
    )


def commit() -> str:
    """The commit of this checkout, with "+" where kernels or operators were changed since."""
    root = Path(__file__).resolve().parent.parent
    run = lambda *command: subprocess.run(  # noqa: E731
        ("git", *command), cwd=root, capture_output=True, text=True, check=False
    ).stdout.strip()
    head = run("rev-parse", "--short=12", "HEAD") or "unknown"  # a copy without its history
    return head + ("+" if run("status", "--short", "kernels", "quads_ops") else "")


def append(path: Path, timings: list[Timing]) -> None:
    """Add lines; refuse a file with other columns."""
    columns = [field.name for field in fields(Timing)]
    new = not path.exists()
    if not new:
        with path.open() as file:
            header = next(csv.reader(file), [])
        if header != columns:
            raise ValueError(f"{path} has columns {header}, this version writes {columns}; give another --out")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(asdict(timing) for timing in timings)


def _goal(text: str, met: bool) -> str:
    return f"{'met' if met else 'MISSED':7} {text}"


def _version_of(package: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
