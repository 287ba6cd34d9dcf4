"""Wrong arguments of the operators: one error that names the operator, the argument, the value and the remedy."""

import re

import pytest
import torch

from quads_ops import dispatch, nvfp4, residual, weights
from quads_ops.gemm import CompensatedWeight, ResidualForm, compensated_weight, w4a4_linear, w4a4_moe
from quads_ops.packed_activation import ExpertRows
from quads_ops.residual import ResidualMask, TokenMask, select_mask

N, K, M, EXPERTS, INNER = 8, 64, 5, 3, 32
BF16 = torch.bfloat16
W = torch.linspace(-1, 1, N * K).reshape(N, K)
G = nvfp4.global_scale_dec(weights.weight_amax(W))
X = torch.linspace(-2, 2, M * K).reshape(M, K)
PACKED = weights.quantize_weight(W, G)
LINEAR = compensated_weight(PACKED, ResidualMask(blocks=torch.tensor([True, False, True, False])))


def experts(n: int, k: int) -> CompensatedWeight:
    w = torch.linspace(-1, 1, EXPERTS * n * k).reshape(EXPERTS, n, k)
    return compensated_weight(weights.quantize_weight(w, nvfp4.global_scale_dec(weights.weight_amax(w))), "all")


W13, W2 = experts(2 * INNER, K), experts(K, INNER)
IDS, TOPK = torch.tensor([[0, 1], [1, 2], [2, 0], [0, 2], [1, 0]]), torch.full((M, 2), 0.5)


def moe(**changes):
    arguments = dict(x=X, w13=W13, w2=W2, topk_weights=TOPK, topk_ids=IDS) | changes
    return w4a4_moe(**arguments)


