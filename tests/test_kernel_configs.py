"""Tile sizes: which one a product gets, and what is refused."""

import pytest

from quads_kernels import configs
from quads_kernels.configs import Tile

BLACKWELL = (100, 103, 120, 121)
EVERYWHERE = [(capability, False) for capability in (80, 86, 89, 90, *BLACKWELL)]
EVERYWHERE += [(capability, True) for capability in BLACKWELL]


@pytest.fixture(autouse=True)
def _no_tuned_tiles(tmp_path, monkeypatch):
    monkeypatch.setenv("QUADS_TUNED_TILES", str(tmp_path / "tiles.json"))


@pytest.mark.parametrize(("capability", "native"), EVERYWHERE)
@pytest.mark.parametrize("tokens", [1, 16, 17, 64, 65, 4096])
def test_every_size_has_a_tile_that_its_tensor_core_can_use(capability, native, tokens):
    for tile in configs.dense_candidates(capability, native, tokens):
        assert tile.weights_on_m == (tokens <= 64)
        assert not tile.weights_on_m or tile.tokens >= min(tokens, 64)
        # Dots need 16 along K; the emulated form multiplies quarters.
        assert tile.k % 64 == 0 and tile.tokens >= 16 and tile.weights >= 16
        if native:
            configs.check_native(tile, capability)


@pytest.mark.parametrize("capability", [80, 86, 89, 90, *BLACKWELL])
def test_tiles_for_sums_hold_whole_pairs_of_blocks(capability):
    sizes = (*configs.FEW_TOKENS, 4096)
    for tile in (tile for size in sizes for tile in configs.dense_candidates(capability, False, size, sums=True)):
        assert tile.weights_on_m and tile.k % 32 == 0 and tile.tokens >= 16 and tile.weights >= 64
        # Fewer scales are loaded a step ahead, and take the weight through shared memory with them.
        assert capability != 90 or tile.weights * tile.k >= 2048 * tile.warps


def test_outputs_short_of_tiles_get_a_small_one():
    wide, short, narrow = configs.dense_candidates(90, False, 4096, sums=True)
    assert configs.choose_dense(90, False, 4096, 2048, 2048, 132, sums=True) == wide
    assert configs.choose_dense(90, False, 256, 2048, 2048, 132, sums=True) == narrow
    assert configs.choose_grouped(90, False, 4096 * 8, 128, 1536, 2048, 132, sums=True) == wide
    # Blocks of few rows leave less of the last one empty.
    assert configs.choose_grouped(90, False, 100 * 128, 128, 1536, 2048, 132, sums=True) == short


def test_few_tokens_from_sums():
    """Tiles of 64 weights where there are too few of 128, and K shared as from codes: what is saved is waiting."""
    wide, narrow = configs.dense_candidates(90, False, 1, sums=True)
    assert configs.choose_grouped(90, False, 16 * 8, 128, 1536, 2048, 132, sums=True) == wide
    assert configs.choose_grouped(90, False, 8, 128, 1536, 2048, 132, sums=True) == narrow
    assert configs.split_k(narrow, 1, 2048, 4096, 132, sums=True) == 4
    assert configs.dense_candidates(90, False, 33, sums=True)[0].tokens == 64


