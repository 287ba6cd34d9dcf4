"""Compile every kernel variant for every architecture, without a GPU, and check what came out.

    python benchmarks/compile_report.py             compile, write benchmarks/results/kernels.{md,csv}
    python benchmarks/compile_report.py --check     compile, compare with the committed table, write nothing
    ... --results benchmarks/results/triton-3.6     another folder: the table belongs to one version of Triton

Checked: a variant that claims NVFP4 tensor cores has their instruction in its PTX; no local memory (spills); tensor
memory and shared memory within the architecture's limits; no `trap` (Triton 3.6 to 3.9 compile a tile that exceeds
tensor memory to a lone trap, without an error). Exit code 1 on any violation. Nothing is executed: that a kernel
compiles says nothing about its speed, and about its results only what the instruction's definition says.
"""

import argparse
import csv
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "quads" / "triton"
RESULTS = Path(__file__).resolve().parent / "results"
TARGETS = (90, 100, 103, 120)
OTHER_TARGETS = (80,)
"""Compiled when asked for, and not in the committed table."""
TENSOR_MEMORY_COLUMNS = 512
SHARED_MEMORY = {80: 166912, 90: 232448, 100: 232448, 103: 232448, 120: 101376}
"""Bytes a block may have (CUDA programming guide, table of technical specifications per compute capability)."""

# The first that matches is what the kernel multiplies with, or, a quantizer, converts with.
INSTRUCTIONS = (
    ("tcgen05 mxf4nvf4", r"tcgen05\.mma[^;]*kind::mxf4nvf4"),
    ("mma.sync mxf4nvf4", r"mma\.sync[^;]*mxf4nvf4"),
    ("tcgen05 f16", r"tcgen05\.mma[^;]*kind::f16"),
    ("tcgen05 other", r"tcgen05\.mma"),
    ("wgmma f16", r"wgmma\.mma_async[^;]*f32\.f16\.f16"),
    ("wgmma other", r"wgmma\.mma_async"),
    ("mma.sync f16", r"mma\.sync[^;]*f32\.f16\.f16\.f32"),
    ("mma.sync other", r"mma\.sync"),
    ("cvt e2m1", r"cvt\.rn\.satfinite\.e2m1x2"),
)
COMPARED = ("instruction", "local_bytes", "tensor_memory")


@dataclass
class Row:
    """What one variant became on one target."""

    kernel: str
    target: int
    native: bool
    instruction: str = "-"
    registers: int = 0
    local_bytes: int = 0
    """Local memory of a thread: spills, which are not wanted."""
    shared_bytes: int = 0
    tensor_memory: int = 0
    """Columns, of 512."""
    trap: bool = False
    problem: str = ""


def instruction_in(ptx: str) -> str:
    """The matrix instruction of a kernel, or a quantizer's conversion to E2M1; "-" if it has neither."""
    return next((name for name, pattern in INSTRUCTIONS if re.search(pattern, ptx)), "-")


def problem_of(row: Row) -> str:
    """What is wrong with a compiled variant; empty if nothing is."""
    found = []
    if row.native and "mxf4nvf4" not in row.instruction:
        found.append(f"claims native but multiplies with {row.instruction}")
    if not row.native and "other" in row.instruction:
        found.append(f"multiplies with {row.instruction}, which is not FP16")
    if row.trap:
        found.append("compiled to a trap")
    if row.local_bytes:
        found.append(f"{row.local_bytes} bytes of local memory (spills)")
    if row.tensor_memory > TENSOR_MEMORY_COLUMNS:
        found.append(f"{row.tensor_memory} columns of tensor memory, of {TENSOR_MEMORY_COLUMNS}")
    if row.shared_bytes > SHARED_MEMORY[row.target]:
        found.append(f"{row.shared_bytes} bytes of shared memory, of {SHARED_MEMORY[row.target]}")
    return "; ".join(found)


def all_variants(target: int) -> list:
    """Every variant of every kernel for a target."""
    from quads_kernels import variants_gemm, variants_quant

    return variants_gemm.variants(target) + variants_quant.variants(target)


def compile_one(name: str, target: int) -> Row:
    """`inspect` by name: a worker process cannot be handed a kernel."""
    return inspect(next(variant for variant in all_variants(target) if variant.name == name), target)


def inspect(variant, target: int) -> Row:
    """Compile a variant and write down what it became, problems included."""
    row = Row(variant.name, target, variant.native)
    try:
        compiled = _compile(variant, target)
    except Exception as error:  # a compiler reports its failures in many ways; each is one violation
        row.problem = f"does not compile: {type(error).__name__}: {str(error).strip().splitlines()[-1][:200]}"
        return row
    ptx = compiled.asm["ptx"]
    row.instruction = instruction_in(ptx)
    row.trap = re.search(r"\btrap;", ptx) is not None
    row.shared_bytes = compiled.metadata.shared
    row.tensor_memory = getattr(compiled.metadata, "tmem_size", 0)
    row.registers, row.local_bytes = _resources(compiled.asm["cubin"])
    row.problem = problem_of(row)
    return row


