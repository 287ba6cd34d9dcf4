"""Tile sizes per architecture, and which one a product of given size gets.

The tables were chosen by compiling (`benchmarks/compile_report.py`): the wanted instruction, no spill, tensor memory
within its 512 columns, and enough bytes in flight. None has been timed. `benchmarks/gpu_bench.py --tune` times the
candidates on the GPU at hand and writes the winners to a cache file, which `choose_*` then prefers.

What binds the choice for `native` (found by compiling; Triton says nothing when it falls back to BF16):
  sm_100, sm_103  the M side of a tile must be 128 and the N side at least 16, so few tokens go to the N side;
  sm_120          any tile from 16x64; 128x128 spills.
"""

import functools
import json
import math
import os
from pathlib import Path
from typing import NamedTuple

import triton

TENSOR_MEMORY_COLUMNS = 512


class Tile(NamedTuple):
    """One program's share of a product, and how it is compiled."""

    tokens: int
    weights: int
    """Rows of the weight, which are columns of the output."""
    k: int
    warps: int
    stages: int
    weights_on_m: bool = False
    """The M side of the tensor core's tile holds weights (few tokens) instead of tokens."""


FEW_TOKENS = (16, 32, 64)
"""Token tiles for decoding. Above the last one are the tables for many tokens."""


FEW_ROWS = 128
"""Up to so many rows, an expert's share of padding is worth more than a tile that dequantizes less."""


def _few(*tiles: tuple[int, int, int, int, int]) -> dict[int, tuple[Tile, ...]]:
    table: dict[int, tuple[Tile, ...]] = {}
    for sizes in tiles:
        table[sizes[0]] = table.get(sizes[0], ()) + (Tile(*sizes, weights_on_m=True),)
    return table


# From codes, tokens, weights, k, warps, stages, weights on the M side. Emulated, this is the exact form, which runs on
# demand. Widest first: a wide tile dequantizes its tokens for more weights.
DECODE = {
    "emulated_mma": _few((16, 128, 128, 4, 3), (32, 128, 128, 8, 3), (64, 128, 64, 8, 3)),
    "emulated": _few((16, 256, 128, 8, 4), (16, 128, 128, 4, 4), (32, 256, 64, 8, 4), (64, 256, 64, 8, 3)),
    # Triton 3.6 gives each of the 8 products in a step its own sum in tensor memory.
    "emulated_sm100": _few((16, 128, 64, 4, 4), (32, 128, 64, 4, 3), (64, 64, 64, 4, 3)),
    "native_sm100": _few((16, 128, 128, 4, 6), (32, 128, 256, 4, 4), (64, 128, 256, 8, 3)),
    "native_sm120": _few((16, 64, 256, 4, 4), (32, 64, 128, 4, 4), (64, 64, 128, 4, 3)),
}  # fmt: skip
# From codes, tokens on the M side. The first is the default. Emulated, this is the exact form too.
PREFILL = {
    "emulated_mma": (Tile(128, 128, 64, 8, 3),),
    "emulated": (Tile(128, 256, 64, 8, 3),),
    "emulated_sm100": (Tile(64, 64, 64, 4, 3),),
    "native_sm100": (Tile(128, 128, 256, 8, 3), Tile(128, 128, 128, 8, 4)),
    "native_sm120": (Tile(128, 64, 128, 8, 3), Tile(64, 128, 128, 8, 3)),
}
# From FP16 sums, few tokens: nothing of them is dequantized, so width saves little, and programs that run side by side
# on a multiprocessor read ahead. Scales must be copied asynchronously, as below.
SUMS_DECODE = {
    "emulated_mma": _few((16, 128, 128, 4, 3), (32, 128, 128, 4, 3), (64, 128, 64, 8, 3)),
    "emulated": _few((16, 128, 128, 4, 4), (16, 64, 256, 4, 4), (32, 128, 128, 4, 4), (64, 128, 64, 4, 6)),
    "emulated_sm100": _few((16, 128, 64, 4, 4), (32, 128, 64, 4, 4), (64, 128, 64, 4, 3)),
}
# From FP16 sums, which have 3.6 times the bytes of a weight: a wide side of weights saves traffic. On Hopper scales
# must be copied asynchronously (weights * k >= 2048 * warps), or Triton takes the weight through shared memory. Two
# programs of the tiles with 4 warps fit in a multiprocessor: for outputs that are short of tiles, or of steps along K.
SUMS = {
    "emulated_mma": (Tile(128, 128, 64, 8, 3, True),),
    "emulated": (
        Tile(128, 256, 64, 8, 4, True),
        Tile(64, 256, 64, 4, 4, True),
        Tile(128, 128, 64, 4, 4, True),
    ),
    "emulated_sm100": (Tile(64, 128, 64, 4, 3, True),),
}
INTERPRETER = Tile(64, 64, 128, 4, 1)


