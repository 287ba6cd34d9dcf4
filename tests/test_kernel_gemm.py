"""The dense W4A4 product with residual: emulated, and native where the interpreter or the GPU can."""

import pytest
import support_dot_scaled
import support_gemm
import support_interpreter
import torch
from support_gemm import DEVICE, FORMS, SUMS, activations, assert_product, in_form, weight, weight_values

from quads_kernels import gemm
from quads_kernels.activation import Quantized
from quads_kernels.gemm import w4a4_gemm
from quads_kernels.sum_order import in_sum_order
from quads_ops import nvfp4
from quads_ops.gemm import compensated_weight, w4a4_linear
from quads_ops.residual import ResidualMask
from quads_ops.weights import PackedWeight

in_interpreter = support_interpreter.fixture()

BACKENDS = ("emulated", "native")


@pytest.fixture
def native(request, monkeypatch) -> bool:
    if request.param == "native" and (support_interpreter.INTERPRETED or DEVICE != "cpu"):
        support_dot_scaled.repair(monkeypatch)
    return request.param == "native"


backends = pytest.mark.parametrize("native", BACKENDS, indirect=True)
forms = pytest.mark.parametrize("form", [*FORMS, *SUMS])
products = pytest.mark.parametrize(
    ("form", "native"),
    [*((form, backend) for form in FORMS for backend in BACKENDS), *((form, "emulated") for form in SUMS)],
    indirect=["native"],
)


def multiply(a, w, form="few tokens", native=False, out_dtype=torch.float32, **options) -> torch.Tensor:
    tile = support_gemm.tile(form, native)
    return w4a4_gemm(a.rows, w, out_dtype=out_dtype, native=native, tile=tile, **options)


@products
@pytest.mark.parametrize(
    ("m", "n", "k", "kept"),
    [(1, 40, 16, 1), (7, 33, 48, 2), (63, 80, 256, 8), (130, 33, 320, 7), (5, 64, 512, 0), (2, 24, 2880, 90)],
)
def test_equals_fp64_within_the_bound(native, form, m, n, k, kept, monkeypatch):
    guard = support_interpreter.GuardedOutputs(monkeypatch)
    a, w = in_form(activations(m, k, kept), form), weight(n, k)
    assert_product(multiply(a, w, form, native), a.values, weight_values(w))
    guard.check_margins()


@pytest.mark.parametrize(
    ("form", "native"),
    [("few tokens", "emulated"), ("few tokens", "native"), *((form, "emulated") for form in SUMS)],
    indirect=["native"],
)
@pytest.mark.parametrize(("splits", "k"), [(2, 640), (3, 640), (3, 656), (8, 640)])
def test_shares_of_k_add_up(form, native, splits, k):
    # Three shares of 640 are 256, 256, 128; the residual ends inside the first.
    a, w, bias = in_form(activations(5, k, 10), form), weight(40, k), torch.randn(40)
    out = multiply(a, w, form, native=native, splits=splits, bias=bias.to(DEVICE))
    assert_product(out, a.values, weight_values(w), bias.double())


def test_the_same_inputs_give_the_same_bits():
    a, w = activations(7, 512, 20), weight(48, 512)
    first, second = (multiply(a, w, splits=4) for _ in range(2))
    support_interpreter.same_bits(first, second)


@pytest.mark.parametrize("form", SUMS)
@pytest.mark.parametrize("k", [96, 208, 400])
def test_sums_of_any_number_of_blocks(form, k):
    """Tiles of 64 end within K, in a block without a pair, or both; scales come at once or a step ahead."""
    a, w = in_form(activations(5, k, 2), form), weight(48, k)
    if DEVICE != "cpu":
        pytest.skip("a GPU has its own tiles")
    for size, warps in ((64, 1), (128, 1), (64, 32)):
        tile = support_gemm.tile(form, False)._replace(k=size, warps=warps)
        out = w4a4_gemm(a.rows, w, tile=tile, out_dtype=torch.float32, native=False)
        assert_product(out, a.values, weight_values(w))


@pytest.mark.parametrize("kept", [3, 8])
@pytest.mark.parametrize("form", FORMS)
def test_scales_may_be_loaded_a_step_ahead(form, kept):
    """Which are, depends on the warps (and on `kept`), which mean nothing else to the interpreter."""
    a, w = activations(5, 400, kept), weight(48, 400)
    tile = support_gemm.tile(form, False)
    if DEVICE != "cpu":
        pytest.skip("a GPU has its own tiles")
    options = dict(out_dtype=torch.float32, native=False)
    none, every = (w4a4_gemm(a.rows, w, tile=tile._replace(k=64, warps=warps), **options) for warps in (1, 32))
    support_interpreter.same_bits(none, every)
    assert_product(every, a.values, weight_values(w))


