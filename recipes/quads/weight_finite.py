"""Weights that are NaN or infinite end the run at the next sync, by name; both sides would quantize them alike."""

from __future__ import annotations

import torch


class NonFiniteWeightsError(RuntimeError):
    """Names the parameters and the remedy."""


class FiniteCheck:
    """Gathers what tensors hold as they pass by, and waits for the device once, at the end."""

    def __init__(self):
        self._names: list[str] = []
        self._flags: list[torch.Tensor] = []

    @torch.no_grad()
    def add(self, name: str, tensor: torch.Tensor) -> None:
        """tensor: any shape and dtype; one that can't hold a NaN is left out."""
        if not tensor.is_floating_point() or not tensor.numel():
            return
        self._names.append(name)
        # NaN propagates through both, and neither needs a temporary of the tensor's size.
        self._flags.append(torch.stack([tensor.amin(), tensor.amax()]).isfinite().all())

    def require(self) -> None:
        """Raises NonFiniteWeightsError if one of the tensors is not finite."""
        if not self._flags or bool((flags := torch.stack(self._flags)).all()):
            return
        names = [name for name, fine in zip(self._names, flags.tolist(), strict=True) if not fine]
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        raise NonFiniteWeightsError(
            f"{len(names)} of {len(flags)} parameters of the actor hold NaN or infinity: {', '.join(names[:4])}{more}. "
            "At the first sync the checkpoint (actor_rollout_ref.model.path) holds them, replace it; later training "
            "diverged, resume from an earlier checkpoint with a lower actor_rollout_ref.actor.optim.lr"
        )
