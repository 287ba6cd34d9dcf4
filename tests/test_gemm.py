"""W4A4 products as the project calls them: residual forms, reordered weights, the torch reference, the operators."""

import pytest
import support_gemm
import torch

from quads_ops import gemm
from quads_ops.gemm import compensated_weight, reorder_weight, residual_form, w4a4_linear, w4a4_moe
from quads_ops.residual import ResidualMask, TokenMask, compensate
from quads_ops.residual_layout import reorder_columns, residual_of
from quads_ops.weights import dequantize_weight

K = 160


def block_mask(*kept: int) -> ResidualMask:
    return ResidualMask(blocks=torch.tensor([block in kept for block in range(K // 16)]))


MODES = {
    "plain": None,
    "all": "all",
    "blocks": block_mask(7, 2, 4),
    "channels": ResidualMask(channels=torch.arange(K) % 3 == 0),
    "no block": block_mask(),
    "every block": block_mask(*range(K // 16)),
}


def test_a_mask_of_blocks_becomes_a_prefix():
    form = residual_form(MODES["blocks"], K)
    assert form.kept == 3 and form.order.tolist() == [2, 4, 7, 0, 1, 3, 5, 6, 8, 9] and form.order.dtype == torch.int32


@pytest.mark.parametrize("mode", MODES)
def test_a_form_stands_for_its_mode(mode):
    x = torch.randn(5, K)
    back = residual_of(residual_form(MODES[mode], K), K)
    assert torch.equal(compensate(x, "w4a4", back), compensate(x, "w4a4", MODES[mode]))


def test_experts_have_their_own_orders():
    masks = [block_mask(1, 2), block_mask(0, 9)]
    form = residual_form(masks, K)
    assert form.kept == 2 and form.order[:, :2].tolist() == [[1, 2], [0, 9]]
    for expert, mask in enumerate(masks):
        assert torch.equal(residual_of(form, K, expert).blocks, mask.blocks)


@pytest.mark.parametrize(
    ("residual", "message"),
    [
        (TokenMask(0.5), "ratio 1"),
        ([block_mask(1), block_mask(1, 2)], "equally many"),
        ([block_mask(1), MODES["channels"]], "all of blocks or all of channels"),
        (ResidualMask(blocks=torch.ones(3, dtype=torch.bool)), "needs 10 entries, got 3"),
        ([], "one per expert"),
        ("some", "one per expert"),
    ],
)
def test_wrong_residuals_are_refused(residual, message):
    with pytest.raises(ValueError, match=message):
        residual_form(residual, K)


@pytest.mark.parametrize("lead", [(), (3,)])
def test_reordering_moves_blocks_and_changes_none(lead):
    w = support_gemm.weight(*lead, 24, K)
    order = torch.stack([torch.randperm(K // 16) for _ in range(3)]) if lead else torch.randperm(K // 16)
    moved = dequantize_weight(reorder_weight(w, order)).unflatten(-1, (-1, 16))
    source = dequantize_weight(w).unflatten(-1, (-1, 16))
    for expert in range(3) if lead else [...]:
        line = order[expert] if lead else order
        assert torch.equal(moved[expert], source[expert][:, line])
    back = reorder_weight(reorder_weight(w, order), torch.argsort(order, -1))
    assert torch.equal(back.packed, w.packed) and torch.equal(back.block_scales, w.block_scales)


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (torch.zeros(K // 16).long(), "permutation"),
        (torch.arange(3), "has shape"),
        (torch.zeros(2, K // 16).long(), "has shape"),
    ],
)
def test_wrong_orders_are_refused(order, message):
    with pytest.raises(ValueError, match=message):
        reorder_weight(support_gemm.weight(24, K), order)


@pytest.mark.parametrize("mode", MODES)
def test_linear_is_the_product_of_compensated_activations(mode):
    x, w, bias = torch.randn(2, 3, K), support_gemm.weight(24, K), torch.randn(24)
    y = w4a4_linear(x, compensated_weight(w, MODES[mode]), bias=bias, backend="torch")
    assert y.shape == (2, 3, 24)
    values = compensate(x.view(6, K), "w4a4", MODES[mode]).double()
    support_gemm.assert_product(y.view(6, 24), values, support_gemm.weight_values(w), bias.double())


def test_more_residual_is_closer_to_the_unquantized_product():
    x, w = torch.randn(64, K), support_gemm.weight(24, K)
    exact = x @ dequantize_weight(w).t()
    errors = [
        (w4a4_linear(x, compensated_weight(w, mode), backend="torch") - exact).norm()
        for mode in (None, block_mask(*range(5)), "all")
    ]
    assert errors[2] < 0.2 * errors[0] and errors[2] < errors[1] < 0.9 * errors[0]


@pytest.mark.parametrize("mode", ["all", "blocks", "channels"])
def test_statistics_are_in_source_order(mode):
    x, w = torch.randn(4, K), compensated_weight(support_gemm.weight(24, K), MODES[mode])
    stats, expected = torch.zeros(2, K // 16), torch.zeros(K // 16)
    w4a4_linear(x, w, stats=stats, backend="torch")
    compensate(x, "w4a4", None, stats=expected)
    assert torch.allclose(stats.sum(0), expected)


def experts(mode2):
    w13, w2 = support_gemm.weight(4, 2 * 80, K), support_gemm.weight(4, K, 80)
    ids, weights = torch.stack([torch.randperm(4)[:2] for _ in range(6)]).int(), torch.rand(6, 2)
    return torch.randn(6, K), compensated_weight(w13, MODES["blocks"]), compensated_weight(w2, mode2), weights, ids


def test_experts_equal_one_expert_at_a_time():
    masks = [ResidualMask(blocks=torch.arange(5) % 3 == e % 2) for e in range(4)]
    masks = [mask if int(mask.blocks.sum()) == 2 else ResidualMask(blocks=torch.arange(5) < 2) for mask in masks]
    x, w13, w2, weights, ids = experts(masks)
    y = w4a4_moe(x, w13, w2, weights, ids, backend="torch")
    x13 = reorder_columns(compensate(x, "w4a4", MODES["blocks"]), w13.form)
    for token in range(6):
        expected = torch.zeros(K)
        for slot, expert in enumerate(ids[token].tolist()):
            gate, up = (x13[token] @ dequantize_weight(w13.weight)[expert].t()).chunk(2)
            hidden = compensate((torch.nn.functional.silu(gate) * up)[None], "w4a4", masks[expert])
            hidden = reorder_columns(hidden, w2.form, expert)
            expected += weights[token, slot] * (hidden @ dequantize_weight(w2.weight)[expert].t())[0]
        assert torch.allclose(y[token], expected, rtol=1e-4, atol=1e-5)


def test_ranks_share_the_sum():
    x, w13, w2, weights, ids = experts("all")
    whole = w4a4_moe(x, w13, w2, weights, ids, backend="torch")
    parts = []
    for rank in range(2):
        mine = slice(2 * rank, 2 * rank + 2)
        expert_map = torch.full((4,), -1, dtype=torch.int32)
        expert_map[mine] = torch.arange(2, dtype=torch.int32)
        local = [gemm.CompensatedWeight(type(w.weight)(*(part[mine] for part in w.weight)), w.form) for w in (w13, w2)]
        parts.append(w4a4_moe(x, *local, weights, ids, expert_map=expert_map, backend="torch"))
    assert torch.allclose(parts[0] + parts[1], whole, rtol=1e-5, atol=1e-6)


def test_w13_needs_one_form():
    x, w13, w2, weights, ids = experts("all")
    bad = gemm.CompensatedWeight(w13.weight, residual_form([block_mask(1)] * 4, K))
    with pytest.raises(ValueError, match="one residual form"):
        w4a4_moe(x, bad, w2, weights, ids, backend="torch")


def test_operators_are_well_formed():
    x, w = torch.randn(4, K), compensated_weight(support_gemm.weight(24, K), MODES["blocks"])
    stats = torch.zeros(1, K // 16)
    args = (x, *w.weight, w.form.order, None, stats, torch.randn(24), w.form.kept, torch.bfloat16, None, "torch")
    torch.library.opcheck(torch.ops.quads.w4a4_linear.default, args)
    x, w13, w2, weights, ids = experts("all")
    args = (
        x, *w13.weight, *w2.weight, weights, ids, None, w13.form.order, None, stats, None, None, None,
        w13.form.kept, w2.form.kept, torch.float32, False, "torch",
    )  # fmt: skip
    torch.library.opcheck(torch.ops.quads.w4a4_moe.default, args)


def test_few_tokens_of_experts_lie_in_memory_as_the_fake_says():
    x, w13, w2, weights, ids = experts("all")
    for tokens in (0, 1, 2):
        out = w4a4_moe(x[:tokens], w13, w2, weights[:tokens], ids[:tokens], backend="torch")
        assert out.stride() == (x.shape[1], 1)


def test_compiles_into_one_graph():
    w = compensated_weight(support_gemm.weight(24, K), MODES["blocks"])
    x, stats = torch.randn(4, K), torch.zeros(1, K // 16)

    def layer(x):
        return w4a4_linear(x, w, stats=stats, backend="torch") * 2

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)(x)
    once = stats.clone()
    assert once.gt(0).all()
    assert torch.equal(compiled, layer(x)) and torch.allclose(stats, 2 * once)
