"""Before the first step: training prompts are looked at, and a few go through the fresh rollout, for its first masks.

Without that the first step's masks come from the weights alone, and its mismatch is several times that of later steps
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
LOOKED_AT = 256
"""Training prompts that are checked, spread evenly over the data."""


class WarmupError(RuntimeError):
    """The run can't begin with these training prompts: says why and names the setting."""


def wanted(settings: QuadsSettings) -> bool:
    """Are there masks that stay frozen between syncs, and prompts to choose them from?"""
    residual = settings.rollout.residual
    return settings.rollout.warmup > 0 and 0 < residual.ratio < 1 and residual.scope == "step"


def training_prompts(dataset: Dataset, count: int, tokenizer, template_options: dict) -> list[list[int]]:
    """Token ids of up to `count` prompts, spread evenly over the dataset."""
    rows = range(0, len(dataset), max(1, len(dataset) // count))[:count]
    return [
        normalize_token_ids(apply_chat_template(tokenizer, list(dataset[row]["raw_prompt"]), **template_options))
        for row in rows
    ]


def check_prompts(prompts: Sequence[list[int]], longest: int, truncation: str, embeddings: int) -> None:
    """What verl would cut, or what would fail in the model.

    verl's `data.truncation` says what becomes of a long prompt; its agent loops cut it on the left whatever that is.

    Args:
        prompts: token ids.
        longest: `data.max_prompt_length`.
        truncation: `data.truncation`.
        embeddings: rows of the model's embedding.

    Raises:
        WarmupError: `error` is set and a prompt is longer; or none fits; or a token that has no embedding.
    """
    long = [len(prompt) for prompt in prompts if len(prompt) > longest]
    if long and (truncation == "error" or len(long) == len(prompts)):
        raise WarmupError(
            f"data.max_prompt_length = {longest}: {len(long)} of {len(prompts)} training prompts looked at are longer "
            f"(up to {max(long)} tokens) and would lose their beginning; raise it, or set "
            "data.filter_overlong_prompts=true to leave them out"
        )
    highest = max((max(prompt) for prompt in prompts if prompt), default=0)
    if highest >= embeddings:
        raise WarmupError(
            f"actor_rollout_ref.model.path: its tokenizer gives a prompt token {highest}, but the model has only "
            f"{embeddings} embeddings; use the tokenizer that belongs to the model"
        )


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
