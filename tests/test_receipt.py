"""Receipts: digests add up over any sharding, notice every changed byte, and a mismatch names its matrices."""

import random
import time

import pytest
import torch

from quads_ops import cpu_qdq, nvfp4, receipt
from quads_ops.receipt import Entry, ReceiptMismatch, combine, compare, digest, entries
from quads_ops.weights import quantize_weight, weight_amax


@pytest.fixture(params=["compiled", "torch"], autouse=True)
def _path(request, monkeypatch):
    """Every test runs on both CPU paths."""
    if request.param == "torch":
        monkeypatch.setattr(cpu_qdq, "takes", lambda x: False)
    elif cpu_qdq.path().name != "compiled":
        pytest.skip(f"no compiled path: {cpu_qdq.path().reason}")


def random_weight(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(packed codes, block scales) of a weight [..., N, K], all bytes random."""
    *leading, k = shape
    packed = torch.randint(0, 256, (*leading, k // 2), dtype=torch.uint8)
    return packed, torch.randint(0, 256, (*leading, k // 16), dtype=torch.uint8)


def as_ints(digests: tuple[torch.Tensor, torch.Tensor]) -> tuple[int, int]:
    return digests[0].item(), digests[1].item()


def splitmix_digest(packed: torch.Tensor, scales: torch.Tensor) -> tuple[int, int]:
    """The digests again, in Python integers."""

    def mix(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    totals = [0, 0]
    for index in range(scales.numel()):
        key = mix((index + 1) * 0x9E3779B97F4A7C15 % 2**64)
        block = bytes(packed.flatten()[8 * index : 8 * index + 8].tolist())
        totals[0] += mix((int.from_bytes(block, "little") + key) % 2**64)
        totals[1] += mix((scales.flatten()[index].item() + key) % 2**64)
    return tuple((t + 2**63) % 2**64 - 2**63 for t in totals)


def test_digest_equals_the_same_in_python_integers():
    packed, scales = random_weight(5, 48)
    assert as_ints(digest(packed, scales)) == splitmix_digest(packed, scales)


def test_any_changed_byte_changes_the_digest():
    """Every byte of a small matrix, to every other value."""
    packed, scales = random_weight(4, 32)
    original = digest(packed, scales)
    for part, tensor in enumerate((packed, scales)):
        size = tensor.numel()
        changed = tensor.repeat(255 * size, 1, 1)
        flat = changed.view(255, size, size)
        flat.diagonal(dim1=1, dim2=2).add_(torch.arange(1, 256, dtype=torch.uint8).unsqueeze(-1))
        other = (packed, scales)[1 - part].expand(255 * size, -1, -1)
        found = digest(*((changed, other) if part == 0 else (other, changed)))
        assert (found[part] != original[part]).all() and found[part].unique().numel() == 255 * size
        assert (found[1 - part] == original[1 - part]).all()


def test_swapped_rows_blocks_and_matrices_change_the_digest():
    packed, scales = random_weight(8, 64)
    original = as_ints(digest(packed, scales))
    rows = torch.tensor([1, 0, *range(2, 8)])
    blocks = packed.view(8, 4, 8)[:, [1, 0, 2, 3]].reshape(8, 32)
    assert as_ints(digest(packed[rows], scales[rows])) != original
    assert digest(blocks, scales)[0] != original[0]
    assert digest(packed.view(4, 64), scales.view(4, 8), full_shape=(4, 128))[0] == original[0]  # only the index counts


@pytest.mark.parametrize("trial", range(20))
def test_shards_add_up(trial):
    """Random rectangles that tile the matrix, cut along N anywhere and along K between blocks."""
    cuts = random.Random(trial)
    n, blocks = cuts.randint(1, 40), cuts.randint(1, 20)
    packed, scales = random_weight(2, n, 16 * blocks)
    rows = sorted({0, n, *cuts.choices(range(n + 1), k=3)})
    columns = sorted({0, blocks, *cuts.choices(range(blocks + 1), k=3)})
    total = [torch.zeros(2, dtype=torch.int64) for _ in range(2)]
    for r0, r1 in zip(rows, rows[1:], strict=False):
        for c0, c1 in zip(columns, columns[1:], strict=False):
            shard = digest(
                packed[:, r0:r1, 8 * c0 : 8 * c1],
                scales[:, r0:r1, c0:c1],
                row0=r0,
                col0=16 * c0,
                full_shape=(n, 16 * blocks),
            )
            total = [t + s for t, s in zip(total, shard, strict=True)]
    for found, whole in zip(total, digest(packed, scales), strict=True):
        assert torch.equal(found, whole)


def test_leading_dimensions_are_matrices_of_their_own():
    packed, scales = random_weight(3, 2, 6, 32)
    together = digest(packed, scales)
    for i in range(3):
        for j in range(2):
            alone = digest(packed[i, j], scales[i, j])
            assert [t[i, j] for t in together] == list(alone)


def test_chunks_do_not_matter(monkeypatch):
    packed, scales = random_weight(3, 50, 64)
    whole = digest(packed, scales)
    monkeypatch.setattr(receipt, "_CHUNK_BLOCKS", 100)
    for found, expected in zip(digest(packed, scales), whole, strict=True):
        assert torch.equal(found, expected)


def test_empty_shards_are_zero():
    packed, scales = random_weight(0, 32)
    assert as_ints(digest(packed, scales, row0=4, full_shape=(4, 32))) == (0, 0)


def test_a_million_parameters_take_under_50_ms():
    packed, scales = random_weight(16, 256, 256)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    times = []
    for _ in range(5):
        start = time.thread_time()  # of this thread alone, so that a busy machine does not matter
        digest(packed, scales)
        times.append(time.thread_time() - start)
    torch.set_num_threads(threads)
    assert min(times) < 0.05


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(row0=3, full_shape=(6, 64)), r"\(4, 32\) at \(3, 0\) lies outside the matrix of shape \(6, 64\)"),
        (dict(col0=48, full_shape=(4, 64)), "lies outside"),
        (dict(row0=-1, full_shape=(4, 64)), "lies outside"),
        (dict(row0=1), "lies outside"),
        (dict(col0=8, full_shape=(4, 64)), "must not cut a block of 16"),
        (dict(full_shape=(4, 40)), "must not cut a block of 16"),
    ],
)
def test_bad_shards(change, message):
    with pytest.raises(ValueError, match=message):
        digest(*random_weight(4, 32), **change)


def test_bad_bytes():
    packed, scales = random_weight(4, 32)
    for wrong in ((packed[:, :8], scales), (packed.int(), scales), (packed, scales.view(torch.float8_e4m3fn))):
        with pytest.raises(ValueError, match="digest needs uint8"):
            digest(*wrong)


# ---- entries


def receipt_of(w: torch.Tensor, names: list[str]) -> dict[str, Entry]:
    packed = quantize_weight(w, nvfp4.global_scale_dec(weight_amax(w)))
    return entries(names, digest(packed.packed, packed.block_scales), packed.global_scale_dec)


def test_equal_weights_compare_equal_and_survive_json():
    import json

    w = torch.randn(2, 32, 64).bfloat16()
    a, b = receipt_of(w, ["x", "y"]), receipt_of(w.clone(), ["x", "y"])
    compare(a, b)
    compare(a, {name: tuple(entry) for name, entry in json.loads(json.dumps(b)).items()})


def test_combine_adds_modulo_2_64():
    a, b = Entry(2**63 - 1, -(2**63), 5), Entry(3, -1, 5)
    assert combine([a, b]) == Entry(-(2**63) + 2, 2**63 - 1, 5)
    with pytest.raises(ReceiptMismatch, match="layer.q: its shards have different global scales"):
        combine([a, Entry(0, 0, 6)], "layer.q")


def test_names_must_match_the_matrices():
    with pytest.raises(ValueError):
        receipt_of(torch.randn(2, 16, 16), ["only one"])


def test_a_mismatch_names_the_matrices_and_what_differs():
    w = torch.randn(4, 16, 32)
    trainer = receipt_of(w, ["a", "b", "c", "d"])
    rollout = dict(trainer)
    rollout["e"] = rollout.pop("a")
    rollout["b"] = rollout["b"]._replace(codes=rollout["b"].codes ^ 1)
    rollout["c"] = rollout["c"]._replace(scales=0, global_scale_bits=0x3F800000)
    with pytest.raises(ReceiptMismatch) as error:
        compare(trainer, rollout)
    text = str(error.value)
    assert "missing in the rollout (1): a;" in text
    assert "unknown to the trainer (1): e;" in text
    assert "different (2): b (codes), c (scales, global_scale_dec " in text and "against 1)" in text
    assert "d" not in text.split("different (2)")[1].split("(")[0]


def test_long_lists_are_cut():
    trainer = {f"m{i:03}": Entry(0, 0, 0) for i in range(100)}
    with pytest.raises(ReceiptMismatch, match=r"missing in the rollout \(100\): m000, .*m007 and 92 more"):
        compare(trainer, {})


def test_a_nan_scale_is_equal_to_itself():
    """Bit patterns are compared, not numbers."""
    w = torch.randn(1, 16, 16)
    w[0, 0, 0] = torch.nan
    compare(receipt_of(w, ["a"]), receipt_of(w, ["a"]))


def test_checksum_tells_receipts_apart_and_ignores_order():
    a = {"x": receipt.Entry(1, 2, 3), "y": receipt.Entry(4, 5, 6)}
    assert receipt.checksum(a) == receipt.checksum(dict(reversed(a.items())))
    assert receipt.checksum(a) != receipt.checksum(a | {"y": receipt.Entry(4, 5, 7)})
    assert 0 <= receipt.checksum(a) < 2**24
