"""The choice of a backend, and the operators as torch.library and torch.compile see them, on a CPU."""

import pytest
import torch

from quads_kernels import launch
from quads_ops import backends, cpu_qdq, custom_ops, dispatch, residual, weights
from quads_ops.gemm import compensated_weight, w4a4_linear
from quads_ops.packed_activation import ExpertRows
from quads_ops.residual import ResidualMask, TokenMask
from quads_ops.residual_layout import ResidualForm

CPU = torch.device("cpu")
HOPPER, BLACKWELL, VOLTA = (torch.device("cuda", index) for index in range(3))


@pytest.fixture(autouse=True)
def own_choice(monkeypatch):
    """No choice is remembered from elsewhere, and none is left behind."""
    monkeypatch.delenv("QUADS_BACKEND", raising=False)
    monkeypatch.delenv(backends.EXACT_RESIDUAL, raising=False)
    monkeypatch.setattr(backends, "_said", set())
    backends._decide.cache_clear()
    yield
    dispatch.set_backend(None)
    backends._decide.cache_clear()


@pytest.fixture
def gpus(monkeypatch):
    """As if there were three GPUs. Nothing is launched on them."""
    found = {HOPPER: 90, BLACKWELL: 100, VOLTA: 70}
    monkeypatch.setattr(launch, "capability", lambda device: found.get(device, 0))


@pytest.mark.parametrize("compiled", [True, False])
def test_a_cpu_says_once_what_really_runs(compiled, capsys, monkeypatch):
    name, where = ("compiled", "compiled C++ (backend torch, the choice on a CPU)")
    if not compiled:
        name, where = ("torch", "torch (the choice on a CPU; not compiled: no compiler)")
    monkeypatch.setattr(cpu_qdq, "path", lambda: cpu_qdq.Path(name, "no compiler"))
    w, g = torch.randn(4, 32), torch.tensor(0.01)
    for _ in range(2):
        dispatch.fake_quantize_weight(w, g)
    packed = dispatch.quantize_weight(w, g)
    dispatch.dequantize_weight(packed)
    dispatch.compensate(w, TokenMask(0.5))
    assert capsys.readouterr().err.splitlines() == [
        f"quads: fake_quantize_weight on cpu: {where}",
        f"quads: quantize_weight on cpu: {where}",
        "quads: dequantize_weight on cpu: torch (the choice on a CPU)",
        "quads: compensate on cpu: torch (the choice on a CPU)",
    ]


@pytest.mark.parametrize("op", backends.QUANTIZERS)
def test_what_is_said_to_be_compiled_is(op, monkeypatch):
    """Of the quantizers on a CPU, those in COMPILED_ON_CPU ask for the library to do the work, and no others do."""
    w, g = torch.randn(4, 32), torch.tensor(0.01)
    packed = weights.quantize_weight(w, g)
    calls = {
        "fake_quantize_weight": lambda: dispatch.fake_quantize_weight(w, g),
        "quantize_weight": lambda: dispatch.quantize_weight(w, g),
        "dequantize_weight": lambda: dispatch.dequantize_weight(packed),
        "compensate": lambda: dispatch.compensate(w, "all"),
        "quantize_activation": lambda: dispatch.quantize_activation(w, ResidualForm(kept=1)),
    }
    worked = []
    for name in ("qdq", "quantize_packed", "compensate"):
        monkeypatch.setattr(cpu_qdq, name, lambda *args: worked.append(1) or (w, w))
    monkeypatch.setattr(cpu_qdq, "takes", lambda x: True)
    try:
        calls[op]()
    except (RuntimeError, TypeError, AttributeError):  # the stand-in's result fits no operator
        pass
    assert bool(worked) == (op in backends.COMPILED_ON_CPU)


def test_the_best_that_a_gpu_can_run(gpus, capsys):
    for op in (*backends.QUANTIZERS, backends.GEMM):
        assert backends.choose(op, HOPPER) == "emulated"
        assert backends.choose(op, BLACKWELL) == "native"
        assert backends.choose(op, VOLTA) == "torch"
    said = capsys.readouterr().err
    assert "w4a4_gemm on cuda:0: emulated (Triton on sm_90; not native: sm_90 has no NVFP4 tensor cores)" in said
    assert "needs compute capability 8.0" in said or "need compute capability 8.0" in said