def table_name(capability: int, native: bool) -> str:
    """Which table a device of this compute capability (90, 100, ...; 0 in the interpreter) uses."""
    if native:
        if capability // 10 in (10, 11):
            return "native_sm100"
        if capability // 10 == 12:
            return "native_sm120"
        raise ValueError(f"sm_{capability} has no NVFP4 tensor core instruction; use backend emulated")
    if capability // 10 in (10, 11):
        return "emulated_sm100"
    # What has neither Hopper's nor data-center Blackwell's products keeps operands and sums in registers: less fits.
    return "emulated_mma" if capability // 10 in (8, 12) else "emulated"


def check_native(tile: Tile, capability: int) -> None:
    """Raise ValueError for a tile that Triton would silently multiply in BF16 on this architecture."""
    if table_name(capability, native=True) != "native_sm100":
        return
    m, n = (tile.weights, tile.tokens) if tile.weights_on_m else (tile.tokens, tile.weights)
    if m != 128 or n < 16:
        raise ValueError(
            f"{tile}: on sm_{capability} the M side must be 128 and the N side at least 16, here {m} and {n}; "
            "any other tile silently falls back to BF16"
        )


def rows_per_expert(pairs: int, experts: int) -> int:
    """Average rows of an expert in use. The shape decides, not the routing: that is known to the device alone."""
    return math.ceil(pairs / max(1, min(pairs, experts)))


def local_pairs(pairs: int, experts: int, everywhere: int | None) -> int:
    """Expected (token, expert) pairs of a rank that has `experts` of the experts there are everywhere; None: all."""
    return pairs if everywhere is None else math.ceil(pairs * experts / max(everywhere, experts, 1))


def dense_candidates(capability: int, native: bool, tokens: int, sums: bool = False) -> tuple[Tile, ...]:
    """Tiles for a product with this many tokens, from codes or from sums."""
    if capability == 0:
        return (INTERPRETER._replace(weights_on_m=sums or tokens <= FEW_TOKENS[-1]),)
    name = table_name(capability, native)
    few, many = (SUMS_DECODE, SUMS) if sums else (DECODE, PREFILL)
    return next((few[name][size] for size in FEW_TOKENS if tokens <= size), many[name])


def grouped_candidates(capability: int, native: bool, pairs: int, experts: int, sums: bool = False) -> tuple[Tile, ...]:
    """Tiles for `pairs` (token, expert) pairs spread over `experts` experts.

    The last block of an expert's rows is half empty on average: few rows get the tile of the fewest tokens first.
    """
    rows = rows_per_expert(pairs, experts)
    found = dense_candidates(capability, native, rows, sums)
    if sums and rows <= FEW_ROWS:
        return tuple(sorted(found, key=lambda tile: tile.tokens))
    return found


def choose_dense(
    capability: int,
    native: bool,
    tokens: int,
    n: int,
    k: int,
    processors: int = 1,
    gpu: str = "",
    sums: bool = False,
) -> Tile:
    """The tile for [tokens, k] x [n, k] on a device with this many multiprocessors: tuned for this GPU, or default."""
    return _choose_dense(capability, native, tokens, n, k, processors, _owner(gpu), sums, tuned_path())


def choose_grouped(
    capability: int,
    native: bool,
    pairs: int,
    experts: int,
    n: int,
    k: int,
    processors: int = 1,
    gpu: str = "",
    sums: bool = False,
) -> Tile:
    """The tile of a grouped product; as `choose_dense`."""
    return _choose_grouped(capability, native, pairs, experts, n, k, processors, _owner(gpu), sums, tuned_path())


