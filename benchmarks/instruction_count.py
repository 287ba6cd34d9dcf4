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

INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]+)\*/\s+(?:@(!?U?P[T0-9]+)\s+)?([A-Z][A-Z0-9_.]*)\s*([^;]*);")
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
    counts, block = Counter(), Counter()
    slow = False
    for line in sass.splitlines():
        label = re.match(r"^\.L_x_\d+:|^\$__internal|^\s*\.type.*@function", line)
        if label and not line.startswith(".L_x"):
            break  # a function that a slow path calls
        found = INSTRUCTION.match(line)
        if label or found is None:
            if label:
                counts, block, slow = counts + (Counter() if slow else block), Counter(), False
            continue
        _, predicate, opcode, operands = found.groups()
        name = opcode.split(".")[0]
        if name in ("CALL", "RET"):
            slow = True
        elif name != "NOP":
            block[name] += 1
        if name in ("BRA", "EXIT", "RET"):
            counts, block, slow = counts + (Counter() if slow else block), Counter(), False
    return counts + (Counter() if slow else block)