def test_what_the_kernels_do_not_take_goes_to_torch(gpus, capsys):
    assert backends.choose("fake_quantize_weight", HOPPER, torch.float64) == "torch"
    assert "not torch.float64" in capsys.readouterr().err
    assert backends.choose("compensate", BLACKWELL, token_mask=True) == "torch"
    assert "a mask per token is chosen in torch" in capsys.readouterr().err
    assert backends.choose("quantize_weight", HOPPER, k=40) == "torch"
    assert backends.choose("dequantize_weight", HOPPER, torch.bfloat16, 64) == "emulated"


def test_describe(gpus, monkeypatch):
    for name, where in (("compiled", "compiled C++"), ("torch", "torch")):
        monkeypatch.setattr(cpu_qdq, "path", lambda name=name: cpu_qdq.Path(name, ""))
        assert dispatch.describe("cpu") == f"cpu: torch emulated, quantized in {where}"
    assert dispatch.describe(HOPPER) == "hopper: triton emulated"
    assert dispatch.describe(BLACKWELL) == "blackwell: triton native"
    assert dispatch.describe(VOLTA) == "sm_70: torch emulated, quantized in torch"
    dispatch.set_backend("emulated")
    assert dispatch.describe(BLACKWELL) == "blackwell: triton emulated"


def test_a_demanded_backend_runs_or_is_an_error(gpus, monkeypatch):
    assert backends.choose("compensate", BLACKWELL, backend="emulated") == "emulated"
    assert backends.choose("compensate", BLACKWELL, backend="torch") == "torch"
    with pytest.raises(ValueError, match="'native' is demanded .* cannot run w4a4_gemm on cuda:0: sm_90 has no NVFP4"):
        backends.choose(backends.GEMM, HOPPER, backend="native")
    monkeypatch.setenv("QUADS_BACKEND", "native")
    with pytest.raises(ValueError, match="cannot run compensate on cuda:0: .* or take 'emulated'"):
        backends.choose("compensate", HOPPER)
    dispatch.set_backend("torch")  # goes before the environment
    assert backends.choose("compensate", HOPPER) == "torch"
    with pytest.raises(ValueError, match="unknown backend 'fast' .* choose one of auto, torch, emulated, native"):
        dispatch.set_backend("fast")
    with pytest.raises(ValueError, match="unknown operator 'gemv'"):
        dispatch.can_run("torch", "gemv", CPU)


@pytest.mark.skipif(launch.INTERPRETED, reason="the interpreter takes CPU tensors")
def test_kernels_cannot_be_demanded_on_a_cpu(monkeypatch):
    x = torch.randn(2, 32)
    monkeypatch.setenv("QUADS_BACKEND", "emulated")
    with pytest.raises(ValueError, match="cannot run compensate on cpu: Triton kernels need a CUDA device"):
        dispatch.compensate(x)
    monkeypatch.setenv("QUADS_BACKEND", "auto")
    assert torch.equal(dispatch.compensate(x), residual.compensate(x, "w4a4"))


BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("backend", "out_dtype", "summed"),
    [
        ("emulated", BF16, True),
        ("emulated", torch.float16, True),
        ("emulated", torch.float32, False),  # asks for more than a sum in FP16 has
        ("native", BF16, False),  # multiplies codes, not numbers
        ("torch", BF16, False),
    ],
)
def test_the_residual_is_added_in_fp16(backend, out_dtype, summed, capsys):
    for _ in range(2):
        assert dispatch.sums_residual(backend, HOPPER, out_dtype) is summed
    said = "quads: residual on cuda:0: added in FP16 before one product"
    assert capsys.readouterr().err.count(said) == int(summed)


def test_without_a_residual_activations_are_sums_of_one_term(monkeypatch):
    """They are exact, so no output and no demand for the exact residual stands against them."""
    monkeypatch.setenv("QUADS_EXACT_RESIDUAL", "1")
    for dtype in (BF16, torch.float32):
        assert dispatch.takes_sums("emulated", HOPPER, False, dtype, False)
        assert not dispatch.takes_sums("emulated", HOPPER, True, dtype)
        assert not dispatch.takes_sums("native", HOPPER, False, dtype)
    monkeypatch.delenv("QUADS_EXACT_RESIDUAL")
    assert dispatch.takes_sums("emulated", HOPPER, True, BF16)


