"""Count the instructions that the quantizers execute per element, from what they compile to. Nothing is run.

    python benchmarks/instruction_count.py                     the whole-row quantizers, for every architecture
    ... --targets 90 --only "K=2048"                           some of them
    ... --only "K=2048 kept=128" --targets 90 --opcodes        and which instructions they are

A kernel is compiled for a GPU, disassembled, and the instructions that a thread executes are counted once each: a loop
over rows makes one pass, and the slow path of a division (a call) is left out. That number times the threads, divided
by the elements of a program, is the count per element; elements of padding are paid for and not counted.

On Hopper and Blackwell a multiprocessor starts 128 instructions a clock (lanes times warps), but integer, logic,
comparing and converting ones at half that rate (`alu`), integer products too (`imad`). So an element takes at least
max(all, 2 * alu, 2 * imad) lanes' clocks: `bound`. `of copy` is what that leaves of a copy's bandwidth on an H200, if
nothing else costs time (132 multiprocessors at 1.75 GHz; a copy reaches 92% of 4.8 TB/s); shown for sm_90 only.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))
import compile_report  # noqa: E402

TARGETS = (90, 100, 120)
CLOCKS_PER_S = 132 * 128 * 1.75e9
"""Lanes of an H200 times its clock."""
COPY_BYTES_PER_S = 0.92 * 4.8e12

INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P[T0-9]+\s+)?([A-Z][A-Z0-9_.]*)")
PIPES = (
    ("fma", r"F(ADD|MUL|FMA)2?(32I)?|H(ADD|MUL|FMA)2.*"),
    ("imad", r"IMAD.*|IDP.*"),
    ("memory", r"LD.*|ST.*|SHFL|RED.*|ATOM.*|MUFU|BAR|F2F|F2I|I2F|S2.*|CS2R|R2UR|ELECT|SYNCS|CCTL"),
    ("control", r"BRA|BRX|BSSY|BSYNC|EXIT|CALL|RET|WARPSYNC|NOP|DEPBAR|YIELD|BREAK|ACQ.*|ERRBAR|MEMBAR|FENCE|PREEXIT"),
    ("uniform", r"U.*|R2UR"),
)
"""The first that matches the opcode's first part; everything else is `alu`."""


class Count(NamedTuple):
    """What one variant executes per element."""

    kernel: str
    target: int
    opcodes: Counter
    """First part of an opcode -> how many a thread executes."""
    elements: float
    """Elements of a program per thread, without padding."""
    bytes: float
    """Read and written per element."""

    def pipe(self, name: str) -> float:
        return sum(n for opcode, n in self.opcodes.items() if pipe_of(opcode) == name) / self.elements

    @property
    def all(self) -> float:
        return self.opcodes.total() / self.elements

    @property
    def bound(self) -> float:
        return max(self.all, 2 * self.pipe("alu"), 2 * self.pipe("imad"))

    @property
    def of_copy(self) -> float:
        """Bandwidth of an H200 at `bound`, over that of a copy; more than 1 is as fast as a copy."""
        return (self.bytes / COPY_BYTES_PER_S) / (self.bound / CLOCKS_PER_S)


def pipe_of(opcode: str) -> str:
    return next((name for name, pattern in PIPES if re.fullmatch(pattern, opcode)), "alu")


def executed(sass: str) -> Counter:
    """Opcodes that a thread executes: blocks with a call (slow paths) and what follows the kernel are left out."""
    body = re.split(r"^\.text\..*:$", sass, maxsplit=1, flags=re.MULTILINE)[1]
    body = re.split(
        r"^\s*\.type\s.*@function|^\.L_x_\d+:\n.*BRA `\(\.L_x_\d+\);$", body, maxsplit=1, flags=re.MULTILINE
    )[0]
    counts, block = Counter(), Counter()
    for line in [*body.splitlines(), ".end:"]:
        found = INSTRUCTION.match(line)
        if found:
            block[found[1].split(".")[0]] += 1
        if line.startswith(".") or (found and re.match("BRA|EXIT|RET", found[1])):
            if not block.keys() & {"CALL", "RET"}:
                counts += block
            block = Counter()
    del counts["NOP"]
    return counts


def disassembled(cubin: bytes) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True).stdout


def count(variant, target: int, elements: int, moved: float) -> Count:
    """elements: of a program, without padding. moved: bytes per element."""
    sass = disassembled(compile_report._compile(variant, target).asm["cubin"])
    return Count(variant.name, target, executed(sass), elements / (32 * variant.warps), moved)


def sizes(variant) -> tuple[int, float] | None:
    """(elements of a program, bytes moved per element) of a quantizer of whole rows or of weights; None for others.

    K of an activation stands in the variant's name.
    """
    constants, types = variant.constants, variant.types
    if variant.name == "weight | decode":
        return constants["ROWS"] * constants["BLOCKS"] * 16, WIDTH["packed_ptr"] + WIDTH["scales_ptr"] + 2
    if variant.name.startswith("weight"):
        return constants["ROWS"] * constants["BLOCKS"] * 16, _moved(types, "w_ptr", 1.0, 1.0)
    shape = re.search(r"K=(\d+)", variant.name)
    if "KEPT_TILE" not in constants or shape is None:
        return None
    k = int(shape[1])
    kept = int(re.search(r"kept=(\d+)", variant.name + f" kept={k // 16}")[1])
    read = 2.0 if constants["SWIGLU"] else 1.0
    return constants["R"] * k, _moved(types, "x_ptr", read, kept * 16 / k)


WIDTH = {"packed_ptr": 0.5, "scales_ptr": 1 / 16, "residual_packed_ptr": 0.5, "residual_scales_ptr": 1 / 16}


def _moved(types: dict[str, str], source: str, read: float, kept: float) -> float:
    width = {"*bf16": 2.0, "*fp16": 2.0, "*fp32": 4.0}
    total = read * width[types[source]]
    for name in types:
        if name in ("values_ptr", "sums_ptr"):
            total += width[types[name]]
        elif name.endswith(("packed_ptr", "scales_ptr")):
            total += WIDTH[name] * (kept if name.startswith("residual") else 1.0)
    return total


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", type=int, nargs="+", default=TARGETS, choices=compile_report.TARGETS)
    parser.add_argument("--only", default="", help="only variants whose name contains this")
    parser.add_argument("--opcodes", action="store_true", help="also each opcode's number per element")
    options = parser.parse_args(arguments)
    from quads_kernels import variants_quant

    print("| kernel | target | all | fma | imad | alu | memory | other | bound | of copy |")
    print("|" + "---|" * 10)
    for target in options.targets:
        for variant in variants_quant.variants(target):
            known = sizes(variant)
            if known is None or options.only not in variant.name:
                continue
            found = count(variant, target, *known)
            pipes = [found.pipe(name) for name in ("fma", "imad", "alu", "memory")]
            numbers = " | ".join(f"{n:.1f}" for n in (found.all, *pipes, found.all - sum(pipes), found.bound))
            share = f"{min(found.of_copy, 1.0):.0%}" if target == 90 else "-"
            print(f"| {found.kernel.replace(' | ', ', ')} | sm_{target} | {numbers} | {share} |", flush=True)
            if options.opcodes:
                print("  ", ", ".join(f"{name} {n / found.elements:.2f}" for name, n in found.opcodes.most_common()))
    return 0


if __name__ == "__main__":
    # Before Triton is imported.
    os.environ.setdefault("TRITON_CACHE_DIR", str(compile_report.CACHE))
    sys.exit(main(sys.argv[1:]))
