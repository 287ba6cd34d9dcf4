"""The offline compile report: its checks on doctored results, and a few real variants."""

import importlib.util
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from quads_kernels import configs, variants_gemm

PATH = Path(__file__).resolve().parent.parent / "benchmarks" / "compile_report.py"


@pytest.fixture(scope="module")
def report():
    spec = importlib.util.spec_from_file_location("compile_report", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules["compile_report"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["compile_report"]


TCGEN05 = "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16 [%r1], %rd1, %rd2, %r2, [%r3], [%r4], %p1;"
PTX = {
    "tcgen05 mxf4nvf4": TCGEN05,
    "mma.sync mxf4nvf4": "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1",
    "tcgen05 f16": "tcgen05.mma.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r2, %p1;",
    "wgmma f16": "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {%f1}, %rd1, %rd2, %p1, 1, 1, 0, 1;",
    "wgmma other": "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%f1}, %rd1, %rd2, %p1, 1, 1, 0, 1;",
    "mma.sync f16": "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f1}, {%r1}, {%r2}, {%f1};",
    "mma.sync other": "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1}, {%r1}, {%r2}, {%f1};",
    "cvt e2m1": "cvt.rn.satfinite.e2m1x2.f32 %b1, %f1, %f2;",
    "-": "add.f32 %f1, %f2, %f3;",
}


@pytest.mark.parametrize("name", PTX)
def test_the_instruction_is_found(report, name):
    assert report.instruction_in(f"mov.u32 %r1, %tid.x;\n{PTX[name]}\nret;") == name


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({}, ""),
        ({"instruction": "tcgen05 f16"}, "claims native but multiplies with tcgen05 f16"),
        ({"instruction": "-"}, "claims native but multiplies with -"),
        ({"native": False, "instruction": "wgmma other"}, "not FP16"),
        ({"native": False, "instruction": "wgmma f16"}, ""),
        ({"trap": True}, "compiled to a trap"),
        ({"local_bytes": 8}, "8 bytes of local memory"),
        ({"tensor_memory": 576}, "576 columns of tensor memory, of 512"),
        ({"tensor_memory": 512}, ""),
        ({"shared_bytes": 232449}, "232449 bytes of shared memory"),
        ({"target": 120, "shared_bytes": 110000}, "110000 bytes of shared memory, of 101376"),
    ],
)
def test_violations_are_named(report, change, problem):
    row = report.Row("kernel", 100, True, "tcgen05 mxf4nvf4", 100, 0, 100000, 256)
    found = report.problem_of(replace(row, **change))
    assert problem in found and bool(found) == bool(problem)


def test_differences_from_the_committed_table(report, tmp_path):
    rows = [report.Row("a", 100, True, "tcgen05 mxf4nvf4", 100, 0, 1, 256)]
    rows.append(report.Row("b | c|d", 90, False, "wgmma f16"))
    report.write_table(rows, "3.9.0", tmp_path)
    version, lines = report.read_table(tmp_path / "kernels.csv")
    assert version == "3.9.0" and report.differences(rows, lines) == []
    # Registers may move; instruction, spills and tensor memory may not.
    changed = [replace(rows[0], registers=120), replace(rows[1], local_bytes=16)]
    assert report.differences(changed, lines) == ["sm_90 b | c|d: local_bytes 0 -> 16"]
    assert report.differences(rows[:1], lines) == ["sm_90 b | c|d: in the committed table only"]
    assert report.differences([*rows, report.Row("c", 90, False)], lines) == ["sm_90 c: not in the committed table"]
    text = (tmp_path / "kernels.md").read_text()
    assert "| b, c\\|d | wgmma f16 |" in text  # a cell of a table
    assert "## sm_100" in text and "| a | tcgen05 mxf4nvf4 | 100 | 0 | 1 | 256 | - |" in text


def test_names_are_unique_and_fit_the_kernels(report):
    for target in report.TARGETS:
        names = [variant.name for variant in report.all_variants(target)]
        assert len(names) == len(set(names))
        for variant in report.all_variants(target):
            given = variant.types.keys() | variant.constants.keys()
            assert given == set(variant.kernel.arg_names), variant.name


def test_a_number_of_tokens_compiles_nothing_anew(report):
    """Triton compiles a kernel again where an integer is 1, or a multiple of 16, unless told not to. What is inspected
    here then is what runs, for every batch."""
    of_tokens = {"M", "P", "BLOCKS", "CHUNKS"}
    seen = 0
    kernels = {variant.kernel.fn.__name__: variant.kernel for variant in report.all_variants(90)}
    for name, kernel in kernels.items():
        found = [p for p in kernel.params if p.name in of_tokens and not p.is_constexpr]
        assert all(p.do_not_specialize for p in found), name
        seen += len(found)
    assert seen == 11


def test_every_tile_of_the_tables_is_compiled():
    for capability, native in [(80, False), (90, False), (100, True), (103, True), (120, True)]:
        names = " ".join(variant.name for variant in variants_gemm.variants(capability))
        sizes = [(tokens, *form) for tokens in (*configs.FEW_TOKENS, 4096) for form in ((native, False), (False, True))]
        for tokens, native_here, sums in sizes:
            for tile in configs.dense_candidates(capability, native_here, tokens, sums):
                assert f"{tile.tokens}x{tile.weights}x{tile.k}, {tile.warps} warps, {tile.stages} stages" in names


REAL = [
    (100, "dense | native | residual | 16x128x128, 4 warps, 6 stages, weights on M", "tcgen05 mxf4nvf4"),
    (120, "dense | native | plain | 16x64x256, 4 warps, 4 stages, weights on M", "mma.sync mxf4nvf4"),
    (90, "dense | emulated | plain | 16x256x128, 8 warps, 4 stages, weights on M", "wgmma f16"),
    (100, "activation | K=2048 kept=64", "cvt e2m1"),
    (90, "activation | K=2048 kept=64", "-"),
]


@pytest.mark.parametrize(("target", "name", "instruction"), REAL)
def test_real_variants_become_what_they_claim(report, target, name, instruction):
    row = report.compile_one(name, target)
    assert row.problem == "" and row.instruction == instruction and row.registers > 0


@pytest.mark.parametrize(
    ("target", "name"),
    [
        (90, "experts gate|up | emulated | residual | 128x256x64, 8 warps, 3 stages"),
        (90, "dense | emulated | sums | 128x256x64, 8 warps, 4 stages, weights on M"),
        (90, "dense | emulated | sums | 16x128x128, 4 warps, 4 stages, weights on M"),
        (90, "experts down | emulated | sums | 16x64x256, 4 warps, 4 stages, weights on M"),
        (100, "experts down | native | residual | 128x128x256, 8 warps, 3 stages"),
        (120, "dense | native | residual | 128x64x128, 8 warps, 3 stages"),
    ],
)
def test_no_step_of_k_waits_for_a_load_of_its_own(report, target, name):
    """In the K loops, what is not copied asynchronously is loaded for the next step: the loop yields it."""
    variant = next(variant for variant in report.all_variants(target) if variant.name == name)
    code = report._compile(variant, target).asm["ttgir"]
    loops = list(re.finditer(r"^( *)%\S+ = scf\.for .*?^\1\}", code, re.DOTALL | re.MULTILINE))
    assert len(loops) == (1 if "sums" in name else 2)
    for loop in loops:
        handed_on = re.findall(r"%[\w#]+", re.search(r"scf\.yield (.*)", loop[0])[1])
        loaded = re.findall(r"(%\w+) = tt\.load ", loop[0])
        assert set(loaded) <= set(handed_on), sorted(set(loaded) - set(handed_on))


@pytest.mark.parametrize("kind", ["dense", "experts gate|up", "experts down"])
@pytest.mark.parametrize("tile", variants_gemm._few(90, False, True) + variants_gemm._many(90, False, True), ids=str)
def test_a_product_from_sums_overlaps_with_the_next_dequantization(report, kind, tile):
    """On Hopper, in the K loop: nothing is stored to shared memory, so the weight stays in registers, and every wait
    leaves a product running."""
    start = f"{kind} | emulated | sums | {tile.tokens}x{tile.weights}x{tile.k}, {tile.warps} warps"
    variant = next(variant for variant in variants_gemm.variants(90) if variant.name.startswith(start))
    ptx = report._compile(variant, 90).asm["ptx"]
    labels = {found[1]: found.start() for found in re.finditer(r"^(\$L\w+):", ptx, re.MULTILINE)}
    back = [(labels[found[1]], found.end()) for found in re.finditer(r"bra(?:\.uni)?\s+(\$L\w+);", ptx)]
    (loop,) = {ptx[begin:end] for begin, end in back if begin < end and "wgmma.mma_async" in ptx[begin:end]}
    pending = [int(found) for found in re.findall(r"wgmma\.wait_group\.sync\.aligned (\d+)", loop)]
    assert pending and min(pending) > 0
    assert "st.shared" not in loop and "stmatrix" not in loop


def test_a_fall_back_is_caught(report):
    """A tile that Triton multiplies in BF16 without a word: an M side of 64 on sm_100."""
    few = configs.Tile(16, 64, 128, 4, 3, weights_on_m=True)
    row = report.inspect(variants_gemm._decode(few, False, True), 100)
    assert "claims native" in row.problem


def test_what_does_not_compile_is_a_violation(report):
    variant = variants_gemm._decode(configs.Tile(16, 128, 128, 4, 3, weights_on_m=True), False, False)
    broken = variant._replace(constants={**variant.constants, "BK": 100})
    assert "does not compile" in report.inspect(broken, 90).problem
    missing = variant._replace(constants={name: v for name, v in variant.constants.items() if name != "BK"})
    assert "arguments do not match" in report.inspect(missing, 90).problem
