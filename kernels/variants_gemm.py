"""The GEMM kernels that `quads_kernels.configs` may choose, for the compile report.

Shapes are those of Qwen3-30B-A3B (hidden 2048, 128 experts of 768), and K = 2880, which no tile divides.
"""

from quads_kernels import configs
from quads_kernels.configs import Tile
from quads_kernels.expert_sort import BLOCKS_PER_PROGRAM, count_kernel, place_kernel, sum_chunks_kernel
from quads_kernels.gemm import w4a4_gemm_kernel
from quads_kernels.gemm_decode import w4a4_decode_kernel
from quads_kernels.gemm_grid import GROUP
from quads_kernels.gemm_launch import kept_units
from quads_kernels.gemm_shares import REDUCE_COLUMNS, add_shares_kernel
from quads_kernels.gemm_sums import w4a4_sums_kernel
from quads_kernels.grouped import ADD_COLUMNS, add_experts_kernel, w4a4_grouped_kernel
from quads_kernels.variant import Variant

ROW = {"x_ptr": "*u8", "xs_ptr": "*u8", "g_ptr": "*fp32"}
RESIDUAL = {"r_ptr": "*u8", "rs_ptr": "*u8", "kept_units": "i32"}
WEIGHT = {"w_ptr": "*u8", "ws_ptr": "*u8", "gw_ptr": "*fp32"}
SUMS = {"g_ptr": "*fp32", **WEIGHT}
PLAN = {"members_ptr": "*i32", "offsets_ptr": "*i32", "block_expert_ptr": "*i32", "block_row_ptr": "*i32"}


def variants(capability: int) -> list[Variant]:
    """What runs on a device of this compute capability: native where it can be, emulated elsewhere.

    Every tile with residual; without it, which needs fewer registers, only the first and the last. Emulated: from sums,
    which is the choice there, and from codes, which is exact.
    """
    native = capability >= 100
    found = [*_dense(capability, native), *_grouped(capability, native), *_helpers(native)]
    if native:
        # Emulated on Blackwell: only when asked for, to compare.
        few, many = _few(capability, False), _many(capability, False)
        found += [_decode(tile, True, False) for tile in few] + [_experts_in(tile, True, False) for tile in few + many]
        found += [_prefill(tile, True, False) for tile in many]
    return found + _from_sums(capability)


def _from_sums(capability: int) -> list[Variant]:
    few, many, e4m3 = _few(capability, False, sums=True), _many(capability, False, sums=True), capability >= 89
    tiles = dict.fromkeys(few + many)  # some are in both
    found = [make(tile, e4m3) for tile in tiles for make in (_sums, _sums_in, _sums_out)]
    found += [_sums(many[0], e4m3, k=2880, gw_per_row=True), _sums(many[0], e4m3, k=176), _sums(few[0], e4m3, k=2880)]
    return found + [_sums(tile, e4m3, k=4096, share=1024) for tile in (few[0], many[-1])]


def _dense(capability: int, native: bool) -> list[Variant]:
    few, many = _few(capability, native), _many(capability, native)
    found = [_decode(few[0], False, native)] + [_decode(tile, True, native) for tile in few]
    found += [_prefill(tile, True, native) for tile in many]
    found += [_decode(few[0], True, native, k=4096, share=1024), _decode(few[0], True, native, k=2880)]
    if native:
        found += [_prefill(many[0], False, native), _prefill(many[0], True, native, k=2880, gw_per_row=True)]
    return found


def _grouped(capability: int, native: bool) -> list[Variant]:
    many = _many(capability, native)
    tiles = _few(capability, native) + many
    found = [_experts_in(tiles[0], False, native)]
    return found + [_experts_in(tile, True, native) for tile in tiles] + [_experts_out(tile, native) for tile in tiles]


def _few(capability: int, native: bool, sums: bool = False) -> list[Tile]:
    return [tile for size in configs.FEW_TOKENS for tile in configs.dense_candidates(capability, native, size, sums)]


