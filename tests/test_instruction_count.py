"""The count of instructions: what it takes from a disassembly, on a made-up one and on a real kernel."""

import importlib.util
import sys
from pathlib import Path

import pytest

from quads_kernels import variants_quant

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"

SASS = """
        .type           kernel,@function
.text.kernel:
        /*0000*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0010*/              @!P0 BRA `(.L_x_0) ;
        /*0020*/                   MOV R9, 0x40 ;
        /*0030*/                   CALL.REL.NOINC `($__internal_0_$__slowpath) ;
.L_x_0:
        /*0040*/                   FFMA.FTZ R4, R5, R6, R7 ;
        /*0050*/                   IMAD.U32 R8, R4, 0x10000, RZ ;
        /*0060*/               @P1 LOP3.LUT R8, R8, 0x1, RZ, 0xc0, !PT ;
        /*0070*/                   ULDC.64 UR4, c[0x0][0x208] ;
        /*0080*/                   NOP ;
        /*0090*/                   EXIT ;
        .type           $__internal_0_$__slowpath,@function
$__internal_0_$__slowpath:
        /*00a0*/                   FADD R1, R1, R2 ;
        /*00b0*/                   RET.REL.NODEC R6 `(kernel) ;
"""


@pytest.fixture(scope="module")
def counter():
    modules = ("compile_report", "instruction_count")
    for name in modules:
        spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    yield module
    for name in modules:
        del sys.modules[name]


def test_slow_paths_and_padding_are_not_executed(counter):
    found = counter.executed(SASS)
    assert found == {"LDG": 1, "BRA": 1, "FFMA": 1, "IMAD": 1, "LOP3": 1, "ULDC": 1, "EXIT": 1}
    count = counter.Count("kernel", 90, found, 2.0, 2.5)
    assert {name: count.pipe(name) for name in ("fma", "imad", "alu", "memory", "uniform", "control")} == {
        "fma": 0.5, "imad": 0.5, "alu": 0.5, "memory": 0.5, "uniform": 0.5, "control": 1.0,
    }  # fmt: skip
    assert count.all == count.bound == 3.5


def test_half_rate_instructions_can_be_the_bound(counter):
    count = counter.Count("kernel", 90, counter.Counter(LOP3=30, FFMA=10), 10.0, 2.5)
    assert count.all == 4.0 and count.bound == 6.0
    assert count.of_copy == pytest.approx(2.5 / (0.92 * 4.8e12) * (132 * 128 * 1.75e9) / 6.0)


def test_sizes_are_those_of_the_kernels(counter):
    found = {v.name: counter.sizes(v) for v in variants_quant.variants(90)}
    assert found["activation | K=2048 kept=0"] == (2048, 2 + 0.5 + 1 / 16)
    assert found["activation | K=2048 kept=64"] == (2048, 2 + 1.5 * (0.5 + 1 / 16))
    assert found["activation | K=2048 kept=64 sums"] == (2048, 4.0)
    assert found["activation | experts K=768 kept=24 swiglu"] == (768, 4 + 1.5 * (0.5 + 1 / 16))
    assert found["weight | values"] == (2048, 4.0)
    assert found["activation | K=12288 kept=384"] is None


@pytest.mark.parametrize(("target", "most"), [(90, 26.0), (100, 20.0)])
def test_plain_quantization_stays_cheap(counter, target, most):
    """Room for another version of the assembler, not for an instruction more for every element."""
    variant = next(v for v in variants_quant.variants(target) if v.name == "activation | K=2048 kept=0")
    assert 5.0 < counter.count(variant, target, *counter.sizes(variant)).bound < most