def test_right_arguments_pass():
    for dtype in (torch.float32, torch.float16, BF16):
        w = W.to(dtype)
        assert dispatch.fake_quantize_weight(w, G).dtype == dtype
        assert w4a4_linear(X.to(dtype), LINEAR, bias=torch.zeros(N, dtype=dtype)).dtype == dtype
    assert w4a4_linear(X.reshape(1, M, K), LINEAR, out_dtype=BF16).shape == (1, M, N)
    assert w4a4_linear(X[0], LINEAR).shape == (N,)
    assert w4a4_linear(X[:0], LINEAR).shape == (0, N)
    assert moe().shape == (M, K)
    assert moe(x=X[:0], topk_ids=IDS[:0], topk_weights=TOPK[:0]).shape == (0, K)
    assert moe(topk_ids=IDS.int(), stats2=torch.zeros(2, EXPERTS, INNER // 16)).shape == (M, K)
    padded = torch.where(IDS == 2, -1, IDS)
    assert not torch.equal(moe(topk_ids=padded), moe())


def test_a_scale_of_nan_marks_weights_that_hold_nan():
    """The format's own mark: every value of the group becomes NaN, which the layers above report by name."""
    assert dispatch.fake_quantize_weight(W, torch.tensor(torch.nan)).isnan().all()


@pytest.mark.parametrize("operator", [dispatch.fake_quantize_weight, dispatch.quantize_weight])
@pytest.mark.parametrize(
    ("w", "g", "error", "message"),
    [
        (W, 0.5, TypeError, "the global scale g must be a torch.Tensor of float32, got float 0.5; use torch.tensor"),
        (W, G.double(), ValueError, r"g must be float32, got torch.float64; cast it with .to\(torch.float32\)"),
        (W, -G, ValueError, "g must be positive and finite, got -0.0003"),
        (W, G * 0, ValueError, "g must be positive and finite, got 0; take it from quads_ops.nvfp4.global_scale_dec"),
        (W, G * torch.inf, ValueError, "g must be positive and finite, got inf"),
        (W, G.to("meta"), ValueError, "g is on meta, the operator runs on cpu"),
        (W.tolist(), G, TypeError, "the weight w must be a torch.Tensor of float32 or float16 or bfloat16, got list"),
        (W.double(), G, ValueError, "the weight w must be float32 or float16 or bfloat16, got torch.float64; cast it"),
        (W.int(), G, ValueError, "the weight w must be .* got torch.int32"),
        (W[0], G, ValueError, r"at least two dimensions \[N, K\]"),
    ],
)
def test_weights_and_scales(operator, w, g, error, message):
    with pytest.raises(error, match=message) as raised:
        operator(w, g)
    if w is not W[0] and "dimensions" not in message:
        assert str(raised.value).startswith(operator.__name__)


@pytest.mark.parametrize(
    ("weight", "dtype", "error", "message"),
    [
        (W, torch.float32, TypeError, "weight must be a PackedWeight, from quantize_weight; got Tensor"),
        (PACKED._replace(packed=W), torch.float32, ValueError, "weight.packed must be uint8, got torch.float32"),
        (
            PACKED._replace(block_scales=PACKED.block_scales[:1]),
            BF16,
            ValueError,
            r"block_scales must have shape \[8, 4\]",
        ),
        (PACKED._replace(global_scale_dec=1.0), BF16, TypeError, "weight.global_scale_dec must be a torch.Tensor"),
        (
            PACKED._replace(global_scale_dec=-G),
            BF16,
            ValueError,
            "dequantize_weight: the global scale g must be positive",
        ),
        (PACKED, torch.int8, ValueError, "dtype must be one of torch.float32, .* got dtype torch.int8"),
        (PACKED, None, ValueError, "dtype must be one of"),
    ],
)
def test_packed_weights(weight, dtype, error, message):
    with pytest.raises(error, match=message):
        dispatch.dequantize_weight(weight, dtype)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: dispatch.compensate([1.0]), TypeError, "compensate: x must be a torch.Tensor .* got list"),
        (lambda: dispatch.compensate(X.double()), ValueError, "compensate: x must be .* got torch.float64"),
        (lambda: dispatch.compensate(X.int()), ValueError, "compensate: x must be .* got torch.int32"),
        (lambda: dispatch.compensate(X[0]), ValueError, r"x must have shape \[M, K\], got \[64\]; flatten"),
        (lambda: dispatch.compensate(X, stats=torch.zeros(3)), ValueError, r"stats must have shape \[4\] or \[64\]"),
        (lambda: dispatch.compensate(X, stats=0.0), TypeError, "compensate: stats must be a torch.Tensor"),
        (lambda: dispatch.compensate(X, 0.5), ValueError, 'residual must be None, "all", .* got 0.5'),
        (
            lambda: dispatch.compensate_grouped(X.half().int(), [M], torch.ones(1, 4, dtype=torch.bool)),
            ValueError,
            "compensate_grouped: x must be",
        ),
        (
            lambda: dispatch.compensate_grouped(X, [M], torch.ones(1, 4)),
            ValueError,
            "compensate_grouped: keep must be bool, got torch.float32",
        ),
        (
            lambda: dispatch.compensate_grouped(X, [M, 1], torch.ones(2, 4, dtype=torch.bool)),
            ValueError,
            "do not add up to the 5 rows",
        ),
        (lambda: residual.compensate(X.int(), "w4a4"), ValueError, "floating point dtype, got torch.int32"),
        (lambda: residual.compensate(0.5, "w4a4"), TypeError, "must be a torch.Tensor"),
    ],
)
def test_activations(call, error, message):
    with pytest.raises(error, match=message):
        call()


def quantized(form, **options):
    return lambda: dispatch.quantize_activation(X, form, **options)


