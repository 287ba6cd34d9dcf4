"""Checks of what is optimized and how it is sampled: values that verl meets after minutes, or trains wrong with."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from os.path import isfile
from typing import Any, NamedTuple

from omegaconf import DictConfig

from quads_ops.settings import SettingsError
from quads_recipe.preflight_values import ACTOR, MODEL, ROLLOUT, devices, expect, is_number, select

OPTIM = ACTOR + "optim."
VALIDATION = ROLLOUT + "val_kwargs."


class _Rule(NamedTuple):
    fits: Callable[[Any], bool]
    says: str


def _whole(least: int, says: str | None = None) -> _Rule:
    says = says or f"must be a whole number, {least} or more"
    return _Rule(lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= least, says)


def _between(low: float, high: float, says: str) -> _Rule:
    """Both included."""
    return _Rule(lambda v: is_number(v) and low <= v <= high, says)


def _above(low: float, says: str) -> _Rule:
    return _Rule(lambda v: is_number(v) and v > low, says)


def _or_null(rule: _Rule) -> _Rule:
    return _Rule(lambda v: v is None or rule.fits(v), f"{rule.says}, or null")


_LARGEST = 1.7e308
_NOT_NEGATIVE = _between(0, _LARGEST, "must be a finite number, 0 or more")
_SHARE = _between(0, 1, "must be a number from 0 to 1")
_TOP_P = _Rule(lambda v: is_number(v) and 0 < v <= 1, "must be a number above 0, at most 1; 1 keeps every token")
_TOP_K = _whole(-1, "must be a whole number; -1 keeps every token")
_EVERY = _whole(-(10**9), "must be a whole number of steps; -1 for never")

_RULES = {
    OPTIM + "lr": _NOT_NEGATIVE,
    OPTIM + "weight_decay": _NOT_NEGATIVE,
    OPTIM + "clip_grad": _above(0, "must be above 0: gradients are scaled down to this norm; a large one leaves them"),
    OPTIM + "lr_warmup_steps": _whole(-1, "must be a whole number of steps; -1 takes lr_warmup_steps_ratio"),
    OPTIM + "lr_warmup_steps_ratio": _SHARE,
    OPTIM + "min_lr_ratio": _or_null(_SHARE),
    ACTOR + "ppo_mini_batch_size": _whole(1),
    ACTOR + "ppo_epochs": _whole(1),
    ACTOR + "clip_ratio": _NOT_NEGATIVE,
    ACTOR + "clip_ratio_low": _or_null(_NOT_NEGATIVE),
    ACTOR + "clip_ratio_high": _or_null(_NOT_NEGATIVE),
    ACTOR + "clip_ratio_c": _above(0, "must be a number above 0"),
    ACTOR + "kl_loss_coef": _NOT_NEGATIVE,
    ACTOR + "entropy_coeff": _between(-_LARGEST, _LARGEST, "must be a finite number"),
    ACTOR + "loss_scale_factor": _or_null(_above(0, "must be a number above 0")),
    # Below, vLLM samples at 0.01, and the actor would still divide by what is set.
    ROLLOUT + "temperature": _between(0.01, _LARGEST, "must be 0.01 or more: all responses to a prompt would be alike"),
    ROLLOUT + "top_p": _TOP_P,
    ROLLOUT + "top_k": _TOP_K,
    ROLLOUT + "max_num_seqs": _whole(1),
    ROLLOUT + "max_num_batched_tokens": _whole(1),
    ROLLOUT + "agent.num_workers": _whole(1),
    ROLLOUT + "checkpoint_engine.update_weights_bucket_megabytes": _whole(1),
    VALIDATION + "temperature": _between(0, _LARGEST, "must be a finite number, 0 or more; 0 is greedy"),
    VALIDATION + "top_p": _TOP_P,
    VALIDATION + "top_k": _TOP_K,
    VALIDATION + "n": _whole(1),
    "algorithm.gamma": _SHARE,
    "algorithm.lam": _SHARE,
    "algorithm.kl_ctrl.kl_coef": _NOT_NEGATIVE,
    "reward.num_workers": _whole(1),
    "reward_model.num_workers": _or_null(_whole(1)),  # an old name, which wins
    "trainer.save_freq": _EVERY,
    "trainer.test_freq": _EVERY,
    "trainer.critic_warmup": _whole(0),
    "data.val_batch_size": _or_null(_whole(1)),
    "data.dataloader_num_workers": _whole(0),
    "data.train_max_samples": _whole(-1, "must be a whole number; -1 takes every row"),
    "data.val_max_samples": _whole(-1, "must be a whole number; -1 takes every row"),
}

_OLD_SIZES = {
    ACTOR + "ppo_micro_batch_size": "ppo_micro_batch_size_per_gpu",
    ROLLOUT + "log_prob_micro_batch_size": "log_prob_micro_batch_size_per_gpu",
}

# Every response is compared with the others to the same prompt.
_BY_GROUP = ("grpo", "grpo_vectorized", "grpo_passk", "gdpo", "rloo", "rloo_vectorized", "reinforce_plus_plus_baseline")
_KL = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")


def check(config: DictConfig) -> list[str]:
    """Single values, then those that must fit each other; lines for the terminal.

    Raises:
        SettingsError.
    """
    for name, rule in _RULES.items():
        value = select(config, name)
        if not rule.fits(value):
            raise SettingsError(name, value, rule.says)
    _check_optimizer(config)
    _check_algorithm(config)
    _check_prompts_of_a_step(config)
    _check_micro_batches(config)
    _check_tokens(config)
    _check_checkpoints(config)
    return _notes(config)


def _check_optimizer(config: DictConfig) -> None:
    from importlib import import_module

    expect(config, OPTIM + "lr_scheduler_type", ("constant", "cosine"), "use constant or cosine")
    betas = select(config, OPTIM + "betas")
    if not isinstance(betas, list) or len(betas) != 2 or not all(is_number(b) and 0 <= b < 1 for b in betas):
        raise SettingsError(OPTIM + "betas", betas, "must be two numbers, from 0 up to, but not, 1")
    module, name = select(config, OPTIM + "optimizer_impl"), select(config, OPTIM + "optimizer")
    try:
        there = import_module(str(module))
    except ImportError as error:
        raise SettingsError(OPTIM + "optimizer_impl", module, f"can't be imported: {error}") from None
    if not hasattr(there, str(name)):
        raise SettingsError(OPTIM + "optimizer", name, f"is no optimizer of {module}; use one that is, such as AdamW")


def _check_algorithm(config: DictConfig) -> None:
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY

    estimator = select(config, "algorithm.adv_estimator")
    # A module of the user's, which trainer and workers import, may bring more.
    if not select(config, MODEL + "external_lib"):
        _expect_known(config, "algorithm.adv_estimator", ADV_ESTIMATOR_REGISTRY)
        _expect_known(config, ACTOR + "policy_loss.loss_mode", POLICY_LOSS_REGISTRY)
    # With a teacher the loss needs no comparison.
    if estimator in _BY_GROUP and select(config, ROLLOUT + "n") < 2 and not select(config, "distillation.enabled"):
        remedy = f"{estimator} compares the responses to one prompt; set 2 or more, or another algorithm.adv_estimator"
        raise SettingsError(ROLLOUT + "n", select(config, ROLLOUT + "n"), remedy)
    if select(config, ACTOR + "policy_loss.loss_mode") == "vanilla" and select(config, ACTOR + "clip_ratio_c") <= 1:
        remedy = "must be above 1: from there on the dual clip cuts what the loss may become"
        raise SettingsError(ACTOR + "clip_ratio_c", select(config, ACTOR + "clip_ratio_c"), remedy)
    kinds = (*_KL, *(f"{kind}+" for kind in _KL))
    if select(config, ACTOR + "use_kl_loss"):
        _expect_known(config, ACTOR + "kl_loss_type", kinds)
    if select(config, "algorithm.use_kl_in_reward"):
        _expect_known(config, "algorithm.kl_penalty", kinds)
        _expect_known(config, "algorithm.kl_ctrl.type", ("fixed", "adaptive"))


def _expect_known(config: DictConfig, name: str, known: Collection[str]) -> None:
    expect(config, name, known, f"is unknown to verl; use one of {', '.join(known)}")


def _check_prompts_of_a_step(config: DictConfig) -> None:
    """How many prompts a step fetches, of how many there are. The files: preflight_data."""
    batch = config.data.train_batch_size
    expect(config, "data.truncation", ("error", "left", "right", "middle"), "use error, left, right or middle")
    fetched = select(config, "data.gen_batch_size")
    if fetched is not None and (not _whole(1).fits(fetched) or batch % fetched):
        remedy = f"must be null, or a divisor of data.train_batch_size ({batch})"
        raise SettingsError("data.gen_batch_size", fetched, remedy)
    most = select(config, "data.train_max_samples")
    if 0 < most < batch:
        remedy = f"is no batch; raise it, or lower data.train_batch_size ({batch})"
        raise SettingsError("data.train_max_samples", most, remedy)
    steps, waits = select(config, "trainer.total_training_steps"), select(config, "trainer.critic_warmup")
    if steps is not None and waits > steps:
        remedy = f"the actor is not trained before this step, and there are only {steps}; set it to 0"
        raise SettingsError("trainer.critic_warmup", waits, remedy)


def _check_micro_batches(config: DictConfig) -> None:
    """verl cuts a rank's share of a mini-batch into micro-batches, and asserts in the first update that they fit."""
    dynamic = select(config, ACTOR + "use_dynamic_bsz")
    expect(config, ROLLOUT + "log_prob_use_dynamic_bsz", (dynamic,), f"must be as {ACTOR}use_dynamic_bsz, {dynamic}")
    ranks = _ranks(config)
    n, mini = select(config, ROLLOUT + "n"), select(config, ACTOR + "ppo_mini_batch_size")
    if mini * n % ranks:
        remedy = f"times rollout.n ({n}) must be a multiple of the {ranks} ranks that share it"
        raise SettingsError(ACTOR + "ppo_mini_batch_size", mini, remedy)
    for name, new in _OLD_SIZES.items():
        expect(config, name, (None,), f"is an old setting of verl; use {new}")
    if not dynamic:
        _check_batch(config, mini, n)
    # verl pads the responses of a step to whole mini-batches, the critic's too.
    unit = math.lcm(mini, config.critic.ppo_mini_batch_size) if _has_critic(config) else mini
    step = math.ceil(config.data.train_batch_size / unit) * unit * n // ranks
    _check_divisor(config, ACTOR, "ppo_micro_batch_size_per_gpu", "use_dynamic_bsz", mini * n // ranks)
    _check_divisor(config, ROLLOUT, "log_prob_micro_batch_size_per_gpu", "log_prob_use_dynamic_bsz", step)
    if select(config, ACTOR + "use_kl_loss") or select(config, "algorithm.use_kl_in_reward"):
        ref = "actor_rollout_ref.ref."
        _check_divisor(config, ref, "log_prob_micro_batch_size_per_gpu", "log_prob_use_dynamic_bsz", step)


def _check_batch(config: DictConfig, mini: int, n: int) -> None:
    """What verl's `validate_config` (verl/utils/config.py) asks of a batch whose micro-batches are counted in rows."""
    name, batch, count = "data.train_batch_size", config.data.train_batch_size, devices(config)
    if batch < mini:
        remedy = f"is less than a mini-batch ({ACTOR}ppo_mini_batch_size, {mini}); raise it, or lower that"
        raise SettingsError(name, batch, remedy)
    if batch * n % count:
        raise SettingsError(name, batch, f"times rollout.n ({n}) must be a multiple of the {count} devices of the run")


def _has_critic(config: DictConfig) -> bool:
    enabled = select(config, "critic.enable")
    return config.algorithm.adv_estimator == "gae" if enabled is None else bool(enabled)


def _ranks(config: DictConfig) -> int:
    """That share a batch. Ranks of one sequence (Ulysses) have the same part."""
    count = devices(config)
    sequence = max(
        select(config, ACTOR + name, 1)
        for name in ("ulysses_sequence_parallel_size", "fsdp_config.ulysses_sequence_parallel_size")
    )
    if not _whole(1).fits(sequence) or count % sequence:
        name = ACTOR + "ulysses_sequence_parallel_size"
        raise SettingsError(name, sequence, f"must divide the {count} devices of the run; use 1, or a divisor")
    return count // sequence


def _check_divisor(config: DictConfig, prefix: str, name: str, dynamic: str, whole: int) -> None:
    if select(config, prefix + dynamic):
        return
    size = select(config, prefix + name)
    if not _whole(1).fits(size) or whole % size:
        remedy = f"must divide the {whole} responses of a rank; use a divisor, or set {prefix}{dynamic}=true"
        raise SettingsError(prefix + name, size, remedy)


def _check_tokens(config: DictConfig) -> None:
    """Room for the longest sequence where batches are counted in tokens, and for every sequence in vLLM's batch."""
    longest = config.data.max_prompt_length + config.data.max_response_length
    for prefix, name, dynamic in (
        (ACTOR, "ppo_max_token_len_per_gpu", "use_dynamic_bsz"),
        (ROLLOUT, "log_prob_max_token_len_per_gpu", "log_prob_use_dynamic_bsz"),
    ):
        room = select(config, prefix + name)
        if select(config, prefix + dynamic) and (not _whole(1).fits(room) or room * _sequence(config) < longest):
            remedy = f"has no room for the longest sequence, {longest} tokens (data.max_prompt_length + "
            raise SettingsError(prefix + name, room, remedy + "data.max_response_length); raise it")
    seqs, tokens = select(config, ROLLOUT + "max_num_seqs"), select(config, ROLLOUT + "max_num_batched_tokens")
    if tokens < seqs:
        remedy = f"is less than a token for each of {ROLLOUT}max_num_seqs ({seqs}); raise it, or lower that"
        raise SettingsError(ROLLOUT + "max_num_batched_tokens", tokens, remedy)


def _sequence(config: DictConfig) -> int:
    return devices(config) // _ranks(config)


def _check_checkpoints(config: DictConfig) -> None:
    name = "trainer.default_local_dir"
    folder = select(config, name)
    if select(config, "trainer.save_freq") > 0 and (not isinstance(folder, str) or not folder or isfile(folder)):
        raise SettingsError(name, folder, "checkpoints are saved there; give a folder, which need not be there")


def _notes(config: DictConfig) -> list[str]:
    lines = []
    if not select(config, OPTIM + "lr"):
        lines.append(f"{OPTIM}lr is 0: nothing is trained")
    if select(config, ROLLOUT + "top_p") < 1 or select(config, ROLLOUT + "top_k") > 0:
        lines.append(
            "the rollout samples from its likeliest tokens only (top_p, top_k): its logprobs are among these, the "
            "actor's among all, so their difference is more than quantization"
        )
    return lines
