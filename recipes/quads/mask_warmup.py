"""Before the first step a few training prompts go through the fresh rollout, for its first masks.

Without that the first step's masks come from the weights alone, and its mismatch is several times that of later steps
(docs/rollout.md). A resumed run starts in the same way: statistics are not part of a checkpoint.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import ray
from ray.actor import ActorHandle

from quads_ops.settings import QuadsSettings

_RESPONSE_TOKENS = 32


def wanted(settings: QuadsSettings) -> bool:
    """Are there masks that stay frozen between syncs, and prompts to choose them from?"""
    residual = settings.rollout.residual
    return settings.rollout.warmup > 0 and 0 < residual.ratio < 1 and residual.scope == "step"


def warm_up(servers: Sequence[ActorHandle], prompts: list[list[int]], response_length: int) -> None:
    """Greedy responses of at most 32 tokens from every server, then masks from the residuals seen.

    Greedy, so that the sampler's random state, and with it the run's rollouts, stay as they are. What was generated is
    dropped; the KV cache too, because it was computed with the masks before.

    Args:
        servers: `quads_recipe.server.QuadsHttpServer`, with synced weights and awake.
        prompts: token ids.
        response_length: of the run, in tokens.

    Raises:
        RolloutDeadError: an engine died meanwhile.
    """
    sampling = {"temperature": 0.0, "max_tokens": min(response_length, _RESPONSE_TOKENS)}
    ray.get(
        [
            server.generate.remote(ids, dict(sampling), f"warmup-{uuid.uuid4().hex}")
            for server in servers
            for ids in prompts
        ]
    )
    ray.get([server.collective_rpc.remote("quads_refresh_masks") for server in servers])
    ray.get([server.clear_kv_cache.remote() for server in servers])