def _compile(variant, target: int):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = variant.kernel.arg_names
    missing = set(names) ^ (variant.types.keys() | variant.constants.keys())
    if missing:
        raise TypeError(f"arguments do not match the kernel's: {sorted(missing)}")
    signature = {name: variant.types.get(name, "constexpr") for name in names}
    aligned = [i for i, name in enumerate(names) if signature[name][0] == "*" or name in variant.aligned]
    source = ASTSource(
        fn=variant.kernel,
        signature=signature,
        constexprs=variant.constants,
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    options = dict(num_warps=variant.warps, num_stages=variant.stages, enable_fp_fusion=False)
    if variant.registers is not None:
        options["maxnreg"] = variant.registers
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)


def _resources(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of local memory) of a thread, as ptxas wrote them into the binary."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    usage = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", text))
    return int(usage["REG"]), int(usage["STACK"]) + int(usage["LOCAL"])


def compile_all(targets: list[int], only: str, jobs: int) -> list[Row]:
    """Compile all variants whose name contains `only`, `jobs` at a time."""
    work = [(variant.name, target) for target in targets for variant in all_variants(target) if only in variant.name]
    _check_unique(work)
    # Triton is imported by now, and forking after it is not safe.
    rows = []
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for row in pool.map(compile_one, *zip(*work, strict=True)) if work else ():
            rows.append(row)
            print(f"\r{len(rows)}/{len(work)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return rows


def differences(rows: list[Row], committed: list[dict[str, str]]) -> list[str]:
    """Where the compiled variants differ from the committed table: instruction, spills, tensor memory."""
    known = {(line["kernel"], line["target"]): line for line in committed}
    found = []
    for row in rows:
        line = known.pop((row.kernel, str(row.target)), None)
        if line is None:
            found.append(f"sm_{row.target} {row.kernel}: not in the committed table")
            continue
        for name in COMPARED:
            if line[name] != str(getattr(row, name)):
                found.append(f"sm_{row.target} {row.kernel}: {name} {line[name]} -> {getattr(row, name)}")
    return found + [f"sm_{target} {kernel}: in the committed table only" for kernel, target in known]


def read_table(path: Path) -> tuple[str, list[dict[str, str]]]:
    """(Triton version, rows) of a committed CSV."""
    with path.open() as file:
        lines = list(csv.DictReader(file))
    return lines[0]["triton"], lines


def write_table(rows: list[Row], version: str, directory: Path) -> None:
    """Write kernels.csv and kernels.md."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "kernels.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["triton", *(field.name for field in fields(Row))], lineterminator="\n")
        writer.writeheader()
        writer.writerows({"triton": version, **asdict(row)} for row in rows)
    (directory / "kernels.md").write_text(markdown(rows, version))


def markdown(rows: list[Row], version: str) -> str:
    """The table for people: one section per target."""
    lines = [
        "# Kernels, compiled and inspected",
        "",
        f"Triton {version}, by `python benchmarks/compile_report.py`. Nothing here was run on a GPU.",
        "`local` is local memory of a thread in bytes (spills), `TMEM` tensor memory in columns (of 512).",
    ]
    for target in sorted({row.target for row in rows}):
        lines += ["", f"## sm_{target}", "", "| kernel | instruction | registers | local | shared | TMEM | problem |"]
        lines += ["|---|---|---|---|---|---|---|"]
        for row in (row for row in rows if row.target == target):
            name = row.kernel.replace(" | ", ", ").replace("|", "\\|")  # gate|up
            numbers = f"{row.registers} | {row.local_bytes} | {row.shared_bytes} | {row.tensor_memory}"
            lines.append(f"| {name} | {row.instruction} | {numbers} | {row.problem or '-'} |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the committed table, write nothing")
    parser.add_argument("--targets", type=int, nargs="+", default=TARGETS, choices=TARGETS + OTHER_TARGETS)
    parser.add_argument("--only", default="", help="only variants whose name contains this; writes nothing")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the table is or goes")
    options = parser.parse_args(arguments)
    import triton

    started = time.monotonic()
    rows = compile_all(list(options.targets), options.only, options.jobs)
    bad = [f"sm_{row.target} {row.kernel}: {row.problem}" for row in rows if row.problem]
    whole = tuple(options.targets) == TARGETS and not options.only
    if options.check:
        version, committed = read_table(options.results / "kernels.csv")
        if version != triton.__version__:
            print(f"the committed table was made with Triton {version}, this is {triton.__version__}: install that one")
            return 2
        shown = {(row.kernel, str(row.target)) for row in rows}
        bad += differences(rows, [line for line in committed if whole or (line["kernel"], line["target"]) in shown])
    elif whole and not bad:
        write_table(rows, triton.__version__, options.results)
    else:
        print(markdown(rows, triton.__version__))
    print(*bad, sep="\n")
    print(
        f"{len(rows)} variants, {len(bad)} violations, {time.monotonic() - started:.0f} s, Triton {triton.__version__}"
    )
    return 1 if bad else 0


def _check_unique(work: list[tuple[str, int]]) -> None:
    doubled = {item for item in work if work.count(item) > 1}
    if doubled:
        raise ValueError(f"variants must have different names: {sorted(doubled)}")


if __name__ == "__main__":
    # Before Triton is imported, here and in the worker processes.
    os.environ.setdefault("TRITON_CACHE_DIR", str(CACHE))
    sys.exit(main(sys.argv[1:]))
