"""Training prompts as token ids: some are looked at before any worker starts, and the first masks come from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from torch.utils.data import Dataset
from verl.utils.tokenizer import normalize_token_ids
from verl.utils.tokenizer.chat_template import apply_chat_template

Item = TypeVar("Item")

LOOKED_AT = 256
"""Training prompts that are checked, spread evenly over the data."""


class PromptError(RuntimeError):
    """The run can't begin with these training prompts: says why and names the setting."""


def spread(items: Sequence[Item], count: int) -> list[Item]:
    """Up to `count` of them, spread evenly."""
    count = min(count, len(items))
    return [items[number * len(items) // count] for number in range(count)]


def tokenized(dataset: Dataset, count: int, tokenizer, template_options: dict) -> list[list[int]]:
    """Token ids of up to `count` prompts, spread evenly over the dataset."""
    return [
        normalize_token_ids(apply_chat_template(tokenizer, list(dataset[row]["raw_prompt"]), **template_options))
        for row in spread(range(len(dataset)), count)
    ]


def check_count(count: int, batch: int, kept: bool) -> None:
    """verl drops the prompts that fill no batch, which here are all.

    Args:
        count: training prompts that verl has in the end.
        batch: `data.train_batch_size`.
        kept: False if `data.filter_overlong_prompts` left some out.

    Raises:
        PromptError.
    """
    if count >= batch:
        return
    raise PromptError(
        f"data.train_batch_size = {batch}: only {count} training prompts are left, which is no batch; lower it"
        + ("" if kept else ", or raise data.max_prompt_length, since data.filter_overlong_prompts left out the longer")
    )


def check(prompts: Sequence[list[int]], longest: int, truncation: str, embeddings: int) -> None:
    """What verl would cut, or what would fail in the model.

    verl's `data.truncation` says what becomes of a long prompt; its agent loops cut it on the left whatever that is.

    Args:
        prompts: token ids.
        longest: `data.max_prompt_length`.
        truncation: `data.truncation`.
        embeddings: rows of the model's embedding.

    Raises:
        PromptError: `error` is set and a prompt is longer; or none fits; or a token that has no embedding.
    """
    long = [len(prompt) for prompt in prompts if len(prompt) > longest]
    if long and (truncation == "error" or len(long) == len(prompts)):
        raise PromptError(
            f"data.max_prompt_length = {longest}: {len(long)} of {len(prompts)} training prompts looked at are longer "
            f"(up to {max(long)} tokens) and would lose their beginning; raise it, or set "
            "data.filter_overlong_prompts=true to leave them out"
        )
    highest = max((max(prompt) for prompt in prompts if prompt), default=0)
    if highest >= embeddings:
        raise PromptError(
            f"actor_rollout_ref.model.path: its tokenizer gives a prompt token {highest}, but the model has only "
            f"{embeddings} embeddings; use the tokenizer that belongs to the model"
        )
