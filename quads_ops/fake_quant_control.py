"""What the fake-quantized modules of one model share: the mode, and the proof that each of them ran."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from quads_ops import dispatch
from quads_ops.settings import ACTOR_MODES, SettingsError


class NotFakeQuantized(RuntimeError):
    """A module that should have multiplied with fake-quantized weights did not."""


class FakeQuantControl:
    """One per converted model.

    Args:
        names: the converted modules, in the model's order.
        mode: `w4a16`, `w4a4`, or `none` (full precision for now; see `use_mode`).
        recompute: recompute fake-quantized weights in backward instead of keeping them. False where gradient
            checkpointing recomputes the whole layer anyway.
    """

    def __init__(self, names: Sequence[str], mode: str, *, recompute: bool = True):
        self.names = tuple(names)
        self.recompute = recompute
        self.mode = _checked(mode)
        self.runs: Counter[str] = Counter()
        """Module -> how often its forward ran fake-quantized since `start`. Gradient checkpointing counts twice."""
        self._detached = False

    @contextmanager
    def use_mode(self, mode: str) -> Iterator[None]:
        """Run with another mode: `none` multiplies with the full-precision weights. Touches no parameter, no RNG."""
        previous, self.mode = self.mode, _checked(mode)
        try:
            yield
        finally:
            self.mode = previous

    @contextmanager
    def detached(self) -> Iterator[None]:
        """Multiply with the same weights, but let no gradient reach them: for gradients of activations alone.

        Without it their fake-quantized copies would be kept until the whole backward is over, because what lets go of
        them is the arrival of their gradient.
        """
        previous, self._detached = self._detached, True
        try:
            yield
        finally:
            self._detached = previous

    def weight(self, parameter: torch.Tensor) -> torch.Tensor:
        """The weight that a forward is to multiply with."""
        return parameter.detach() if self._detached else parameter

    def start(self) -> None:
        """Forget the runs counted so far; call before a forward."""
        self.runs.clear()

    def check(self) -> None:
        """Raise NotFakeQuantized unless every converted module ran fake-quantized since `start` (mode none: no module).

        Something that replaces a module's forward (a fused kernel, another patch) would otherwise train in full
        precision without a word.
        """
        expected = () if self.mode == "none" else self.names
        missing = [name for name in expected if not self.runs[name]]
        if missing:
            raise NotFakeQuantized(
                f"{len(missing)} of {len(self.names)} converted modules did not run fake-quantized in this forward: "
                f"{', '.join(missing[:8])}. Something bypasses their forward; switch off fused kernels "
                "(model.use_liger, model.use_fused_kernels) or exclude the modules"
            )
        if self.mode == "none" and self.runs:
            raise NotFakeQuantized(f"ran fake-quantized in mode none: {', '.join(sorted(self.runs)[:8])}")

    def activation(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The input of a quantized product, [..., K]: as it is, or in mode w4a4 quantized per token, in `dtype`."""
        return _QuantizedActivation.apply(x, dtype) if self.mode == "w4a4" else x


class _QuantizedActivation(torch.autograd.Function):
    """NVFP4 with one scale per token, without residual; straight-through gradient."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        ctx.dtype = x.dtype
        tokens = x.to(dtype).flatten(0, -2) if x.dim() > 1 else x.to(dtype).unsqueeze(0)
        return dispatch.compensate(tokens).to(dtype).view(x.shape)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return grad.to(ctx.dtype), None


def compute_dtype(w: torch.Tensor) -> torch.dtype:
    """The dtype that a product with `w` runs in: autocast's where it is on, else that of `w`."""
    device = w.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else w.dtype


def _checked(mode: str) -> str:
    if mode not in ACTOR_MODES:
        raise SettingsError("quads.actor.mode", mode, f"must be one of {', '.join(ACTOR_MODES)}")
    return mode