def split_k(tile: Tile, tokens: int, n: int, k: int, processors: int, sums: bool = False) -> int:
    """How many programs share one output tile: enough to occupy the processors, a power of two.

    Bounded so that each keeps four steps of K, and so that the FP32 partial sums (8 bytes each to write and read)
    stay below the bytes of the weight they save time on. With many tokens from sums it is steps of the tensor core
    that are saved; each keeps eight of them, and as programs do not exceed the processors, partial sums stay in the L2
    cache.
    """
    programs = math.ceil(n / tile.weights) * math.ceil(tokens / tile.tokens)
    limit = processors // max(programs, 1)
    if sums and tokens > FEW_TOKENS[-1]:
        limit = min(limit, k // (8 * tile.k))
    else:
        limit = min(limit, k // (4 * tile.k), int(k * 0.5625 / (8 * tokens)))
    return 1 << (limit.bit_length() - 1) if limit > 1 else 1


def dense_key(native: bool, tokens: int, n: int, k: int, sums: bool = False) -> str:
    """Products that share a tuned tile: tokens are rounded up to a power of two."""
    return f"dense native={native} sums={sums} tokens={_bucket(tokens)} n={n} k={k}"


def grouped_key(native: bool, pairs: int, experts: int, n: int, k: int, sums: bool = False) -> str:
    return f"grouped native={native} sums={sums} pairs={_bucket(pairs)} experts={experts} n={n} k={k}"


def tuned_path() -> str:
    """The cache file of tuned tiles: $QUADS_TUNED_TILES, or tuned_tiles.json in the user's cache.

    Read once in a process, and again after `save_tuned`, or where the variable names another file. What holds no tuned
    tiles raises ValueError in `choose_*` and `save_tuned`; a file that is not there is none.
    """
    return os.environ.get("QUADS_TUNED_TILES") or _default_path(os.environ.get("XDG_CACHE_HOME"))


def save_tuned(gpu: str, winners: dict[str, Tile]) -> Path:
    """Add winners (keys from `dense_key`, `grouped_key`) for a GPU, and return the file."""
    path = Path(tuned_path())
    content = _load(str(path))
    content.setdefault(_owner(gpu), {}).update({key: list(tile) for key, tile in winners.items()})
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_name(f".{path.name}.{os.getpid()}")  # so that no reader sees half of it
    try:
        whole.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
        whole.replace(path)
    finally:
        whole.unlink(missing_ok=True)
    for cached in (_load, _choose_dense, _choose_grouped):
        cached.cache_clear()
    return path


# A product asks on the host before each launch: an answer is kept for its sizes and for the file.
@functools.lru_cache(2**14)
def _choose_dense(capability, native, tokens, n, k, processors, owner, sums, path) -> Tile:
    candidates = dense_candidates(capability, native, tokens, sums)
    tuned = _tuned(candidates, owner, dense_key(native, tokens, n, k, sums), path)
    return tuned or _widest(candidates, 1, tokens, n, processors)


@functools.lru_cache(2**14)
def _choose_grouped(capability, native, pairs, experts, n, k, processors, owner, sums, path) -> Tile:
    candidates = grouped_candidates(capability, native, pairs, experts, sums)
    tuned = _tuned(candidates, owner, grouped_key(native, pairs, experts, n, k, sums), path)
    groups, rows = min(pairs, experts), rows_per_expert(pairs, experts)
    return tuned or _widest(candidates, groups, rows, n, processors)


def _tuned(candidates: tuple[Tile, ...], owner: str, key: str, path: str) -> Tile | None:
    wanted = _load(path).get(owner, {}).get(key)
    # Only a tile that this version lists: others were never inspected.
    return next((tile for tile in candidates if list(tile) == wanted), None)


def _widest(candidates: tuple[Tile, ...], groups: int, rows: int, n: int, processors: int) -> Tile:
    """The first tile; with weights on the M side the first that still occupies every multiprocessor, else the last."""
    if not candidates[0].weights_on_m:
        return candidates[0]
    programs = (groups * math.ceil(rows / tile.tokens) * (n // tile.weights) for tile in candidates)
    return next((tile for tile, count in zip(candidates, programs, strict=True) if count >= processors), candidates[-1])


def _bucket(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()


def _owner(gpu: str) -> str:
    return f"{gpu} triton {triton.__version__}"


@functools.cache
def _default_path(cache_home: str | None) -> str:
    return str(Path(cache_home or Path.home() / ".cache") / "quads" / "tuned_tiles.json")


@functools.cache
def _load(path: str) -> dict:
    try:
        content = json.loads(Path(path).read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ValueError(f"{_no_tiles(path)} ({error})") from error
    if not isinstance(content, dict) or not all(isinstance(tiles, dict) for tiles in content.values()):
        raise ValueError(_no_tiles(path))
    return content


def _no_tiles(path: str) -> str:
    return (
        f"{path} holds no tuned tiles; delete it, set QUADS_TUNED_TILES to another file, or write it anew with "
        "benchmarks/gpu_bench.py --tune"
    )