@forms
def test_a_token_does_not_depend_on_its_neighbours(form):
    w = weight(48, 256)
    together = in_form(activations(9, 256, 8), form)
    rows = together.rows
    alone = rows._replace(**{name: part[4:5] for name, part in rows._asdict().items() if part is not None})
    tile = support_gemm.tile(form, False)
    out = [w4a4_gemm(x, w, out_dtype=torch.float32, native=False, tile=tile) for x in (rows, alone)]
    support_interpreter.same_bits(out[0][4:5], out[1])


@forms
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_output_is_the_fp32_result_rounded_once(form, dtype):
    a, w, bias = in_form(activations(9, 96, 3), form), weight(33, 96), torch.randn(33).to(dtype).to(DEVICE)
    exact = multiply(a, w, form, bias=bias)
    support_interpreter.same_bits(multiply(a, w, form, out_dtype=dtype, bias=bias), exact.to(dtype))


@forms
def test_weight_rows_may_have_their_own_scales(form):
    a, w = in_form(activations(6, 64, 2), form), weight(40, 64)
    g = torch.rand(40) + 0.5
    w = PackedWeight(w.packed, w.block_scales, g.to(DEVICE))
    assert_product(multiply(a, w, form), a.values, weight_values(w))


def moved_by_a_byte(x: torch.Tensor) -> torch.Tensor:
    return torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)