ORDER = torch.tensor([3, 1, 0, 2], dtype=torch.int32)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (quantized("all"), TypeError, r"form must be a ResidualForm, from residual_form\(mask, K\); got str 'all'"),
        (quantized(ResidualForm(kept=5)), ValueError, r"form.kept must be an integer from 0 to 4 \(K/16\), got 5"),
        (quantized(ResidualForm(kept=-1)), ValueError, "form.kept must be .* got -1"),
        (quantized(ResidualForm(kept=0.5)), ValueError, "form.kept must be .* got 0.5"),
        (quantized(ResidualForm(2, ORDER.float())), ValueError, "form.order must be int32 or int64, got torch.float32"),
        (quantized(ResidualForm(2, ORDER[:3])), ValueError, r"form.order must have shape \[4\], got \[3\]"),
        (
            quantized(ResidualForm(2, keep=torch.ones(4, dtype=torch.bool))),
            ValueError,
            r"form.keep needs form.kept = 4 \(K/16, every block\), got 2",
        ),
        (quantized(ResidualForm(4, keep=torch.ones(4))), ValueError, "form.keep must be bool"),
        (quantized(ResidualForm(), stats=torch.zeros(4)), ValueError, r"stats must have shape \['any', 4\] or"),
        (
            quantized(ResidualForm(), experts=ExpertRows(torch.tensor([0, M]))),
            ValueError,
            "experts.offsets must be int32, got torch.int64",
        ),
    ],
)
def test_forms(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: w4a4_linear(1.0, LINEAR), TypeError, "w4a4_linear: x must be a torch.Tensor .* got float 1.0"),
        (lambda: w4a4_linear(X.double(), LINEAR), ValueError, "w4a4_linear: x must be .* got torch.float64"),
        (lambda: w4a4_linear(X[:, :32], LINEAR), ValueError, "x has K = 32, the weight has K = 64"),
        (lambda: w4a4_linear(X, PACKED), TypeError, "weight must be a CompensatedWeight, from compensated_weight"),
        (lambda: w4a4_linear(X, W13), ValueError, r"weight.packed must have 2 dimensions, got shape \[3, 64, 32\]"),
        (lambda: w4a4_linear(X, LINEAR, bias=0.5), TypeError, "w4a4_linear: bias must be a torch.Tensor"),
        (lambda: w4a4_linear(X, LINEAR, bias=torch.zeros(3)), ValueError, r"bias must have shape \[8\], got \[3\]"),
        (lambda: w4a4_linear(X, LINEAR, stats=torch.zeros(1, 5)), ValueError, "stats must have shape"),
        (lambda: w4a4_linear(X, LINEAR, out_dtype=torch.int8), ValueError, "out_dtype must be one of"),
        (lambda: moe(w13=LINEAR), ValueError, "w13.packed must have 3 dimensions"),
        (lambda: moe(w2=W13), ValueError, r"w13 \[E, 2I, H\] = \[3, 64, 64\] and w2 .* do not belong together"),
        (lambda: moe(x=X[:, :48]), ValueError, "x has K = 48, the weight has K = 64"),
        (lambda: moe(topk_ids=IDS.float()), ValueError, "topk_ids must be int32 or int64, got torch.float32"),
        (lambda: moe(topk_ids=IDS + 1), ValueError, "topk_ids holds expert 3; there are 3, numbered from 0"),
        (lambda: moe(topk_weights=TOPK[:2]), ValueError, r"topk_weights must have shape \[5, 2\], got \[2, 2\]"),
        (lambda: moe(topk_weights=TOPK.bfloat16()), ValueError, "topk_weights must be float32, got torch.bfloat16"),
        (lambda: moe(expert_map=[0, 1, 2]), TypeError, "expert_map must be a torch.Tensor"),
        (lambda: moe(stats2=torch.zeros(1, 2, 2)), ValueError, r"stats2\): stats must have shape \['any', 3, 2\]"),
    ],
)
def test_products(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: select_mask("a", 0.5), TypeError, "the score must be a 1-D torch.Tensor, got str 'a'"),
        (lambda: select_mask(torch.ones(4), "a"), TypeError, r"ratio must be a number in \[0, 1\], got str 'a'"),
        (lambda: select_mask(torch.ones(4), None), TypeError, "ratio must be a number .* got NoneType None"),
        (lambda: select_mask(torch.ones(4), True), TypeError, "ratio must be a number .* got bool True"),
        (lambda: select_mask(torch.ones(4), float("nan")), ValueError, r"ratio must lie in \[0, 1\], got nan"),
        (lambda: select_mask(torch.ones(4), 1.5), ValueError, "got 1.5"),
        (lambda: select_mask(torch.tensor([1.0, torch.nan]), 0.5), ValueError, "with 1 non-finite entries"),
        (lambda: select_mask(torch.ones(2, 2), 0.5), ValueError, "must be a 1-D tensor"),
        (lambda: select_mask(torch.ones(4), 0.5, "row"), ValueError, "granularity must be one of"),
        (lambda: TokenMask("half"), TypeError, "ratio must be a number .* got str 'half'"),
        (lambda: ResidualMask(blocks=[True]), TypeError, "ResidualMask.blocks must be a torch.Tensor, got list"),
    ],
)
def test_masks(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_messages_stay_short():
    with pytest.raises(TypeError) as raised:
        dispatch.compensate(list(range(10_000)))
    assert len(str(raised.value)) < 200 and re.search(r"\.\.\.", str(raised.value))
