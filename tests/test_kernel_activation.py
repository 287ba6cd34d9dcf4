"""`quads_kernels.activation` against `quads_ops.nvfp4` and `quads_ops.residual`, bit for bit, outputs poisoned."""

from dataclasses import dataclass

import pytest
import support_interpreter
import torch
import triton
import triton.language as tl
from support_interpreter import DEVICE, GuardedOutputs, same_bits, skip_unless_fma_is_exact

from quads_kernels import activation, activation_tile, launch
from quads_kernels.activation import Experts
from quads_kernels.sum_order import in_sum_order
from quads_ops import moe_reference, nvfp4, packed_activation, residual

in_interpreter = support_interpreter.fixture()


@dataclass
class Expected:
    """What the reference says, from one token's blocks in destination order."""

    g: torch.Tensor
    packed: torch.Tensor
    block_scales: torch.Tensor
    residual_packed: torch.Tensor
    residual_block_scales: torch.Tensor
    values: torch.Tensor
    rest: torch.Tensor
    sums: torch.Tensor


def reference(x: torch.Tensor, kept: int, order=None, keep=None) -> Expected:
    m, k = x.shape
    order = torch.arange(k // 16) if order is None else order.long()
    g = residual.token_scale(x.float())
    moved = x.float().unflatten(1, (-1, 16))[:, order].flatten(1)
    codes, scales = nvfp4.quantize(moved, g)
    values = nvfp4.dequantize(codes, scales, g)
    rest = moved - values
    masked = rest
    if keep is not None:
        masked = torch.where(
            keep.repeat_interleave(k // keep.numel()).unflatten(0, (-1, 16))[order].flatten(), rest, 0.0
        )
    head = masked[:, : kept * 16]
    if kept:
        codes_r, scales_r = nvfp4.quantize(head, g)
        values = torch.cat((values[:, : kept * 16] + nvfp4.dequantize(codes_r, scales_r, g), values[:, kept * 16 :]), 1)
    else:
        codes_r, scales_r = torch.zeros(m, 0, dtype=torch.uint8), torch.zeros(m, 0, dtype=torch.uint8)
    back = torch.argsort(order)
    values, rest = (t.unflatten(1, (-1, 16))[:, back].flatten(1) for t in (values, rest))
    packed_r = codes_r[:, 0::2] | codes_r[:, 1::2] << 4
    rows = packed_activation.PackedActivation(g, nvfp4.pack(codes), scales, packed_r, scales_r)
    sums = packed_activation.sums(rows if kept else rows._replace(residual_packed=None))
    return Expected(g, nvfp4.pack(codes), scales, packed_r, scales_r, values, rest, sums)


def check(out: activation.Quantized, expected: Expected, kept: int) -> None:
    same_bits(out.global_scale_dec, expected.g)
    if out.packed is not None:
        same_bits(out.packed, expected.packed)
        same_bits(out.block_scales, expected.block_scales)
        if kept:
            same_bits(out.residual_packed, expected.residual_packed)
            same_bits(out.residual_block_scales, expected.residual_block_scales)
        else:
            assert out.residual_packed is None and out.residual_block_scales is None
    if out.values is not None:
        same_bits(out.values, expected.values.to(out.values.dtype))
    if out.sums is not None:
        same_bits(out.sums, expected.sums)


def of_rows(out: activation.Quantized, mine: torch.Tensor) -> activation.Quantized:
    return activation.Quantized(*(None if t is None else t[mine.to(t.device)] for t in out))


def check_statistics(stats: torch.Tensor, rest: torch.Tensor) -> None:
    """Equal to the reference's sum but for the order of adding: n terms, each below 2^-23 of a sum of positives."""
    rest = torch.where(rest.isnan().any(1, keepdim=True), 0.0, rest).double().square().sum(0)
    expected = rest if stats.shape[-1] == rest.numel() else rest.unflatten(0, (-1, 16)).sum(1)
    torch.testing.assert_close(stats.cpu().double().sum(0), expected, rtol=1e-5, atol=0.0)


def moved(*tensors):
    return tuple(None if t is None else t.to(DEVICE) for t in tensors)


def small_tiles(monkeypatch, rows: int) -> None:
    """Few rows a program, so that slots, loops and tails all happen; the interpreter would take all rows at once."""
    whole = activation.row_tile
    monkeypatch.setattr(activation, "row_tile", lambda *args, **flags: {**whole(*args, **flags), "R": rows})


@pytest.mark.parametrize("dtype", launch.FLOATS, ids=str)
@pytest.mark.parametrize("m", [1, 7, 63])
@pytest.mark.parametrize(("k", "kept"), [(16, 1), (48, 0), (48, 2), (48, 3), (2880, 90)])
def test_equals_the_reference(m, k, kept, dtype, monkeypatch):
    x, order = torch.randn(m, k).to(dtype), torch.randperm(k // 16).int()
    guarded = GuardedOutputs(monkeypatch)
    stats = torch.zeros(2, k // 16, device=DEVICE)
    on_device, order_there = moved(x, order)
    out = activation.quantize(on_device, kept=kept, order=order_there, stats=stats, values=torch.float32, sums=True)
    expected = reference(x, kept, order)
    check(out, expected, kept)
    check_statistics(stats, expected.rest)
    guarded.check_margins()


def hard_inputs() -> dict[str, torch.Tensor]:
    outliers = torch.randn(20, 256).bfloat16() * torch.where(torch.rand(256) < 0.05, 40.0, 1.0).bfloat16()
    tiny = torch.randn(20, 256)
    tiny[0] = 0.0
    tiny[1] = -0.0
    tiny[2, 16:32] = 0.0
    tiny[3, 32:48] *= 1e-7
    for row, factor in enumerate((1e-19, 1e-25, 1e-30, 1e-36, 1e-40, 1e-45, 1e37), start=4):
        tiny[row] *= factor
    values = torch.tensor([0.0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, -2.5])
    ties = values.repeat(20, 16) * torch.exp2(torch.randint(-3, 4, (20, 16)).float()).repeat_interleave(16, 1)
    ties[:, :16] = values * 448  # amax 2688: g is 1 and every product exact, so the residual has ties too
    bad = torch.randn(20, 256).bfloat16()
    bad[2, 5], bad[9, 100], bad[10, 17] = float("nan"), float("inf"), float("-inf")
    bits = torch.randint(-(2**31), 2**31 - 1, (20, 256), dtype=torch.int64).int().view(torch.float32)
    finite_bits = torch.where(bits.abs() < 1e30, bits, 1.0)
    bits16 = torch.randint(-(2**15), 2**15, (20, 256)).to(torch.int16).view(torch.bfloat16)
    return {
        "outliers": outliers, "tiny": tiny, "ties": ties, "bad": bad,
        "bits": bits, "finite_bits": finite_bits, "bits16": bits16,
    }  # fmt: skip


@pytest.mark.parametrize("kept", [0, 7, 16])
@pytest.mark.parametrize("case", ["outliers", "tiny", "ties", "bad", "bits", "finite_bits", "bits16"])
def test_hard_inputs(case, kept, monkeypatch):
    x, order = hard_inputs()[case], torch.randperm(16).int()
    guarded = GuardedOutputs(monkeypatch)
    on_device, order_there = moved(x, order)
    out = activation.quantize(on_device, kept=kept, order=order_there, values=torch.float32, sums=True)
    check(out, reference(x, kept, order), kept)
    guarded.check_margins()


@pytest.mark.parametrize("case", ["tiny", "ties", "finite_bits"])
def test_hard_inputs_with_the_division_of_gpus(case, monkeypatch):
    skip_unless_fma_is_exact()
    monkeypatch.setattr(launch, "HW", True)
    x = hard_inputs()[case]
    check(activation.quantize(x.to(DEVICE), kept=16, values=torch.float32, sums=True), reference(x, 16), 16)


@pytest.mark.parametrize("granularity", ["block", "channel"])
@pytest.mark.parametrize("case", ["outliers", "bad", "tiny"])
def test_masks_zero_the_residual_elsewhere(case, granularity, monkeypatch):
    x = hard_inputs()[case]
    keep = torch.rand(16 if granularity == "block" else 256) < 0.5
    stats = torch.zeros(1, keep.numel(), device=DEVICE)
    guarded = GuardedOutputs(monkeypatch)
    out = activation.quantize(*moved(x), kept=16, keep=keep.to(DEVICE), stats=stats, values=torch.float32, sums=True)
    expected = reference(x, 16, keep=keep)
    check(out, expected, 16)
    mask = residual.ResidualMask(**{f"{granularity}s": keep})
    # A zero of the mask adds +0 to Xq; so does the reference.
    same_bits(out.values, residual.compensate(x, "w4a4", mask))
    if case != "tiny":  # there sums of subnormals lose more than the bound
        check_statistics(stats, expected.rest)
    guarded.check_margins()


@pytest.mark.parametrize("residual_kind", [None, "all"])
@pytest.mark.parametrize("dtype", launch.FLOATS, ids=str)
def test_values_alone_equal_compensate(residual_kind, dtype):
    x = torch.randn(9, 96).bfloat16()
    out = activation.quantize(x.to(DEVICE), kept=6 if residual_kind else 0, values=dtype, packed=False)
    assert out.packed is None and out.residual_packed is None
    same_bits(out.values, residual.compensate(x, "w4a4", residual_kind).to(dtype))


@pytest.mark.parametrize("kept", [0, 2, 6])
def test_sums_alone(kept, monkeypatch):
    x, order = torch.randn(9, 96).bfloat16(), torch.randperm(6).int()
    x[4, 50] = torch.inf
    guarded = GuardedOutputs(monkeypatch)
    out = activation.quantize(*moved(x), kept=kept, order=order.to(DEVICE), packed=False, sums=True)
    assert out.values is out.packed is out.block_scales is out.residual_packed is out.residual_block_scales is None
    check(out, reference(x, kept, order), kept)
    assert out.sums[4].isnan().all() and out.sums[3].isfinite().all()
    guarded.check_margins()


def test_a_sum_is_rounded_once_in_fp16():
    """Against FP64, where a sum that needs more than FP16's 11 bits exists."""
    x = torch.randn(64, 256) * torch.exp2(torch.randint(-6, 3, (64, 16)).float()).repeat_interleave(16, 1)
    out = activation.quantize(x.to(DEVICE), kept=16, sums=True)
    first = nvfp4.unscaled(nvfp4.unpack(out.packed.cpu()), out.block_scales.cpu()).double() / 1024
    second = nvfp4.unscaled(nvfp4.unpack(out.residual_packed.cpu()), out.residual_block_scales.cpu()).double() / 1024
    assert (first.half() == first).all() and (second.half() == second).all()
    exact = first + second
    same_bits(out.sums, in_sum_order(exact.half()))
    assert (exact.half() != exact).any(), "these inputs would not tell rounding from none"


def test_strided_tokens():
    base = torch.randn(30, 320).bfloat16()
    for x in (base[::3, 32:288], base[:, ::2], base.t()[:64, :16], base[5:6].expand(4, -1)):
        check(activation.quantize(x.to(DEVICE), kept=1, values=torch.float32, sums=True), reference(x, 1), 1)


@pytest.mark.parametrize(("slots", "size"), [(1, "block"), (3, "block"), (50, "channel")])
def test_statistics_of_many_programs(slots, size, monkeypatch):
    """Rows are dealt to slots; sums add up over calls, and are equal in every bit when a call is repeated."""
    small_tiles(monkeypatch, 2)
    x, order = torch.randn(13, 96).bfloat16(), torch.randperm(6).int()
    on_device, order_there = moved(x, order)
    n = 6 if size == "block" else 96
    stats, again = torch.zeros(slots, n, device=DEVICE), torch.zeros(slots, n, device=DEVICE)
    for total in (stats, again):
        out = activation.quantize(on_device, kept=4, order=order_there, stats=total)
    expected = reference(x, 4, order)
    check(out, expected, 4)
    check_statistics(stats, expected.rest)
    same_bits(stats, again)
    activation.quantize(on_device[:5], kept=4, order=order_there, stats=stats)
    check_statistics(stats, torch.cat((expected.rest, expected.rest[:5])))


@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize("kept", [0, 37, 600])
def test_rows_too_wide_for_registers(kept, swiglu, monkeypatch):
    small_tiles(monkeypatch, 2)
    k = 9600
    x, order = torch.randn(3, k).bfloat16(), torch.randperm(k // 16).int()
    source = torch.cat((x, torch.randn(3, k).bfloat16()), 1) if swiglu else x
    if swiglu:
        x = swiglu_rows(source)
    guarded = GuardedOutputs(monkeypatch)
    stats = torch.zeros(2, k, device=DEVICE)
    on_device, order_there = moved(source, order)
    flags = dict(kept=kept, order=order_there, stats=stats, swiglu=swiglu, values=torch.float32, sums=True)
    out = activation.quantize(on_device, **flags)
    expected = reference(x, kept, order)
    check(out, expected, kept)
    check_statistics(stats, expected.rest)
    guarded.check_margins()


def expert_rows(rows: int, experts: int) -> tuple[torch.Tensor, Experts]:
    """Some expert for each row but the last (nobody's), with at least one expert that has none."""
    expert = torch.randint(0, experts, (rows,))
    expert[expert == 1] = 0
    expert[-1] = experts
    members = torch.argsort(expert, stable=True).int()
    offsets = torch.cat((torch.zeros(1), torch.bincount(expert, minlength=experts + 1)[:experts].cumsum(0))).int()
    return expert, Experts(*moved(offsets, members))


@pytest.mark.parametrize("with_stats", [False, True])
@pytest.mark.parametrize("k", [96, 9600])
def test_experts_have_their_own_order_and_statistics(k, with_stats, monkeypatch):
    if k == 96:
        small_tiles(monkeypatch, 4)
    rows, count, kept = (26, 5, 3) if k == 96 else (7, 3, 300)
    x = torch.randn(rows, k).bfloat16()
    expert, experts = expert_rows(rows, count)
    order = torch.stack([torch.randperm(k // 16) for _ in range(count)]).int()
    stats = torch.zeros(2, count, k // 16, device=DEVICE) if with_stats else None
    on_device, order_there = moved(x, order)
    guarded = GuardedOutputs(monkeypatch)
    out = activation.quantize(
        on_device, kept=kept, order=order_there, experts=experts, stats=stats, values=torch.float32, sums=True
    )
    for e in range(count):
        mine = expert == e
        expected = reference(x[mine], kept, order[e])
        # A wide row's g is computed for every row, whoever it belongs to.
        check(of_rows(out, mine), expected, kept)
        if with_stats:
            check_statistics(stats[:, e], expected.rest)
    assert (out.packed[-1] == 0xFF).all() and out.values[-1].isnan().all()
    guarded.check_margins()


def test_experts_have_their_own_mask():
    x = torch.randn(12, 64).bfloat16()
    expert, experts = expert_rows(12, 3)
    for size in (4, 64):
        keep = torch.rand(3, size) < 0.5
        out = activation.quantize(x.to(DEVICE), kept=4, keep=keep.to(DEVICE), experts=experts, sums=True)
        for e in range(3):
            check(of_rows(out, expert == e), reference(x[expert == e], 4, keep=keep[e]), 4)


def test_lists_of_experts_may_have_strides():
    x = torch.randn(12, 64).bfloat16()
    expert, experts = expert_rows(12, 3)
    apart = Experts(*(torch.stack((part, torch.zeros_like(part)), 1)[:, 0] for part in experts))
    assert not apart.offsets.is_contiguous() and not apart.members.is_contiguous()
    out = activation.quantize(x.to(DEVICE), kept=4, experts=apart, sums=True)
    for e in range(3):
        check(of_rows(out, expert == e), reference(x[expert == e], 4), 4)


@triton.jit
def swiglu_kernel(gate, up, out, n: tl.constexpr, HW: tl.constexpr):
    i = tl.arange(0, n)
    dtype: tl.constexpr = gate.dtype.element_ty
    g = activation_tile.to_fp32(tl.load(gate + i), HW)
    u = activation_tile.to_fp32(tl.load(up + i), HW)
    tl.store(out + i, activation_tile.cast(activation_tile.swiglu(g, u, dtype, HW), dtype, HW))


def swiglu_rows(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [M, 2K], from the device function alone."""
    gate, up = (half.contiguous() for half in x.chunk(2, 1))
    size = triton.next_power_of_2(gate.numel())
    gate, up = (torch.nn.functional.pad(t.flatten(), (0, size - t.numel())).to(DEVICE) for t in (gate, up))
    out = torch.empty_like(gate)
    swiglu_kernel[(1,)](gate, up, out, size, launch.HW)
    return out[: x.numel() // 2].reshape(len(x), -1).cpu()


@pytest.mark.parametrize("dtype", launch.FLOATS, ids=str)
def test_swiglu_rounds_where_the_reference_does(dtype):
    """After silu and after the product, for every 16-bit gate.

    exp differs in its last bits between libraries; after rounding that moves a few results by one unit at most.
    """
    gate = torch.arange(65536).to(torch.int16).view(torch.float16 if dtype == torch.float32 else dtype).to(dtype)
    x = torch.stack((torch.where(gate.isfinite(), gate, 1.0), torch.randn(65536).to(dtype)), 1)
    expected, actual = moe_reference.gated(x), swiglu_rows(x)
    torch.testing.assert_close(actual, expected, rtol=2.5 * torch.finfo(dtype).eps, atol=torch.finfo(dtype).tiny / 100)
    if dtype != torch.float32:
        assert (actual != expected).float().mean() < 0.002
        once = (torch.nn.functional.silu(x[:, :1].float()) * x[:, 1:].float()).to(dtype)
        usual = (gate.abs() > 0.1) & (gate.abs() < 10)
        assert (once != expected)[usual].float().mean() > 0.1, "these inputs would not tell one rounding from two"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("with_experts", [False, True])
def test_swiglu_is_fused(with_experts, dtype, monkeypatch):
    rows, k, kept = 13, 96, 3
    x = torch.randn(rows, 2 * k).to(dtype)
    hidden = swiglu_rows(x)
    guarded = GuardedOutputs(monkeypatch)
    if not with_experts:
        out = activation.quantize(x.to(DEVICE), kept=kept, swiglu=True, values=torch.float32)
        check(out, reference(hidden, kept), kept)
    else:
        expert, experts = expert_rows(rows, 3)
        order = torch.stack([torch.randperm(k // 16) for _ in range(3)]).int()
        stats = torch.zeros(1, 3, k // 16, device=DEVICE)
        there, order_there = moved(x, order)
        flags = dict(kept=kept, order=order_there, experts=experts, stats=stats, swiglu=True, sums=True)
        out = activation.quantize(there, **flags)
        for e in range(3):
            mine = expert == e
            expected = reference(hidden[mine], kept, order[e])
            check(of_rows(out, mine), expected, kept)
            check_statistics(stats[:, e], expected.rest)
    guarded.check_margins()


def test_no_tokens():
    out = activation.quantize(torch.randn(0, 64, device=DEVICE), kept=2, stats=torch.zeros(2, 4, device=DEVICE))
    assert out.packed.shape == (0, 32) and out.residual_packed.shape == (0, 16)


def test_a_token_does_not_depend_on_its_neighbours():
    x = torch.randn(8, 128).bfloat16()
    alone = activation.quantize(x[3:4].to(DEVICE), kept=5)
    x[[0, 1, 2, 4, 5, 6, 7]] *= 100
    together = activation.quantize(x.to(DEVICE), kept=5)
    for a, b in zip(alone, together, strict=True):
        if a is not None:
            same_bits(b[3:4], a)


def test_bad_arguments_are_named():
    x = torch.randn(4, 64, device=DEVICE)
    order = torch.arange(4, dtype=torch.int32, device=DEVICE)
    offsets = torch.tensor([0, 2, 4], dtype=torch.int32, device=DEVICE)
    for tensor, flags, words in (
        (x[:, :40], {}, "multiple of 16; got 40"),
        (x[0], {}, r"\[M, K\], got \(64,\)"),
        (x.int(), {}, "activations must be .*int32"),
        (x, dict(kept=5), "between 0 and K/16 = 4 blocks, got 5"),
        (x, dict(order=order.long()), "order must be torch.int32"),
        (x, dict(order=order[:3]), r"order must have shape \(4,\), got \(3,\)"),
        (x, dict(kept=2, keep=torch.ones(4, dtype=torch.bool, device=DEVICE)), "set kept=4, not 2"),
        (x, dict(kept=4, keep=torch.ones(5, dtype=torch.bool, device=DEVICE)), "keep needs 4 or 64 entries"),
        (x, dict(kept=4, keep=torch.ones(4, device=DEVICE)), "keep must be torch.bool"),
        (x, dict(stats=torch.zeros(4, device=DEVICE)), r"stats must have shape \(None, 4\), got \(4,\)"),
        (x, dict(stats=torch.zeros(1, 5, device=DEVICE)), "stats needs 4 or 64 entries"),
        (x, dict(experts=Experts(offsets.long())), "experts.offsets must be torch.int32"),
        (x, dict(experts=Experts(offsets), order=order), r"order must have shape \(2, 4\), got \(4,\)"),
        (x, dict(packed=False), "nothing to compute"),
        (x, dict(values=torch.float64), "values must be one of"),
        (x[:, :48], dict(swiglu=True), "multiple of 16; got 24"),
    ):
        with pytest.raises(ValueError, match=words):
            activation.quantize(tensor, **flags)
