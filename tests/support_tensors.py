"""Inputs on which quantizers go wrong, and a comparison bit for bit."""

from collections.abc import Callable

import torch

SUBNORMAL = 2.0**-140


def _randn(m: int, k: int) -> torch.Tensor:
    return torch.randn(m, k)


def _outliers(m: int, k: int) -> torch.Tensor:
    """A few channels 50 times the rest, as in language models."""
    return torch.randn(m, k) * torch.where(torch.rand(k) < 0.05, 50.0, 1.0)


def _log_scales(m: int, k: int) -> torch.Tensor:
    """Blocks from 2^-30 to 2^10 in one row: most block scales round to 0 or are subnormal."""
    return torch.randn(m, k) * 2.0 ** torch.randint(-30, 10, (m, k // 16)).repeat_interleave(16, -1)


def _zeros(m: int, k: int) -> torch.Tensor:
    return torch.zeros(m, k)


def _signed_zeros(m: int, k: int) -> torch.Tensor:
    return torch.where(torch.rand(m, k) < 0.5, -0.0, 0.0)


def _mostly_zero(m: int, k: int) -> torch.Tensor:
    return torch.randn(m, k) * (torch.rand(m, k) < 0.05)


def _subnormal(m: int, k: int) -> torch.Tensor:
    return torch.randn(m, k) * SUBNORMAL


def _tiny(m: int, k: int) -> torch.Tensor:
    """Rows around 2^-117 * 2688, the floor of the global scale."""
    return torch.randn(m, k) * 2.0 ** torch.randint(-125, -100, (m, 1))


def _huge(m: int, k: int) -> torch.Tensor:
    return torch.rand(m, k).sub(0.5) * 2 * torch.finfo(torch.float32).max


def _ties(m: int, k: int) -> torch.Tensor:
    """Multiples of 1/4, and an amax that makes the row's scale exact: y falls on midpoints of E2M1."""
    x = torch.randint(-24, 25, (m, k)) * 0.25
    x[:, 0] = 2688.0
    x[:, 1::16] = 6.0
    return x


def _random_bits(m: int, k: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, (m, k)).int().view(torch.float32)


def _non_finite(m: int, k: int) -> torch.Tensor:
    """Some rows hold NaN, Inf or -Inf."""
    x = torch.randn(m, k)
    x[0::5, 3] = torch.nan
    x[1::5, k - 1] = torch.inf
    x[2::5, k // 2] = -torch.inf
    return x


ODD_INPUTS: dict[str, Callable[[int, int], torch.Tensor]] = {
    maker.__name__.lstrip("_"): maker
    for maker in (
        _randn,
        _outliers,
        _log_scales,
        _zeros,
        _signed_zeros,
        _mostly_zero,
        _subnormal,
        _tiny,
        _huge,
        _ties,
        _random_bits,
        _non_finite,
    )
}
"""Name -> function of (m, k) that draws FP32 [m, k] from torch's generator; k is a multiple of 16."""

ODD_SHAPES = ((1, 16), (7, 48), (63, 272), (5, 2880))
"""(M, K): below, at and across the tiles of every implementation."""


def neighbours(x: torch.Tensor) -> torch.Tensor:
    """Each FP32 number of x between the number just below and the one just above it."""
    return torch.cat((torch.nextafter(x, torch.tensor(-torch.inf)), x, torch.nextafter(x, torch.tensor(torch.inf))))


def midpoints(values: torch.Tensor) -> torch.Tensor:
    """Of consecutive values, which must be sorted."""
    return (values[1:] + values[:-1]) / 2


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal dtype, shape and bits, -0 apart from 0; all NaN are alike."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape, (actual.dtype, actual.shape)
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[actual.element_size()]
    same = actual.contiguous().view(integer) == expected.contiguous().view(integer)
    if actual.is_floating_point():
        same |= actual.isnan() & expected.isnan()
    where = (~same).nonzero()
    assert not len(where), (
        f"{len(where)} of {same.numel()} differ, first at {where[0].tolist()}: "
        f"{actual[tuple(where[0])].item()} instead of {expected[tuple(where[0])].item()}"
    )
