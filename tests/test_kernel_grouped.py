"""Routed experts: sorting pairs, the grouped products, and both together with SwiGLU and quantization in between."""

import pytest
import support_dot_scaled
import support_gemm
import support_interpreter
import torch
from support_gemm import DEVICE, FORMS, SUMS, activations, assert_product, in_form, weight, weight_values

from quads_kernels import moe
from quads_kernels.expert_sort import SortedPairs, most_blocks, sort_by_expert
from quads_kernels.grouped import add_experts, grouped_gemm
from quads_ops import moe_reference
from quads_ops.gemm import compensated_weight, w4a4_moe
from quads_ops.residual import ResidualMask

in_interpreter = support_interpreter.fixture()

products = pytest.mark.parametrize(
    ("form", "native"),
    [*((form, native) for form in FORMS for native in (False, True)), *((form, False) for form in SUMS)],
)


def routing(tokens: int, topk: int, experts: int) -> torch.Tensor:
    """int32 [tokens, topk]: different experts for each token."""
    ids = [torch.randperm(experts)[:topk] for _ in range(tokens)]
    return torch.stack(ids).int() if ids else torch.zeros(0, topk, dtype=torch.int32)


def half_of(experts: int) -> torch.Tensor:
    """int32 [experts]: an expert map that keeps every other expert, in shuffled order."""
    expert_map = torch.full((experts,), -1, dtype=torch.int32)
    expert_map[torch.randperm(experts)[: experts // 2]] = torch.arange(experts // 2, dtype=torch.int32)
    return expert_map


def keep(k: int, blocks: int) -> torch.Tensor:
    """bool [K/16] with so many random blocks."""
    return (torch.randperm(k // 16) < blocks).to(DEVICE)


def on_device(*tensors):
    return tuple(None if tensor is None else tensor.to(DEVICE) for tensor in tensors)


# -- sorting


@pytest.mark.parametrize(
    ("tokens", "topk", "experts", "block", "mapped", "dtype"),
    [
        (1, 8, 128, 16, False, torch.int32),  # one chunk of pairs
        (16, 8, 128, 16, False, torch.int64),  # exactly one chunk
        (3, 1, 1, 16, False, torch.int32),
        (5, 2, 4, 16, True, torch.int64),
        (300, 8, 128, 64, True, torch.int32),
        (40, 10, 500, 16, False, torch.int64),  # many experts: smaller chunks
    ],
)
def test_sorting_equals_a_stable_sort(tokens, topk, experts, block, mapped, dtype, monkeypatch):
    guard = support_interpreter.GuardedOutputs(monkeypatch)
    ids, expert_map = routing(tokens, topk, experts), half_of(experts) if mapped else None
    ids[0, 0] = -1  # a pair that the router left out
    here = experts // 2 if mapped else experts
    plan = sort_by_expert(ids.to(DEVICE).to(dtype), here, block, *on_device(expert_map))
    guard.check_margins()
    plan = SortedPairs(*(part.cpu() for part in plan))

    local = moe_reference.local_experts(ids, expert_map).flatten()
    members = torch.argsort(torch.where(local < 0, experts, local), stable=True)[: int((local >= 0).sum())]
    place = torch.full_like(local, -1)
    place[members] = torch.arange(len(members))
    counts = torch.bincount(local[local >= 0], minlength=here)
    assert plan.members[: len(members)].tolist() == members.tolist()
    assert plan.place.tolist() == place.tolist()
    assert plan.offsets.tolist() == [0, *counts.cumsum(0).tolist()]
    blocks = [(e, int(plan.offsets[e]) + row) for e in range(here) for row in range(0, int(counts[e]), block)]
    assert list(zip(plan.block_expert.tolist(), plan.block_row.tolist(), strict=True))[: len(blocks)] == blocks
    assert plan.block_expert[len(blocks) :].eq(-1).all()


def test_ids_out_of_range_are_left_out():
    ids = torch.tensor([[0, 7], [3, 99]], dtype=torch.int32, device=DEVICE)
    assert sort_by_expert(ids, 4, 16).place.tolist() == [0, -1, 1, -1]
    expert_map = torch.tensor([1, 0, -1, 9], dtype=torch.int32, device=DEVICE)
    assert sort_by_expert(ids, 4, 16, expert_map).place.tolist() == [0, -1, -1, -1]


def test_ids_and_map_may_have_strides():
    ids, expert_map = routing(9, 3, 8).to(DEVICE), half_of(8).to(DEVICE)
    apart = torch.full((16,), 3, dtype=torch.int32, device=DEVICE)
    apart[::2] = expert_map
    expected = sort_by_expert(ids, 4, 16, expert_map)
    for found in (sort_by_expert(ids.t().contiguous().t(), 4, 16, expert_map), sort_by_expert(ids, 4, 16, apart[::2])):
        assert found.place.tolist() == expected.place.tolist()
        assert found.offsets.tolist() == expected.offsets.tolist()


def test_the_grid_covers_the_worst_routing():
    for pairs, experts, block in [(8, 128, 16), (128, 128, 16), (1000, 8, 64), (33, 2, 16), (1, 1, 128)]:
        # Worst: as many experts as possible have one pair more than full blocks.
        used = min(pairs, experts)
        counts = [1 + (pairs - used) // block // used * block] * used
        for i in range((pairs - sum(counts)) // block):
            counts[i % used] += block
        assert sum(-(-count // block) for count in counts) <= most_blocks(pairs, experts, block)
    assert most_blocks(128, 128, 16) == 128


# -- the grouped product


@products
@pytest.mark.parametrize(("mapped", "k"), [(False, 144), (True, 144), (False, 192)])
def test_grouped_product_equals_fp64_within_the_bound(native, form, mapped, k, monkeypatch):
    if native:
        support_dot_scaled.repair(monkeypatch)
    tokens, topk, experts, n = 9, 3, 8, 40
    ids, expert_map = routing(tokens, topk, experts), half_of(experts) if mapped else None
    here = experts // 2 if mapped else experts
    ids[:, 0] = 5 if not mapped else int(expert_map.argmax())  # one expert has every token
    a = in_form(activations(tokens, k, 4), form)
    w, pair_weight = weight(here, n, k), torch.rand(tokens * topk)
    tile = support_gemm.tile(form, native)
    guard = support_interpreter.GuardedOutputs(monkeypatch)
    plan = sort_by_expert(ids.to(DEVICE), here, tile.tokens, *on_device(expert_map))
    options = dict(out_dtype=torch.float32, native=native, topk=topk)
    out = grouped_gemm(a.rows, w, plan, tile, pair_weight=pair_weight.to(DEVICE), **options).cpu()
    guard.check_margins()

    members, offsets = plan.members.cpu(), plan.offsets.tolist()
    values = weight_values(w)
    for expert in range(here):
        pairs = members[offsets[expert] : offsets[expert + 1]].long()
        x = a.values[pairs // topk] * pair_weight[pairs, None].double()
        assert_product(out[offsets[expert] : offsets[expert + 1]], x, values[expert])
    assert out[offsets[-1] :].isnan().all(), "rows of no expert were written"


def test_adding_experts_is_the_ordered_fp32_sum(monkeypatch):
    guard = support_interpreter.GuardedOutputs(monkeypatch)
    ids = routing(7, 4, 8)
    ids[2] = -1  # a token without experts here
    plan = sort_by_expert(ids.to(DEVICE), 8, 16)
    rows = torch.randn(28, 1100, device=DEVICE)
    rows[plan.offsets[-1] :] = torch.nan
    place = plan.place.view(7, 4)
    expected = torch.zeros(7, 1100, device=DEVICE)
    for slot in range(4):
        here = place[:, slot] >= 0
        expected[here] += rows[place[here, slot].long()]
    for dtype in (torch.float32, torch.bfloat16):
        support_interpreter.same_bits(add_experts(rows, plan, 7, dtype), expected.to(dtype))
    guard.check_margins()


# -- all of it


def stages(a, w13, w2, weights, ids, expert_map, hidden, tile, native):
    """`fused_moe` with what its steps hand on: (out, gate|up, the quantized product, rows before the sum)."""
    seen = {}

    def spy(name, function):
        def call(*args, **kwargs):
            seen.setdefault(name, []).append(function(*args, **kwargs))
            return seen[name][-1]

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moe, "grouped_gemm", spy("gemm", moe.grouped_gemm))
        patch.setattr(moe.activation, "quantize", spy("quantize", moe.activation.quantize))
        patch.setattr(moe, "sort_by_expert", spy("sort", moe.sort_by_expert))
        out = moe.fused_moe(
            a.rows, w13, w2, weights.to(DEVICE), ids.to(DEVICE), hidden=hidden, native=native, out_dtype=torch.float32,
            hidden_dtype=torch.bfloat16, expert_map=expert_map, tile=tile,
        )  # fmt: skip
    return out.cpu(), *seen["gemm"], *seen["quantize"], *seen["sort"]


@pytest.mark.parametrize(
    ("form", "native", "tokens", "kept13", "kept2", "mapped"),
    [
        *(
            (form, native, *sizes)
            for form, *sizes in [
                ("few tokens", 1, 5, 2, False),
                ("few tokens", 5, 0, 0, False),
                ("few tokens", 5, 3, 2, True),
                ("many tokens", 20, 3, 3, False),
            ]
            for native in (False, True)
        ),
        ("many sums", False, 20, 3, 3, True),
        ("few sums", False, 3, 0, 0, False),
    ],
)
def test_fused_experts_step_by_step(form, native, tokens, kept13, kept2, mapped, monkeypatch):
    """Each step against its reference on the very values that the step before handed on."""
    if native:
        support_dot_scaled.repair(monkeypatch)
    experts, topk, hidden, inner = 4, 2, 80, 48
    ids, weights = routing(tokens, topk, experts), torch.rand(tokens, topk)
    ids = torch.where(ids == ids[:, :1], 3, torch.where(ids == 3, ids[:, :1], ids))  # one expert has every token
    expert_map = half_of(experts) if mapped else None
    tile = support_gemm.tile(form, native)
    if DEVICE == "cpu":
        tile = tile._replace(tokens=16)  # so that it has several blocks of rows
    here = experts // 2 if mapped else experts
    w13, w2 = weight(here, 2 * inner, hidden), weight(here, hidden, inner)
    a = in_form(activations(tokens, hidden, kept13), form)
    form2 = moe.HiddenResidual(kept2)
    out, gate_up, down, rows, plan = stages(
        a, w13, w2, weights, ids, *on_device(expert_map), form2, tile, native
    )  # fmt: skip
    members, offsets, place = plan.members.cpu().long(), plan.offsets.tolist(), plan.place.cpu().view(tokens, topk)
    gate_up, down = gate_up.cpu(), down.cpu()
    if native and not support_interpreter.INTERPRETED:
        pytest.skip("stage references below are for the interpreter's fixed tile")
    for expert in range(here):
        mine = slice(offsets[expert], offsets[expert + 1])
        # The first product, rounded to BF16.
        exact = a.values[members[mine] // topk] @ weight_values(w13)[expert].t()
        assert (gate_up[mine].double() - exact).abs().le(exact.abs() * 2**-8 + 1e-5).all()
        # The second product, of what was quantized.
        x = support_gemm.decoded(rows, mine, kept2) * weights.flatten()[members[mine], None].double()
        assert_product(down[mine], x, weight_values(w2)[expert])
    # What was quantized is SwiGLU of the first product.
    total = offsets[-1]
    expected = support_gemm.quantized(moe_reference.gated(gate_up[:total]), kept2)
    assert (support_gemm.decoded(rows, slice(0, total), kept2) - expected.values).abs().le(
        expected.values.abs().amax(-1, keepdim=True) * 0.01
    ).float().mean() > 0.99
    # The sum.
    expected = torch.zeros(tokens, hidden)
    for slot in range(topk):
        found = place[:, slot] >= 0
        expected[found] += down[place[found, slot].long()]
    support_interpreter.same_bits(out, expected)


@pytest.mark.parametrize(("tokens", "mapped"), [(4, False), (40, True)])
def test_experts_equal_the_torch_backend(tokens, mapped):
    """From BF16 tokens to the sum, with masks per expert, against the definition.

    SwiGLU is rounded to BF16 in between, so a difference in the last bit of a product can move a code of a few tokens:
    nearly all must agree closely, and all within the error of one code.
    """
    experts, topk, hidden, inner = 4, 2, 96, 80
    expert_map = half_of(experts) if mapped else None
    here = experts // 2 if mapped else experts
    ids, weights = routing(tokens, topk, experts), torch.rand(tokens, topk)
    masks = [ResidualMask(blocks=keep(inner, 2)) for _ in range(here)]
    w13 = compensated_weight(weight(here, 2 * inner, hidden), ResidualMask(blocks=keep(hidden, 3)))
    w2 = compensated_weight(weight(here, hidden, inner), masks)
    x, weights, ids, expert_map = on_device(torch.randn(tokens, hidden).bfloat16(), weights, ids, expert_map)
    options = dict(expert_map=expert_map, out_dtype=torch.float32)
    expected = w4a4_moe(x, w13, w2, weights, ids, backend="torch", **options)
    out = w4a4_moe(x, w13, w2, weights, ids, backend="emulated", **options)
    scale = expected.abs().amax(-1, keepdim=True)
    error = (out - expected).abs() / scale.clamp(min=1e-6)
    assert (error < 1e-5).float().mean() > 0.9 and error.max() < 0.05
    assert torch.equal(out.eq(0).all(-1), expected.eq(0).all(-1)), "tokens without experts here must stay zero"


@pytest.mark.parametrize("tokens", [3, 66])
def test_experts_add_the_residual_first(tokens, monkeypatch):
    """`w4a4_moe` multiplies in the form that `backends.sums_residual` chooses."""
    ids, weights = routing(tokens, 2, 2), torch.rand(tokens, 2)
    w13, w2 = compensated_weight(weight(2, 2 * 48, 64), "all"), compensated_weight(weight(2, 64, 48), "all")
    x, weights, ids = on_device(torch.randn(tokens, 64).bfloat16(), weights, ids)
    right, asked = moe.grouped_gemm, []

    def spy(rows, *args, **options):
        asked.append(rows.sums is not None)
        return right(rows, *args, **options)

    monkeypatch.setattr(moe, "grouped_gemm", spy)
    chosen, exact = (
        w4a4_moe(x, w13, w2, weights, ids, sum_residual=way, backend="emulated").float() for way in (None, False)
    )
    assert asked == [True, True, False, False] and (tokens == 3 or not torch.equal(chosen, exact))
    # Nearly everything within one BF16 unit; a code of the hidden activation moves here and there.
    error = (chosen - exact).abs() / exact.abs().amax(-1, keepdim=True)
    assert (error <= 2**-8).float().mean() > 0.9 and error.max() < 0.05
