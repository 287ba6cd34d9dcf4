"""Values read straight from safetensors files, in pieces that are smaller than the tensors."""

import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from quads_recipe import stored_tensors
from quads_recipe.stored_tensors import equal, not_finite, pieces

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool)


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    monkeypatch.setattr(stored_tensors, "PIECE", 7)


def saved(folder, **tensors):
    save_file(tensors, folder / "t.safetensors", {"format": "pt"})
    return stored_tensors.stored_tensors(folder / "t.safetensors")


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_values_are_those_that_safetensors_reads(tmp_path, dtype):
    tensors = {f"t{n}": torch.arange(n).to(dtype) for n in (0, 1, 6, 7, 8, 50)} | {"m": torch.ones(3, 5).to(dtype)}
    stored = saved(tmp_path, **tensors)
    assert stored.keys() == tensors.keys()
    for name, tensor in load_file(tmp_path / "t.safetensors").items():
        read = [piece.clone() for piece in pieces(stored[name])]
        assert all(0 < len(piece) <= 7 for piece in read)
        flat = torch.cat(read) if read else torch.empty(0, dtype=dtype)
        assert flat.dtype == dtype and torch.equal(flat.double(), tensor.flatten().double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 6, 7, 19])
def test_one_value_in_the_last_place_counts(tmp_path, dtype, value, place):
    fine, bad = torch.ones(20), torch.ones(20)
    bad[place] = value
    stored = saved(tmp_path, fine=fine.to(dtype), bad=bad.to(dtype))
    assert not not_finite(stored["fine"], torch.bfloat16)
    # Integers hold neither, and this FP8 no infinity.
    assert not_finite(stored["bad"], torch.bfloat16) != bad.to(dtype).double().isfinite().all()


def test_rounding_may_make_it_infinite(tmp_path):
    [large] = saved(tmp_path, large=torch.tensor([1.0, -1e5])).values()
    assert not_finite(large, torch.float16) and not not_finite(large, torch.bfloat16)


def test_equal_by_value(tmp_path):
    a = torch.arange(20.0)
    other = a.clone()
    other[19] += 1
    nan = a.clone()
    nan[3] = math.nan
    zero = a.clone()
    zero[0] = -0.0
    stored = saved(tmp_path, a=a, same=a.clone(), bf16=a.bfloat16(), zero=zero, other=other, nan=nan, nan2=nan.clone())
    assert all(equal(stored["a"], stored[name]) for name in ("same", "bf16", "zero"))
    assert not equal(stored["a"], stored["other"]) and not equal(stored["a"], stored["nan"])
    assert equal(stored["nan"], stored["nan2"])
    [short] = saved(tmp_path, short=a[:19].clone()).values()
    assert not equal(stored["a"], short)


def test_a_file_that_becomes_shorter(tmp_path):
    [tensor] = saved(tmp_path, t=torch.ones(20)).values()
    with open(tensor.file, "r+b") as file:
        file.truncate(tensor.offset + 10)
    with pytest.raises(OSError, match="has become shorter"):
        not_finite(tensor, torch.float32)
