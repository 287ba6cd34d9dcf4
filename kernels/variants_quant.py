"""The quantizing kernels that launchers choose, for the compile report.

Shapes are those of Qwen3-30B-A3B (hidden 2048, 128 experts of 768), and wider ones of dense models.
"""

from quads_kernels import activation, launch, weight_qdq
from quads_kernels.activation_rows import quantize_parts_kernel, quantize_rows_kernel, row_scale_kernel
from quads_kernels.variant import Variant
from quads_kernels.weight_qdq import weight_decode_kernel, weight_qdq_kernel

ACTIVATION = {
    "x_ptr": "*bf16", "order_ptr": "*i32", "keep_ptr": "*u8", "offsets_ptr": "*i32", "members_ptr": "*i32",
    "g_ptr": "*fp32", "values_ptr": "*fp32", "packed_ptr": "*u8", "scales_ptr": "*u8", "residual_packed_ptr": "*u8",
    "residual_scales_ptr": "*u8", "sums_ptr": "*fp16", "stats_ptr": "*fp32", "M": "i32", "K": "i32", "kept": "i32",
    "stride_m": "i32",
}  # fmt: skip
WEIGHT = {
    "w_ptr": "*bf16", "g_ptr": "*fp32", "values_ptr": "*bf16", "packed_ptr": "*u8", "scales_ptr": "*u8", "N": "i32",
    "K": "i32", "stride_e": "i64", "stride_n": "i32",
}  # fmt: skip


def variants(capability: int) -> list[Variant]:
    """The same for every device, but for the instructions that convert to and from E2M1."""
    hw = launch.arithmetic_of(capability)
    return [*_weights(hw), *_activations(hw)]


def _weights(hw: int) -> list[Variant]:
    packed = ("packed_ptr", "scales_ptr")
    found = [
        _weight(hw, "values", packed, {}),
        _weight(hw, "values fp32", packed, {"w_ptr": "*fp32", "values_ptr": "*fp32"}),
        _weight(hw, "packed", ("values_ptr",), {}),
        _weight(hw, "values and packed", (), {}),
    ]
    rows, blocks, warps = weight_qdq.tile_shape(2048, 2048)
    types = {"packed_ptr": "*u8", "scales_ptr": "*u8", "g_ptr": "*fp32", "values_ptr": "*bf16", "N": "i32", "K": "i32"}
    constants = dict(HW=hw, ROWS=rows, BLOCKS=blocks)
    return [*found, Variant("weight | decode", weight_decode_kernel, types, constants, warps, aligned=("K",))]


def _weight(hw: int, name: str, absent: tuple[str, ...], types: dict[str, str]) -> Variant:
    rows, blocks, warps = weight_qdq.tile_shape(2048, 2048)
    constants = dict(stride_k=1, HW=hw, ROWS=rows, BLOCKS=blocks, **dict.fromkeys(absent))
    given = {name: kind for name, kind in {**WEIGHT, **types}.items() if name not in absent}
    return Variant(
        f"weight | {name}", weight_qdq_kernel, given, constants, warps, aligned=("K", "stride_e", "stride_n")
    )


def _activations(hw: int) -> list[Variant]:
    found = []
    for k, shares in ((768, (0.0,)), (2048, (0.0, 0.25, 0.5, 1.0)), (7168, (0.5, 1.0)), (12288, (0.5,))):
        for share in shares:
            kept = int(share * k // 16)
            found.append(_activation(hw, f"K={k} kept={kept}", k, kept, ordered=0.0 < share < 1.0))
    return [
        *found,
        _activation(hw, "K=2048 kept=64 statistics", 2048, 64, ordered=True, stats="block"),
        _activation(hw, "K=2048 channel mask, statistics", 2048, 128, keep="channel", stats="channel"),
        _activation(hw, "K=2048 kept=0 sums", 2048, 0, sums=True),
        _activation(hw, "K=2048 kept=64 sums", 2048, 64, ordered=True, sums=True),
        _activation(hw, "K=2048 kept=128 sums", 2048, 128, sums=True),
        _activation(hw, "K=2048 values", 2048, 128, values=True),
        _activation(hw, "K=2048 values, block mask, statistics", 2048, 128, keep="block", values=True, stats="block"),
        _activation(hw, "experts K=768 kept=24 swiglu", 768, 24, ordered=True, experts=True, swiglu=True),
        _activation(hw, "experts K=768 kept=48 swiglu, statistics", 768, 48, experts=True, swiglu=True, stats="block"),
        _activation(hw, "experts K=768 kept=24 sums, swiglu", 768, 24, True, experts=True, swiglu=True, sums=True),
        _activation(hw, "K=12288 kept=384 sums", 12288, 384, ordered=True, sums=True),
        _activation(hw, "K=12288 kept=384 statistics", 12288, 384, ordered=True, stats="block"),
        Variant(
            "activation | row scale K=12288", row_scale_kernel,
            {"x_ptr": "*bf16", "g_ptr": "*fp32", "M": "i32", "K": "i32", "stride_m": "i32"},
            dict(stride_k=1, SWIGLU=False, HW=hw, R=1, B=activation.PART_BLOCKS), 4, aligned=("K", "stride_m"),
        ),
    ]  # fmt: skip


def _activation(
    hw: int,
    name: str,
    k: int,
    kept: int,
    ordered: bool = False,
    keep: str = "",
    stats: str = "",
    values: bool = False,
    experts: bool = False,
    swiglu: bool = False,
    sums: bool = False,
) -> Variant:
    tile = activation.row_tile(k, kept, heavy=bool(keep) or swiglu or stats == "channel", statistics=bool(stats))
    warps, registers = tile.pop("num_warps"), tile.pop("maxnreg")
    absent = [
        "members_ptr",
        *(() if ordered else ("order_ptr",)),
        *(() if keep else ("keep_ptr",)),
        *(() if experts else ("offsets_ptr",)),
        *(() if stats else ("stats_ptr",)),
        *(() if values else ("values_ptr",)),
        *(() if sums else ("sums_ptr",)),
        *(("packed_ptr", "scales_ptr") if values or sums else ()),
        *(() if kept and not values and not sums else ("residual_packed_ptr", "residual_scales_ptr")),
    ]
    flags = dict(SWIGLU=swiglu, MASK_CHANNELS=keep == "channel", STATS_CHANNELS=stats == "channel", HW=hw)
    constants = dict(stride_k=1, **flags, **tile, **dict.fromkeys(absent))
    kernel = quantize_rows_kernel
    if "B" in tile:
        kernel, constants["ANY_KEPT"] = quantize_parts_kernel, kept > 0
    else:
        constants["LOOP"] = experts or bool(stats)
    types = {name: kind for name, kind in ACTIVATION.items() if name not in absent}
    aligned = ("K", "stride_m")
    return Variant(f"activation | {name}", kernel, types, constants, warps, aligned=aligned, registers=registers)
