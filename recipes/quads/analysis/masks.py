"""The rollout's residual masks, as the emulation in the trainer uses them.

They come from the RPC `quads_masks` (quads_ops.vllm_method.diagnosis), one list of entries per worker, and are put
together here: tensor parallel workers hold parts of K, or some of the experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from quads_ops.residual import Residual, ResidualMask, TokenMask
from quads_ops.vllm_method.names import input_name


@dataclass(frozen=True)
class ExpertMasks:
    """A mask for each expert of a layer: the input of the down projection."""

    keep: torch.Tensor
    """bool [E, K/16] or [E, K]"""
    granularity: str = "block"

    def of(self, expert: int) -> ResidualMask:
        return ResidualMask(**{f"{self.granularity}s": self.keep[expert]})


SiteResidual = Residual | ExpertMasks
Residuals = Mapping[str, SiteResidual]
"""Site -> what is done with its residual."""


class MaskError(RuntimeError):
    """The masks that the rollout reports do not fit the model."""


def uniform(sites: Iterable[str], residual: Residual) -> dict[str, SiteResidual]:
    """The same for every site: None (no compensation), "all" (ratio 1) or a TokenMask."""
    return dict.fromkeys(sites, residual)


def for_expert(residual: SiteResidual, expert: int | None) -> Residual:
    """What `quads_ops.residual.compensate` takes, for a linear (expert None) or the tokens of one expert."""
    if not isinstance(residual, ExpertMasks):
        return residual
    if expert is None:
        raise MaskError("this layer's input has one mask per expert, and the model has no experts there")
    return residual.of(expert)


def from_rollout(workers: Sequence[Sequence[Mapping]]) -> dict[str, SiteResidual]:
    """Site -> residual, from what every worker's `quads_masks` returned.

    Raises:
        MaskError: parts of a mask are missing or disagree.
    """
    parts: dict[str, list[Mapping]] = {}
    for entries in workers:
        for entry in entries:
            parts.setdefault(input_name(entry["module"], entry["stem"]), []).append(entry)
    return {name: _join(name, found) for name, found in parts.items()}


def _join(name: str, entries: list[Mapping]) -> SiteResidual:
    kinds = {entry["residual"] for entry in entries}
    if len(kinds) > 1:
        raise MaskError(f"{name}: the rollout's workers disagree about its residual: {', '.join(sorted(kinds))}")
    first = entries[0]
    if first["residual"] in ("none", "all"):
        return None if first["residual"] == "none" else "all"
    if first["residual"] == "token":
        return TokenMask(first["ratio"], first["granularity"])
    keep = _whole(name, entries)
    if first["experts"] is not None:
        return ExpertMasks(keep, first["granularity"])
    return ResidualMask(**{f"{first['granularity']}s": keep[0]})


def _whole(name: str, entries: list[Mapping]) -> torch.Tensor:
    """bool [masks, entries of the whole K]."""
    first = entries[0]
    experts = sorted({e for entry in entries for e in entry["experts"] or [0]})
    if experts != list(range(len(experts))):
        raise MaskError(f"{name}: the rollout's workers hold masks of the experts {experts} only")
    width = 16 if first["granularity"] == "block" else 1
    keep = torch.zeros(len(experts), first["k"] // width, dtype=torch.bool)
    known = torch.zeros_like(keep)
    for entry in entries:
        rows = entry["experts"] or [0]
        part = torch.frombuffer(bytearray(entry["mask"]), dtype=torch.bool).view(len(rows), -1)
        start = entry["first"] // width
        columns = slice(start, start + part.shape[1])
        if bool((known[rows, columns] & (keep[rows, columns] != part)).any()):
            raise MaskError(f"{name}: the rollout's workers hold different masks of the same input")
        keep[rows, columns] = part
        known[rows, columns] = True
    if not bool(known.all()):
        raise MaskError(f"{name}: the rollout's workers hold only a part of its mask of K = {first['k']}")
    return keep


def to_device(residuals: Residuals, device: torch.device | str) -> dict[str, SiteResidual]:
    """The same residuals with their masks on `device`, where the model computes."""
    return {name: _moved(residual, device) for name, residual in residuals.items()}


def _moved(residual: SiteResidual, device: torch.device | str) -> SiteResidual:
    if isinstance(residual, ExpertMasks):
        return ExpertMasks(residual.keep.to(device), residual.granularity)
    if isinstance(residual, ResidualMask):
        return ResidualMask(**{f"{residual.granularity}s": residual.flags.to(device)})
    return residual
