"""In which fields two `quads:` blocks differ: that of a checkpoint and that of the run which goes on from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quads_ops.settings import QuadsSettings

# The others change what actor or rollout compute. `arm` is what its modes are.
_ASIDE = ("quads.arm", "quads.alarms.", "quads.probe.", "quads.sync_timeout_s")


@dataclass(frozen=True)
class Difference:
    """name: as in the configuration, `quads.rollout.residual.ratio`."""

    name: str
    before: Any
    now: Any


def differences(before: Mapping[str, Any] | None, settings: QuadsSettings) -> list[Difference]:
    """The fields that differ, of those that both have: another version may have more or fewer.

    before: what `QuadsSettings.to_dict` gave, perhaps through JSON; None where it is not known.
    """
    old, new = _flat(before or {}), _flat(settings.to_dict())
    return [Difference(name, old[name], new[name]) for name in new if name in old and old[name] != new[name]]


def compute_otherwise(found: Sequence[Difference]) -> bool:
    """True if one of them changes what actor or rollout compute, so that |d| before says nothing about |d| now."""
    return any(not difference.name.startswith(_ASIDE) for difference in found)


def _flat(block: Mapping[str, Any], prefix: str = "quads.") -> dict[str, Any]:
    """{"quads.rollout.residual.ratio": 0.5, ...}"""
    flat: dict[str, Any] = {}
    for key, value in block.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat
