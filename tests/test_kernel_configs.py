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
    configs._load.cache_clear()


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
    candidates = configs.dense_candidates(90, False, 4096)
    key = configs.dense_key(False, 4096, 2048, 2048)
    assert configs.choose_dense(90, False, 4000, 2048, 2048, gpu="H200") == candidates[0]
    configs.save_tuned("H200", {key: candidates[1]})
    configs.save_tuned("H100", {key: candidates[2]})
    assert configs.choose_dense(90, False, 4000, 2048, 2048, gpu="H200") == candidates[1]
    assert configs.choose_dense(90, False, 4000, 2048, 2048, gpu="H100") == candidates[2]
    assert configs.choose_dense(90, False, 4000, 2048, 2048, gpu="B200") == candidates[0]
    monkeypatch.setattr(configs.triton, "__version__", "0.0")
    assert configs.choose_dense(90, False, 4000, 2048, 2048, gpu="H200") == candidates[0]


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