def _many(capability: int, native: bool, sums: bool = False) -> list[Tile]:
    return list(configs.dense_candidates(capability, native, 4096, sums))


def _name(kind: str, tile: Tile, residual: bool | None, native: bool, note: str = "") -> str:
    """residual: None where it is in sums."""
    side = ", weights on M" if tile.weights_on_m else ""
    sizes = f"{tile.tokens}x{tile.weights}x{tile.k}, {tile.warps} warps, {tile.stages} stages{side}"
    held = "sums" if residual is None else "residual" if residual else "plain"
    parts = [kind, "native" if native else "emulated", held, sizes, note]
    return " | ".join(part for part in parts if part)


def _operands(residual: bool) -> tuple[dict[str, str], dict[str, object]]:
    """Types and constants of activations and weight."""
    if residual:
        return {**ROW, **RESIDUAL, **WEIGHT}, {}
    return {**ROW, "kept_units": "i32", **WEIGHT}, {"r_ptr": None, "rs_ptr": None}


def _half(k: int) -> int:
    """KEPT_UNIT where half of the blocks of K are compensated."""
    return kept_units(k // 32)[1]


def _tile(tile: Tile) -> dict[str, object]:
    return dict(TM=tile.tokens, TN=tile.weights, BK=tile.k, WARPS=tile.warps, HW=True)


def _prefill(tile: Tile, residual: bool, native: bool, k: int = 2048, gw_per_row: bool = False) -> Variant:
    types, constants = _operands(residual)
    constants |= dict(bias_ptr=None, N=2048, K=k, KEPT_UNIT=_half(k), GW_PER_ROW=gw_per_row, GROUP=GROUP)
    constants |= dict(NATIVE=native, **_tile(tile))
    note = "" if k == 2048 else f"K={k}"
    return Variant(
        _name("dense", tile, residual, native, note), w4a4_gemm_kernel,
        {**types, "out_ptr": "*bf16", "M": "i32"}, constants, tile.warps, tile.stages, native,
    )  # fmt: skip


def _decode(tile: Tile, residual: bool, native: bool, k: int = 2048, share: int = 0) -> Variant:
    types, constants = _operands(residual)
    constants |= dict(bias_ptr=None, N=2048, K=k, K_SHARE=share or k, KEPT_UNIT=_half(k), GW_PER_ROW=False)
    constants |= dict(NATIVE=native, **_tile(tile))
    note = f"K={k} shared" if share else "" if k == 2048 else f"K={k}"
    out = "*fp32" if share else "*bf16"
    return Variant(
        _name("dense", tile, residual, native, note), w4a4_decode_kernel,
        {**types, "out_ptr": out, "M": "i32"}, constants, tile.warps, tile.stages, native,
    )  # fmt: skip


def _sums(tile: Tile, e4m3: bool, k: int = 2048, gw_per_row: bool = False, share: int = 0) -> Variant:
    """A dense product from sums."""
    note = f"K={k} shared" if share else "" if k == 2048 else f"K={k}"
    constants = dict(
        bias_ptr=None, N=2048, K=k, K_SHARE=share or k, GW_PER_ROW=gw_per_row, GROUP=GROUP, E4M3=e4m3, **_tile(tile)
    )
    return Variant(
        _name("dense", tile, None, False, note), w4a4_sums_kernel,
        {**SUMS, "s_ptr": "*fp16", "out_ptr": "*fp32" if share else "*bf16", "M": "i32"},
        constants, tile.warps, tile.stages,
    )  # fmt: skip


def _sums_in(tile: Tile, e4m3: bool) -> Variant:
    types, constants = {**SUMS, "x_ptr": "*fp16"}, dict.fromkeys(("xs_ptr", "r_ptr", "rs_ptr"))
    return _gate_up(_name("experts gate|up", tile, None, False), tile, False, types, constants, sums=True, e4m3=e4m3)


def _sums_out(tile: Tile, e4m3: bool) -> Variant:
    types, constants = {**SUMS, "x_ptr": "*fp16"}, dict.fromkeys(("xs_ptr", "r_ptr", "rs_ptr"))
    return _down(_name("experts down", tile, None, False), tile, False, types, constants, sums=True, e4m3=e4m3)


def _experts_in(tile: Tile, residual: bool, native: bool) -> Variant:
    return _gate_up(_name("experts gate|up", tile, residual, native), tile, native, *_operands(residual))


def _experts_out(tile: Tile, native: bool) -> Variant:
    """Half of its 48 blocks compensated."""
    return _down(_name("experts down", tile, True, native), tile, native, *_operands(True))


def _gate_up(name: str, tile: Tile, native: bool, types: dict, constants: dict, **form: bool) -> Variant:
    """The first grouped product: tokens gathered, gate and up."""
    form = _grouped_form(tile, native, **form)
    return Variant(
        name, w4a4_grouped_kernel, {"kept_units": "i32", **types, **PLAN, "out_ptr": "*bf16"},
        {**constants, **form, "pair_weight_ptr": None, "N": 1536, "K": 2048, "KEPT_UNIT": _half(2048), "TOPK": 8},
        tile.warps, tile.stages, native,
    )  # fmt: skip


def _down(name: str, tile: Tile, native: bool, types: dict, constants: dict, **form: bool) -> Variant:
    """The second: sorted rows, times the router's weight, FP32."""
    form = _grouped_form(tile, native, **form)
    return Variant(
        name, w4a4_grouped_kernel,
        {"kept_units": "i32", **types, **PLAN, "pair_weight_ptr": "*fp32", "out_ptr": "*fp32"},
        {**constants, **form, "N": 2048, "K": 768, "KEPT_UNIT": _half(768), "TOPK": 0}, tile.warps, tile.stages, native,
    )  # fmt: skip


def _grouped_form(tile: Tile, native: bool, sums: bool = False, e4m3: bool = False) -> dict[str, object]:
    return dict(SUMS=sums, NATIVE=native, WEIGHTS_ON_M=tile.weights_on_m, E4M3=e4m3, **_tile(tile))


def _helpers(native: bool) -> list[Variant]:
    sizes = {"P": "i32", "GLOBAL": "i32", "E": "i32"}
    ids = {"ids_ptr": "*i64", "map_ptr": "*i32"}
    plan = {"members_ptr": "*i32", "place_ptr": "*i32", **{name: PLAN[name] for name in list(PLAN)[1:]}}
    place = dict(BLOCK=16, CHUNK=128, EP=128, BLOCKS_HERE=BLOCKS_PER_PROGRAM)
    epilogue = dict(bias_ptr=None, N=2048, GW_PER_ROW=False, SCALE=1.0 if native else 2.0**20, HW=True)
    shares = {"partial_ptr": "*fp32", "g_ptr": "*fp32", "gw_ptr": "*fp32", "out_ptr": "*bf16", "M": "i32"}
    return [
        Variant("add shares of K", add_shares_kernel, shares,
                dict(SHARES=4, TN=REDUCE_COLUMNS, **epilogue)),
        Variant("add experts", add_experts_kernel,
                {"rows_ptr": "*fp32", "place_ptr": "*i32", "out_ptr": "*bf16", "N": "i32"},
                dict(TOPK=8, TN=ADD_COLUMNS, HW=True)),
        Variant("sort: count", count_kernel, {**ids, "counts_ptr": "*i32", **sizes}, dict(CHUNK=128, EP=128)),
        Variant("sort: sum chunks", sum_chunks_kernel, {"counts_ptr": "*i32", "totals_ptr": "*i32", "CHUNKS": "i32"},
                dict(EP=128, EB=32, CB=64)),
        Variant("sort: place", place_kernel,
                {**ids, "before_ptr": "*i32", "totals_ptr": "*i32", **plan, **sizes, "BLOCKS": "i32"}, place),
        Variant("sort: place, one chunk", place_kernel, {**ids, **plan, **sizes, "BLOCKS": "i32"},
                dict(before_ptr=None, totals_ptr=None, **place)),
    ]  # fmt: skip
