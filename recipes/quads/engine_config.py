"""The engine's part of the hydra config: verl's FSDP engine config with the `quads:` block in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from verl.workers.config import FSDPEngineConfig


@dataclass
class QuadsFSDPEngineConfig(FSDPEngineConfig):
    """Chosen by `actor_rollout_ref.actor.fsdp_config._target_`; verl's own FSDPEngineConfig means a stock engine."""

    quads: dict[str, Any] = field(default_factory=dict)
    """The `quads:` block (`quads_ops.settings.QuadsSettings.to_dict`)."""