def test_the_exact_residual_can_be_demanded(monkeypatch):
    assert not dispatch.sums_residual("emulated", HOPPER, BF16, demanded=False)
    assert dispatch.sums_residual("emulated", HOPPER, torch.float32, demanded=True)
    for value, summed in (("1", False), ("0", True), ("", True)):
        monkeypatch.setenv("QUADS_EXACT_RESIDUAL", value)
        assert dispatch.sums_residual("emulated", HOPPER, BF16) is summed
    monkeypatch.setenv("QUADS_EXACT_RESIDUAL", "yes")
    with pytest.raises(ValueError, match="QUADS_EXACT_RESIDUAL='yes'; set it to 1"):
        dispatch.sums_residual("emulated", HOPPER, BF16)


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_a_sum_is_not_demanded_of_other_backends(backend):
    with pytest.raises(ValueError, match=f"only backend emulated does; this product runs on '{backend}'"):
        dispatch.sums_residual(backend, HOPPER, BF16, demanded=True)


def weight_and_scale(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    w = torch.randn(shape).bfloat16()
    return w, w.float().abs().amax((-2, -1)) / 2688


def test_entry_points_are_the_reference_on_a_cpu():
    w, g = weight_and_scale(3, 8, 48)
    packed = dispatch.quantize_weight(w, g)
    expected = weights.quantize_weight(w, g)
    assert all(torch.equal(a, b) for a, b in zip(packed, expected, strict=True))
    assert torch.equal(dispatch.fake_quantize_weight(w, g), weights.fake_quantize_weight(w, g))
    assert torch.equal(dispatch.dequantize_weight(packed), weights.dequantize_weight(expected))
    assert dispatch.dequantize_weight(packed, torch.bfloat16).dtype == torch.bfloat16
    x = torch.randn(5, 64).bfloat16()
    mask = ResidualMask(blocks=torch.tensor([True, False, True, False]))
    for mode in (
        None,
        "all",
        mask,
        ResidualMask(channels=torch.rand(64) < 0.5),
        TokenMask(0.5),
        TokenMask(0.3, "channel"),
    ):
        stats, expected_stats = torch.zeros(4), torch.zeros(4)
        out = dispatch.compensate(x, mode, stats=stats)
        assert torch.equal(out, residual.compensate(x, "w4a4", mode, stats=expected_stats))
        assert torch.equal(stats, expected_stats) and stats.sum() > 0
    keep = torch.rand(2, 4) < 0.5
    grouped = dispatch.compensate_grouped(x, [2, 3], keep)
    assert torch.equal(grouped, residual.compensate_grouped(x, [2, 3], keep))


def test_errors_of_the_reference_come_through():
    with pytest.raises(ValueError, match="multiple of 16"):
        dispatch.fake_quantize_weight(torch.randn(4, 20), torch.tensor(1.0))
    with pytest.raises(ValueError, match="one per matrix"):
        dispatch.quantize_weight(torch.randn(4, 32), torch.ones(4))
    with pytest.raises(ValueError, match='residual must be None, "all"'):
        dispatch.compensate(torch.randn(4, 32), "half")


def test_packed_activation_decodes_to_compensate():
    """The packed form holds the same numbers, in the order of the form."""
    from quads_ops import nvfp4

    x, order = torch.randn(6, 96).bfloat16(), torch.randperm(6).int()
    out = dispatch.quantize_activation(x, ResidualForm(kept=2, order=order))
    values = nvfp4.dequantize(nvfp4.unpack(out.packed), out.block_scales, out.global_scale_dec)
    rest = nvfp4.dequantize(nvfp4.unpack(out.residual_packed), out.residual_block_scales, out.global_scale_dec)
    values[:, :32] += rest
    flags = torch.zeros(6, dtype=torch.bool)
    flags[order[:2].long()] = True
    expected = residual.compensate(x, "w4a4", ResidualMask(blocks=flags)).unflatten(1, (-1, 16))[:, order.long()]
    assert torch.equal(values, expected.flatten(1))
    plain = dispatch.quantize_activation(x, ResidualForm())
    assert plain.residual_packed is None and plain.residual_block_scales is None


@pytest.mark.parametrize(("experts", "slots"), [(1, 1024), (8, 128), (16, 64), (128, 8), (512, 4)])
def test_few_experts_have_many_lines_each(experts, slots):
    """The grid has a program for each line: as many as keep the GPU busy, on a rank with a few of the experts, too."""
    assert custom_ops.expert_slots(experts) == slots


def test_new_statistics_have_the_shape_that_is_added_to():
    x = torch.randn(7, 128)
    stats = dispatch.new_statistics(64, "block", CPU, experts=2)
    rows = ExpertRows(torch.tensor([0, 3, 7], dtype=torch.int32))
    form = ResidualForm(kept=4, keep=torch.rand(2, 64) < 0.5)
    dispatch.quantize_activation(x, form, experts=rows, stats=stats, swiglu=True)
    hidden = torch.nn.functional.silu(x[:, :64]) * x[:, 64:]
    for expert, part in enumerate((hidden[:3], hidden[3:])):
        torch.testing.assert_close(stats.sum(0)[expert], residual.residual_statistics(part))
    assert dispatch.new_statistics(64, "channel", CPU).shape == (1, 64)


def operators() -> dict[str, tuple]:
    w, g = weight_and_scale(2, 8, 32)
    packed = weights.quantize_weight(w, g)
    x, order = torch.randn(5, 64), torch.randperm(4).int()
    keep = torch.rand(4) < 0.5
    offsets = torch.tensor([0, 2, 5], dtype=torch.int32)
    return {
        "fake_quantize_weight": (w, g, "torch"),
        "quantize_weight": (w, g, "torch"),
        "dequantize_weight": (*packed, torch.bfloat16, "torch"),
        "compensate": (x, keep, torch.zeros(4), False, 0.0, "", "torch"),
        "compensate_grouped": (x, [2, 3], torch.rand(2, 64) < 0.5, torch.zeros(2, 64), "torch"),
        "quantize_activation": (x, order, None, None, None, torch.zeros(1, 4), 2, False, "torch"),
    } | {
        "quantize_activation of experts": (
            torch.cat((x, x), 1), None, keep.expand(2, 4), offsets, None, None, 4, True, "torch"
        ),
    }  # fmt: skip


@pytest.mark.parametrize("case", list(operators()))
def test_opcheck(case):
    torch.library.opcheck(getattr(custom_ops, case.split()[0]), operators()[case])


def mirrored(x: torch.Tensor) -> torch.Tensor:
    """The same numbers with the last two dimensions swapped in memory."""
    return x.mT.contiguous().mT


@pytest.mark.parametrize("compiled", [False, True])
def test_results_lie_in_memory_as_the_fakes_say(compiled, monkeypatch):
    """What torch.compile plans with: contiguous, however the arguments lie."""
    if not compiled:
        monkeypatch.setattr(cpu_qdq, "takes", lambda x: False)
    w, x, order = mirrored(torch.randn(2, 2, 3, 16)), mirrored(torch.randn(5, 48)), torch.randperm(3).int()
    g = torch.full((2, 2), 0.01)
    packed, scales = (mirrored(part) for part in custom_ops.quantize_weight(w.contiguous(), g, "torch"))
    results = [
        custom_ops.fake_quantize_weight(w, g, "torch"),
        *custom_ops.quantize_weight(w, g, "torch"),
        custom_ops.dequantize_weight(packed, scales, g, torch.float32, "torch"),
        custom_ops.compensate(x, torch.ones(3, dtype=torch.bool), None, False, 0.0, "", "torch"),
        custom_ops.compensate_grouped(x, [2, 3], torch.ones(2, 48, dtype=torch.bool), None, "torch"),
        *custom_ops.quantize_activation(x, order, None, None, None, None, 1, False, "torch"),
    ]
    assert all(result.is_contiguous() for result in results)


def test_torch_compile_sees_one_graph():
    """A W4A4 layer with fake-quantized weights, compensated input and statistics compiles without a graph break."""
    w, g = weight_and_scale(24, 64)
    order = torch.randperm(4).int()
    mask = ResidualMask(blocks=torch.tensor([True, False, False, True]))
    packed = weights.quantize_weight(w, g)
    linear = compensated_weight(packed, mask)

    def layer(x: torch.Tensor, stats: torch.Tensor, lines: torch.Tensor):
        y = dispatch.compensate(x, mask, stats=stats) @ dispatch.fake_quantize_weight(w, g).float().t()
        again = dispatch.dequantize_weight(dispatch.quantize_weight(w, g))
        rows = dispatch.quantize_activation(x, ResidualForm(kept=2, order=order), stats=lines)
        return y + 1, again, rows.residual_packed, w4a4_linear(x, linear)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for tokens in (3, 5, 9):  # the number of tokens becomes symbolic
        x = torch.randn(tokens, 64).bfloat16()
        states = [torch.zeros(4), torch.zeros(1, 4)], [torch.zeros(4), torch.zeros(1, 4)]
        expected, actual = layer(x, *states[0]), compiled(x, *states[1])
        for a, b in zip((*actual, *states[1]), (*expected, *states[0]), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
        assert states[1][0].sum() > 0 and states[1][1].sum() > 0


@pytest.mark.parametrize("experts", [None, 3])
def test_statistics_are_fp32_whatever_the_default_dtype(experts):
    """vLLM sets the default dtype to the model's while it loads one."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert dispatch.new_statistics(128, "block", torch.device("cpu"), experts).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
