"""Residual masks for the first step: a few training prompts through the fresh rollout, then masks from what it saw.

Without it the first step's masks come from the weights alone, and its mismatch is several times that of later steps
(docs/rollout.md). A resumed run starts in the same way: statistics are not part of a checkpoint.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import ray
from ray.actor import ActorHandle
from torch.utils.data import Dataset
from verl.utils.tokenizer import normalize_token_ids
from verl.utils.tokenizer.chat_template import apply_chat_template

from quads_ops.settings import QuadsSettings

_RESPONSE_TOKENS = 32


class WarmupError(RuntimeError):
    """The rollout can't choose masks from the training prompts: says why and names the setting."""


def wanted(settings: QuadsSettings) -> bool:
    """Are there masks that stay frozen between syncs, and prompts to choose them from?"""
    residual = settings.rollout.residual
    return settings.rollout.warmup > 0 and 0 < residual.ratio < 1 and residual.scope == "step"


def training_prompts(dataset: Dataset, count: int, longest: int, tokenizer, template_options: dict) -> list[list[int]]:
    """Token ids of up to `count` prompts, spread evenly over the dataset; longer ones than `longest` are left out.

    Raises:
        WarmupError: not one of them fits.
    """
    rows = range(0, len(dataset), max(1, len(dataset) // count))[:count]
    prompts = [
        normalize_token_ids(apply_chat_template(tokenizer, list(dataset[row]["raw_prompt"]), **template_options))
        for row in rows
    ]
    fitting = [prompt for prompt in prompts if len(prompt) <= longest]
    if not fitting:
        raise WarmupError(
            f"data.max_prompt_length = {longest}: none of {len(prompts)} training prompts is that short (the shortest "
            f"has {min(map(len, prompts))} tokens); raise it"
        )
    return fitting


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