def spread(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, apart in memory, with NaN in between."""
    return torch.stack((x, torch.full_like(x, torch.nan)), -1)[..., 0]


@pytest.mark.parametrize(
    ("form", "splits"), [(form, None) for form in (*FORMS, "sums")] + [("few tokens", 2), ("sums", 2)]
)
def test_a_bias_may_have_strides(form, splits):
    a, w, bias = in_form(activations(6, 256, 2), form), weight(40, 256), torch.randn(40)
    out = multiply(a, w, form, bias=spread(bias.to(DEVICE)), splits=splits)
    assert_product(out, a.values, weight_values(w), bias.double())
    # One number in memory; the kernel would read 40.
    out = multiply(a, w, form, bias=torch.ones(1, device=DEVICE).expand(40), splits=splits)
    assert_product(out, a.values, weight_values(w), torch.ones(40).double())


@pytest.mark.parametrize("form", FORMS)
def test_plain_equals_a_residual_of_zeros(form):
    a, w = activations(6, 128, 0), weight(40, 128)
    codes, scales = torch.zeros(6, 5 * 8, dtype=torch.uint8), torch.zeros(6, 5, dtype=torch.uint8)
    zeros = a.rows._replace(residual_packed=codes.to(DEVICE), residual_block_scales=scales.to(DEVICE))
    plain = multiply(a, w, form)
    support_interpreter.same_bits(multiply(support_gemm.Activations(zeros, a.values), w, form), plain)


@products
def test_a_token_with_nan_spoils_only_itself(native, form):
    x = torch.randn(6, 64)
    x[2, 5] = torch.nan
    x[4, 60] = torch.inf
    a, w = in_form(support_gemm.quantized(x, 4), form), weight(40, 64)
    out = multiply(a, w, form, native).cpu()
    assert out[[2, 4]].isnan().all()
    healthy = [0, 1, 3, 5]
    assert_product(out[healthy], a.values[healthy], weight_values(w))


@products
def test_a_weight_with_nan_spoils_only_its_column(native, form):
    a, w = in_form(activations(6, 64, 4), form), weight(40, 64)
    w.block_scales[3, 2] = 0x7F
    out = multiply(a, w, form, native).cpu()
    assert out[:, 3].isnan().all()
    healthy = torch.arange(40) != 3
    assert_product(out[:, healthy], a.values, weight_values(w)[healthy])


@forms
def test_extreme_scales_do_not_overflow_on_the_way(form):
    x = torch.randn(4, 64) * torch.tensor([[1e-30], [1e-20], [1e25], [1e33]])
    a, w = in_form(support_gemm.quantized(x, 4), form), weight(40, 64)
    assert_product(multiply(a, w, form), a.values, weight_values(w))


def identity() -> PackedWeight:
    """[16, 16], 1 (code 2, scale byte 0x38) on the diagonal: the product reads out the activations."""
    ones = nvfp4.pack(torch.eye(16, dtype=torch.uint8) * 2)
    w = PackedWeight(ones, torch.full((16, 1), 0x38, dtype=torch.uint8), torch.ones(()))
    return PackedWeight(*(part.to(DEVICE) for part in w))


def test_every_code_and_scale_is_decoded_exactly():
    """All 16 codes under all 127 scales, times a weight of ones: sums of one block, so no rounding at all."""
    codes = torch.arange(16, dtype=torch.uint8).expand(127, 16)
    scales = torch.arange(127, dtype=torch.uint8)[:, None].contiguous()
    rows = support_gemm.Quantized(torch.ones(127), None, nvfp4.pack(codes), scales, None, None)
    rows = rows._replace(**{name: part.to(DEVICE) for name, part in rows._asdict().items() if part is not None})
    for form in FORMS:
        out = multiply(support_gemm.Activations(rows, torch.empty(0)), identity(), form)
        assert torch.equal(out.cpu(), nvfp4.unscaled(codes, scales))


def test_sums_meet_every_code_and_scale_of_a_weight_exactly():
    """The same of a weight: rows of the identity read it out, one element at a time."""
    codes = torch.arange(16, dtype=torch.uint8).expand(127, 16)
    scales = torch.arange(127, dtype=torch.uint8)[:, None].contiguous()
    w = PackedWeight(*(part.to(DEVICE) for part in (nvfp4.pack(codes), scales, torch.ones(()))))
    sums = in_sum_order(torch.eye(16).half() * 2**-10)
    rows = Quantized(torch.ones(16), *[None] * 5, sums)
    rows = Quantized(*(None if part is None else part.to(DEVICE) for part in rows))
    out = multiply(support_gemm.Activations(rows, torch.empty(0)), w, "many sums")
    assert torch.equal(out.cpu().t(), nvfp4.unscaled(codes, scales))


@forms
def test_no_tokens(form):
    a, w = in_form(activations(0, 64, 2), form), weight(40, 64)
    assert multiply(a, w, form).shape == (0, 40)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a, w: (a._replace(packed=a.packed[:, :-1]), w), "multiple of 16"),
        (lambda a, w: (a._replace(packed=None), w), "packed=True or sums=True"),
        (lambda a, w: (a._replace(sums=torch.zeros(4, 64)), w), "both sums and packed codes"),
        (
            lambda a, w: (Quantized(a.global_scale_dec, *[None] * 5, torch.zeros(4, 64)), w),
            "sums must be torch.float16",
        ),
        (lambda a, w: (a._replace(block_scales=a.block_scales.float()), w), "must be torch.uint8"),
        (lambda a, w: (a._replace(residual_block_scales=a.block_scales), w), "residual_block_scales must have shape"),
        (lambda a, w: (a._replace(global_scale_dec=a.global_scale_dec[:2]), w), "global_scale_dec of the activations"),
        (lambda a, w: (a, w._replace(packed=w.packed[:, :8])), "packed weight must have shape"),
        (lambda a, w: (a, w._replace(packed=w.packed.t().contiguous().t())), "must be contiguous"),
        (
            lambda a, w: (a, w._replace(global_scale_dec=torch.ones(1, device=DEVICE).expand(40))),
            "global_scale_dec of the weight must be contiguous",
        ),
        (
            lambda a, w: (a._replace(global_scale_dec=torch.ones(8, device=DEVICE)[::2]), w),
            "global_scale_dec of the activations must be contiguous",
        ),
        (lambda a, w: (a, w._replace(packed=moved_by_a_byte(w.packed))), "begin at an address divisible by 4"),
        (lambda a, w: (a._replace(packed=moved_by_a_byte(a.packed)), w), "begin at an address divisible by 4"),
        (lambda a, w: (a, w._replace(global_scale_dec=torch.ones(3, device=DEVICE))), "one per row"),
    ],
)
def test_wrong_operands_are_named(change, message):
    rows, w = change(activations(4, 64, 2).rows, weight(40, 64))
    with pytest.raises(ValueError, match=message):
        w4a4_gemm(rows, w, out_dtype=torch.float32, native=False)


def test_wrong_options_are_named():
    a, w = activations(4, 64, 2), weight(40, 64)
    with pytest.raises(ValueError, match="out_dtype"):
        multiply(a, w, out_dtype=torch.int32)
    with pytest.raises(ValueError, match="splits=2 needs a tile with weights on the M side"):
        multiply(a, w, "many tokens", splits=2)
    with pytest.raises(ValueError, match="sums need a tile with weights on the M side"):
        multiply(in_form(a, "many sums"), w, "many tokens")
    with pytest.raises(ValueError, match="bias must have shape"):
        multiply(a, w, bias=torch.ones(3, device=DEVICE))


@pytest.mark.skipif(DEVICE != "cpu", reason="about Triton's interpreter")
def test_the_interpreter_still_needs_its_repair(monkeypatch):
    """When this fails, Triton decodes E4M3 scales itself: remove tests/support_dot_scaled.py."""
    from triton.runtime import interpreter

    if not hasattr(interpreter, support_dot_scaled.NAME):
        pytest.skip("no dot_scaled in this interpreter")
    a, w = activations(4, 64, 2), weight(40, 64)
    with pytest.raises(AssertionError, match="times the bound"):
        assert_product(multiply(a, w, native=True), a.values, weight_values(w))


@pytest.mark.parametrize("kept", [3, 16])
def test_summing_in_fp16_disturbs_less_than_the_outputs_rounding(kept):
    a, w = activations(9, 256, kept), weight(40, 256)
    out = multiply(in_form(a, "many sums"), w, "many sums").cpu()
    values = weight_values(w)
    exact = a.values @ values.t()
    error = (out.double() - exact).abs()
    assert (error <= (2**-11 + support_gemm.BOUND) * (a.values.abs() @ values.abs().t())).all()
    assert error.norm() < (exact.bfloat16() - exact).norm() / 8
    # The residual is in the sum: without it the error is far larger.
    rows = a.rows._replace(residual_packed=None, residual_block_scales=None)
    lost = (multiply(support_gemm.Activations(rows, a.values), w).cpu() - exact).abs()
    assert error.mean() < 0.02 * lost.mean()


@pytest.mark.parametrize(
    ("tokens", "dtype", "environment", "summed"),
    [
        (1, torch.bfloat16, "", True),
        (65, torch.bfloat16, "", True),
        (65, torch.bfloat16, "1", False),
        (1, torch.float32, "", False),
    ],
)
def test_linear_adds_the_residual_first(tokens, dtype, environment, summed, monkeypatch):
    """`w4a4_linear` multiplies in the form that `backends.sums_residual` chooses."""
    monkeypatch.setenv("QUADS_EXACT_RESIDUAL", environment)
    x, w = torch.randn(tokens, 64).to(dtype).to(DEVICE), compensated_weight(weight(24, 64), "all")
    right, asked = gemm.w4a4_gemm, []

    def spy(rows, *args, **options):
        asked.append(rows.sums is not None)
        return right(rows, *args, **options)

    monkeypatch.setattr(gemm, "w4a4_gemm", spy)
    chosen = w4a4_linear(x, w, backend="emulated")
    assert asked == [summed]
    if summed:
        exact = w4a4_linear(x, w, sum_residual=False, backend="emulated")
        # One BF16 unit of the largest element apart at most; of many elements some are.
        assert (chosen - exact).abs().max() <= 2**-7 * exact.abs().max()
        assert tokens == 1 or (chosen != exact).any()


def test_native_multiplies_twice():
    a, w = in_form(activations(4, 64, 2), "many sums"), weight(40, 64)
    with pytest.raises(ValueError, match="sums need the emulated form"):
        multiply(a, w, "many sums", native=True)


LINEAR_MODES = {
    "plain": lambda k: None,
    "all": lambda k: "all",
    "blocks": lambda k: ResidualMask(blocks=torch.arange(k // 16) % 3 == 1),
    "channels": lambda k: ResidualMask(channels=torch.arange(k) % 5 < 2),
}


@pytest.mark.parametrize("mode", LINEAR_MODES)
@pytest.mark.parametrize(("m", "k"), [(1, 48), (70, 208)])
def test_linear_equals_the_torch_backend(mode, m, k):
    """Quantizing, reordering and multiplying, against the definition."""
    x = torch.randn(m, k).bfloat16().to(DEVICE)
    w, bias = compensated_weight(weight(40, k), LINEAR_MODES[mode](k)), torch.randn(40, device=DEVICE)
    stats = {backend: torch.zeros(2, k // 16, device=DEVICE) for backend in ("torch", "emulated")}
    out = {
        backend: w4a4_linear(x, w, bias=bias, stats=lines, out_dtype=torch.float32, backend=backend).cpu()
        for backend, lines in stats.items()
    }
    assert torch.allclose(out["emulated"], out["torch"], rtol=1e-5, atol=1e-5)
    assert torch.allclose(stats["emulated"].sum(0), stats["torch"].sum(0), rtol=1e-4)


@pytest.mark.parametrize("mode", list(LINEAR_MODES)[1:])
@pytest.mark.parametrize(("m", "k"), [(1, 48), (5, 208)])
def test_linear_from_sums_is_off_by_their_rounding(mode, m, k):
    x, packed = torch.randn(m, k).bfloat16().to(DEVICE), weight(40, k)
    w = compensated_weight(packed, LINEAR_MODES[mode](k))
    out, exact = (
        w4a4_linear(x, w, out_dtype=torch.float32, sum_residual=summed, backend="emulated").cpu().double()
        for summed in (True, False)
    )
    allowed = (2**-11 + 2 * support_gemm.BOUND) * (x.cpu().double().abs() * 1.2 @ weight_values(packed).abs().t())
    assert ((out - exact).abs() <= allowed).all()