def test_few_tiles_of_sums_share_k():
    tile = configs.dense_candidates(90, False, 256, sums=True)[-1]
    assert configs.split_k(tile, 256, 2048, 4096, 132, sums=True) == 4
    assert configs.split_k(tile, 4096, 2048, 2048, 132, sums=True) == 1
    for tokens, n, k in [(4096, 2048, 2048), (256, 2048, 768), (65, 512, 8192)]:
        shares = configs.split_k(tile, tokens, n, k, 132, sums=True)
        programs = -(-tokens // tile.tokens) * -(-n // tile.weights)
        assert shares == 1 or (shares * programs <= 132 and k // shares >= 8 * tile.k)


def test_a_rank_expects_its_share_of_the_pairs():
    assert configs.local_pairs(32768, 128, None) == 32768
    assert configs.local_pairs(32768, 16, 128) == 4096
    assert configs.local_pairs(8, 16, 128) == 1 and configs.local_pairs(0, 16, 128) == 0
    # 64 rows an expert here; all pairs would make it 512, and another form and tile.
    assert configs.choose_grouped(90, False, configs.local_pairs(8192, 16, 128), 16, 1536, 2048).tokens == 64


def test_native_needs_blackwell():
    with pytest.raises(ValueError, match="sm_90 has no NVFP4"):
        configs.dense_candidates(90, True, 1)


@pytest.mark.parametrize(
    "tile", [Tile(64, 128, 128, 4, 3), Tile(16, 64, 128, 4, 3, True), Tile(8, 128, 128, 4, 3, True)]
)
def test_tiles_that_fall_back_to_bf16_are_refused(tile):
    with pytest.raises(ValueError, match="silently falls back to BF16"):
        configs.check_native(tile, 100)
    configs.check_native(tile, 120)


def test_experts_get_the_tile_of_their_average_load():
    few = configs.choose_grouped(100, True, 16 * 8, 128, 1536, 2048)
    many = configs.choose_grouped(100, True, 4096 * 8, 128, 1536, 2048)
    assert few.tokens == 16 and few.weights_on_m and many.tokens == 128 and not many.weights_on_m
    # One expert that gets everything is not known to the host, but one that exists is.
    assert configs.choose_grouped(100, True, 512, 1, 1536, 2048).tokens == 128


def test_a_wide_tile_is_taken_where_it_still_fills_the_gpu():
    wide, narrow = (
        configs.choose_dense(90, False, 8, 64 * 256, 2048, 64),
        configs.choose_dense(90, False, 8, 2048, 2048, 64),
    )
    assert wide.weights == 256 and narrow.weights == 128


def test_sharing_k_is_bounded():
    tile = Tile(16, 128, 128, 4, 4, True)
    for tokens, n, k, processors in [
        (1, 2048, 4096, 148),
        (16, 5120, 2048, 148),
        (64, 2048, 768, 148),
        (1, 128, 16, 1),
    ]:
        shares = configs.split_k(tile, tokens, n, k, processors)
        assert shares & (shares - 1) == 0 and shares >= 1
        assert shares == 1 or k // shares >= 4 * tile.k
        assert shares == 1 or 8 * tokens * shares <= 0.5625 * k
        assert shares == 1 or shares * (n // tile.weights) <= processors
    assert configs.split_k(tile, 1, 2048, 4096, 148) == 8
    assert configs.split_k(tile, 1, 2048, 4096, 1) == 1


def test_tuned_tiles_are_kept_per_gpu_and_version(monkeypatch):
    def choose(gpu: str) -> Tile:
        return configs.choose_dense(90, False, 4000, 2048, 2048, gpu=gpu, sums=True)

    default, other, _ = configs.dense_candidates(90, False, 4096, sums=True)
    key = configs.dense_key(False, 4096, 2048, 2048, sums=True)
    assert choose("H200") == default
    configs.save_tuned("H200", {key: other})
    configs.save_tuned("H100", {key: default, configs.dense_key(False, 4096, 2048, 2048): other})
    assert [choose(gpu) for gpu in ("H200", "H100", "B200")] == [other, default, default]
    monkeypatch.setattr(configs.triton, "__version__", "0.0")
    assert choose("H200") == default


def test_another_file_of_tuned_tiles_is_read_at_once(tmp_path, monkeypatch):
    """What a process read and chose is kept for the file that it read."""
    other = configs.dense_candidates(90, False, 4096, sums=True)[1]
    sizes = dict(tokens=4096, n=2048, k=2048, sums=True)
    configs.save_tuned("H200", {configs.dense_key(False, **sizes): other})
    assert configs.choose_dense(90, False, **sizes, gpu="H200") == other
    monkeypatch.setenv("QUADS_TUNED_TILES", str(tmp_path / "none.json"))
    assert configs.choose_dense(90, False, **sizes, gpu="H200") != other
    monkeypatch.delenv("QUADS_TUNED_TILES")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert configs.tuned_path() == str(tmp_path / "quads" / "tuned_tiles.json")


@pytest.mark.parametrize("text", ['{"H200 triton 3', "[]", '{"H200 triton 3.9.0": 5}', "", "\0\xff"])
def test_a_file_of_something_else_is_named(text, tmp_path):
    path = tmp_path / "tiles.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=f"{path} holds no tuned tiles; delete it"):
        configs.choose_dense(90, False, 16, 2048, 2048)
    with pytest.raises(ValueError, match=f"{path} holds no tuned tiles; delete it"):
        configs.save_tuned("H200", {})
    assert path.read_bytes() == text.encode("latin-1")


def test_a_folder_of_tuned_tiles_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("QUADS_TUNED_TILES", str(tmp_path))
    with pytest.raises(ValueError, match="holds no tuned tiles; .* set QUADS_TUNED_TILES to another file"):
        configs.choose_grouped(90, False, 128, 16, 2048, 2048)


def test_tuned_tiles_are_written_as_a_whole(tmp_path, monkeypatch):
    """What can't be written leaves the file of before, and nothing beside it."""
    tile = configs.dense_candidates(90, False, 4096)[0]
    configs.save_tuned("H200", {configs.dense_key(False, 4096, 2048, 2048): tile})
    before = (tmp_path / "tiles.json").read_text()

    def full(path, text):
        path.open("w").write(text[:10])
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(configs.Path, "write_text", full)
        with pytest.raises(OSError, match="No space left"):
            configs.save_tuned("H100", {configs.dense_key(False, 4096, 2048, 2048): tile})
    assert (tmp_path / "tiles.json").read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == ["tiles.json"]


def test_a_tuned_tile_that_is_not_listed_is_ignored():
    key = configs.dense_key(False, 4096, 2048, 2048)
    configs.save_tuned("H200", {key: Tile(256, 256, 64, 8, 3)})
    default = configs.dense_candidates(90, False, 4096)[0]
    assert configs.choose_dense(90, False, 4000, 2048, 2048, gpu="H200") == default


def test_a_kernel_without_the_instruction_is_refused_before_it_runs(monkeypatch):
    """On a GPU: what compiles to a fall-back, or to a trap, must not be launched."""
    import torch

    from quads_kernels import gemm_launch

    class Kernel:
        launched = 0
        ptx = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"

        def fn(self):
            raise AssertionError

        def warmup(self, *args, grid, **options):
            return type("Compiled", (), {"asm": {"ptx": self.ptx}})

        def __getitem__(self, grid):
            def launch(*args, **options):
                self.launched += 1

            return launch

    monkeypatch.setattr(gemm_launch, "capability", lambda device: 100)
    monkeypatch.setattr(torch.cuda, "device", lambda device: gemm_launch.nullcontext())
    kernel, device = Kernel(), torch.device("cuda:0")
    with pytest.raises(RuntimeError, match="compiles for sm_100 without mxf4nvf4"):
        gemm_launch.run(kernel, (1,), device, True, 1.0, TM=64)
    assert kernel.launched == 0
    gemm_launch.run(kernel, (1,), device, False, 1.0, TM=64)
    kernel.ptx = "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16"
    gemm_launch.run(kernel, (1,), device, True, 1.0, TM=64)
    assert kernel.launched == 2
