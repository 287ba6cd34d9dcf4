"""What is optimized and sampled: values that verl meets late or not at all, each beside a neighbour that is fine."""

import math

import pytest
from omegaconf import OmegaConf, open_dict
from support_preflight import MODEL, ROLLOUT, changed, compose_config, of, save_inputs

from quads_ops.settings import QuadsSettings, SettingsError
from quads_recipe import preflight, preflight_types

ACTOR = "actor_rollout_ref.actor."
OPTIM = ACTOR + "optim."
VALIDATION = ROLLOUT + "val_kwargs."
NAN, INF = math.nan, math.inf


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return compose_config(save_inputs(tmp_path_factory.mktemp("training")))


def check(config):
    return preflight.check_config(config, QuadsSettings.from_dict({}))


def refused(config, name, value, message):
    with pytest.raises(SettingsError) as caught:
        check(config)
    assert str(caught.value).startswith(f"{name} = {value!r}: "), caught.value
    assert message in str(caught.value) and "\n" not in str(caught.value)


# setting: (values that are refused, what the error says, values that are fine)
VALUES = {
    OPTIM + "lr": ((NAN, -1e-6, INF, "1e-6x", None), "must be a", (0, 1e-6, 1)),
    OPTIM + "weight_decay": ((-0.1, NAN), "must be a", (0, 0.1)),
    OPTIM + "clip_grad": ((0, -1, None), "must be above 0", (0.5, INF)),
    OPTIM + "lr_warmup_steps": ((-2, 1.5, None), "-1 takes lr_warmup_steps_ratio", (-1, 0, 10)),
    OPTIM + "lr_warmup_steps_ratio": ((-0.1, 1.1), "from 0 to 1", (0, 0.1, 1)),
    OPTIM + "min_lr_ratio": ((2,), "from 0 to 1", (None, 0, 0.1)),
    OPTIM + "lr_scheduler_type": (("linear", None), "use constant or cosine", ("cosine",)),
    OPTIM + "betas": (([0.9], [0.9, 1.0], 0.9, ["a", "b"]), "two numbers", ([0.8, 0.95], [0, 0])),
    OPTIM + "optimizer": (("AdamWW", "adamw", None), "is no optimizer of torch.optim", ("SGD",)),
    OPTIM + "optimizer_impl": (("no_such.optim",), "can't be imported", ("torch.optim",)),
    ACTOR + "ppo_epochs": ((0, -1, 1.5, None), "whole number, 1 or more", (1, 4)),
    ACTOR + "ppo_mini_batch_size": ((0, None, 2.5), "whole number, 1 or more", (16,)),
    ACTOR + "ppo_micro_batch_size_per_gpu": ((0, None, 96, 256), "divide the 128 responses of a rank", (1, 64)),
    ROLLOUT + "log_prob_micro_batch_size_per_gpu": ((0, None, 24), "divide the 128 responses", (1, 32)),
    ACTOR + "clip_ratio": ((-0.2, NAN, INF), "must be a", (0, 0.2)),
    ACTOR + "clip_ratio_low": ((-0.2,), "0 or more", (None, 0.1, 1)),
    ACTOR + "clip_ratio_high": ((-0.2,), "0 or more", (None, 0.28, 5)),
    ACTOR + "clip_ratio_c": ((1, 0.5, 0, None), "above", (3, 10.0)),
    ACTOR + "kl_loss_coef": ((NAN, -0.1), "must be a", (0, 0.001)),
    ACTOR + "entropy_coeff": ((NAN, INF, None), "must be a", (0, 0.001, -0.001)),
    ACTOR + "use_kl_loss": (("no", "flase", [True]), "must be true or false", (False, None, 0)),
    ACTOR + "policy_loss.loss_mode": (("vanila", None), "is unknown to verl; use one of vanilla", ("gspo",)),
    ROLLOUT + "temperature": ((0, -1, NAN, INF, 0.001, None), "must be", (0.01, 0.6, 1, 1.5)),
    ROLLOUT + "top_p": ((0, 1.1, -0.5, NAN), "must be a number", (0.9, 1, 1.0)),
    ROLLOUT + "top_k": ((-2, 0.5, None), "-1 keeps every token", (-1, 0, 20)),
    ROLLOUT + "n": ((1,), "grpo compares the responses to one prompt", (8, 16)),
    ROLLOUT + "agent.num_workers": ((0, None), "1 or more", (1, 8)),
    ROLLOUT + "max_num_seqs": ((0, None), "1 or more", (1, 4096)),
    ROLLOUT + "max_num_batched_tokens": ((0, None, 127), "", (128,)),
    VALIDATION + "temperature": ((-1, NAN, None), "must be a", (0, 0.6)),
    VALIDATION + "top_p": ((0, 2), "above 0, at most 1", (0.7, 1)),
    VALIDATION + "top_k": ((-5,), "-1 keeps every token", (-1, 20)),
    VALIDATION + "n": ((0,), "1 or more", (1, 4)),
    "algorithm.adv_estimator": (("grop", None), "is unknown to verl; use one of", ("rloo", "remax")),
    "algorithm.gamma": ((-0.1, 1.1, NAN), "must be a number", (0.99, 1)),
    "algorithm.kl_ctrl.kl_coef": ((NAN, -1), "must be a", (0, 0.1)),
    "algorithm.rollout_correction.rollout_is_threshold": ((NAN,), "must be a number", (2.0, "0.5_2.0")),
    "reward.num_workers": ((0,), "1 or more", (1, 8)),
    "reward_model.num_workers": ((0, "two"), "1 or more, or null", (None, 2)),
    "trainer.save_freq": ((0.5, "often", None, True), "must be", (-1, 0, 20)),
    "trainer.test_freq": ((2.5, None), "-1 for never", (-1, 0, 5)),
    "trainer.critic_warmup": ((-1, 41), "", (0, 40)),
    "trainer.val_before_train": (("yes",), "must be true or false", (True, None)),
    "data.train_max_samples": ((3, 15, 1.5), "", (-1, 0, 16, 64)),
    "data.gen_batch_size": ((0, 5, 32), "a divisor of data.train_batch_size (16)", (None, 8, 16)),
    "data.val_batch_size": ((0, -1), "1 or more, or null", (None, 7)),
    "data.dataloader_num_workers": ((-1,), "0 or more", (0, 2)),
    "data.shuffle": (("off",), "must be true or false", (True,)),
    "data.truncation": (("eror", None), "use error, left, right or middle", ("left",)),
    "data.max_response_length": ((0, -1, 1.5), "1 or more", (1,)),
}


@pytest.mark.parametrize("name", VALUES)
def test_odd_values_are_one_clear_error_and_their_neighbours_pass(config, name):
    wrong, message, right = VALUES[name]
    mine = changed(config)  # once: copying takes longer than the check
    with open_dict(mine):
        for value in wrong:
            OmegaConf.update(mine, name, value, merge=False)
            refused(mine, name, value, message)
        for value in right:
            OmegaConf.update(mine, name, value, merge=False)
            check(mine)


# case: (settings, the one that is named, what the error says)
TOGETHER = {
    "checkpoints": (
        of("trainer.", save_freq=5, default_local_dir=__file__),
        "trainer.default_local_dir",
        "checkpoints are saved there; give a folder",
    ),
    "kl-loss": (of(ACTOR, use_kl_loss=True, kl_loss_type="k4"), ACTOR + "kl_loss_type", "one of kl, k1"),
    "kl-reward": (of("algorithm.", use_kl_in_reward=True, kl_penalty="l2"), "algorithm.kl_penalty", "one of kl, k1"),
    "kl-control": (
        of("algorithm.", use_kl_in_reward=True, kl_ctrl__type="fix"),
        "algorithm.kl_ctrl.type",
        "one of fixed, adaptive",
    ),
    "reference": (
        of(ACTOR, use_kl_loss=True) | of("actor_rollout_ref.ref.", log_prob_micro_batch_size_per_gpu=48),
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
        "divide the 128 responses",
    ),
    "ranks": (
        of("trainer.", n_gpus_per_node=3) | of(ROLLOUT, n=8),
        ACTOR + "ppo_mini_batch_size",
        "multiple of the 3 ranks",
    ),
    "sequence": (
        of("trainer.", n_gpus_per_node=4) | of(ACTOR, ulysses_sequence_parallel_size=3),
        ACTOR + "ulysses_sequence_parallel_size",
        "divide the 4 devices",
    ),
    "tokens": (
        of(ACTOR, use_dynamic_bsz=True, ppo_max_token_len_per_gpu=63),
        ACTOR + "ppo_max_token_len_per_gpu",
        "no room for the longest sequence, 64 tokens",
    ),
    # Two mini-batches of 12 prompts for the 16 of a step, on two ranks: 96 responses each.
    "padded": (
        of("trainer.", n_gpus_per_node=2)
        | of(ACTOR, ppo_mini_batch_size=12, ppo_micro_batch_size_per_gpu=48)
        | of(ROLLOUT, log_prob_micro_batch_size_per_gpu=64),
        ROLLOUT + "log_prob_micro_batch_size_per_gpu",
        "divide the 96 responses",
    ),
}


@pytest.mark.parametrize("case", TOGETHER)
def test_values_that_do_not_fit_each_other(config, case):
    given, name, message = TOGETHER[case]
    with pytest.raises(SettingsError) as caught:
        check(changed(config, **given))
    assert str(caught.value).startswith(f"{name} = ") and message in str(caught.value), caught.value


FINE = {
    "kl": of(ACTOR, use_kl_loss=True, kl_loss_type="k3+")
    | of("actor_rollout_ref.ref.", log_prob_micro_batch_size_per_gpu=64),
    "no-checkpoints": of("trainer.", default_local_dir=__file__),
    "new-folder": of("trainer.", save_freq=5, default_local_dir="not/there"),
    "unused-kl": of(ACTOR, kl_loss_type="k4"),
    "one-response": of("algorithm.", adv_estimator="reinforce_plus_plus")
    | of(ROLLOUT, n=1, log_prob_micro_batch_size_per_gpu=16)
    | of(ACTOR, ppo_micro_batch_size_per_gpu=16),
    "dynamic": of(ACTOR, use_dynamic_bsz=True, ppo_micro_batch_size_per_gpu=None, ppo_max_token_len_per_gpu=64)
    | of(ROLLOUT, log_prob_micro_batch_size_per_gpu=None),
    "sequence": of("trainer.", n_gpus_per_node=4)
    | of(MODEL, override_config__attn_implementation="flash_attention_2", use_remove_padding=True)
    | of(ACTOR, ulysses_sequence_parallel_size=2, ppo_micro_batch_size_per_gpu=64)
    | of(ROLLOUT, log_prob_micro_batch_size_per_gpu=64),
    "padded": of(ACTOR, ppo_mini_batch_size=12, ppo_micro_batch_size_per_gpu=96)
    | of(ROLLOUT, log_prob_micro_batch_size_per_gpu=64),
    "another-clip": of(ACTOR, policy_loss__loss_mode="dppo_tv", clip_ratio_c=1.0),
    "reshard-over-eight": of(ACTOR, fsdp_config__reshard_after_forward=8),
    "own-loss": of(ACTOR, policy_loss__loss_mode="mine") | of(MODEL, external_lib="my.module"),
    "sampled-validation": of(VALIDATION, do_sample=True, temperature=0.6, top_p=0.95, n=8),
}


@pytest.mark.parametrize("case", FINE)
def test_values_that_fit_each_other(config, case):
    check(changed(config, **FINE[case]))


def test_what_is_odd_but_may_be_meant_is_said(config):
    assert check(config) == []
    [line] = check(changed(config, **of(OPTIM, lr=0)))
    assert "lr is 0: nothing is trained" in line
    for given in ({"top_p": 0.9}, {"top_k": 20}):
        [line] = check(changed(config, **of(ROLLOUT, **given)))
        assert "likeliest tokens only" in line


def test_types_are_those_of_verls_defaults():
    defaults = preflight_types._defaults()
    assert defaults[OPTIM + "lr"] == 1e-6 and defaults["trainer.val_before_train"] is True
    assert len(defaults) > 300 and not any(isinstance(value, str) for value in defaults.values())


def test_every_arm_of_the_study_on_gpus_has_a_rollout_that_can_run(tmp_path):
    """Only the first one is checked before the study starts; a later one would end it after days."""
    from support_study import make_plan

    from quads_recipe import preflight_rollout
    from quads_recipe.study import command
    from quads_recipe.study.presets import PRESETS

    preset = PRESETS["gpu"]
    files = command.Files(tmp_path, tmp_path, tmp_path)
    eager = {}
    for arm in preset.arms:
        plan = make_plan(config=preset.config, overrides=preset.overrides)
        config = command.compose(plan, arm, 0, files, tmp_path)
        preflight_rollout.check_graphs(config, QuadsSettings.from_dict({"arm": arm}), experts=True)
        eager[arm] = config.actor_rollout_ref.rollout.enforce_eager
    assert {arm for arm, value in eager.items() if value} == {"fp8"}


@pytest.mark.parametrize("name", ["quick", "paper-mini", "gpu"])
def test_the_prepared_studies_pass(tmp_path, monkeypatch, name):
    """`quick` with every stress setting in turn, too."""
    from support_models import save_checkpoint
    from support_preflight import save_data
    from support_study import make_plan

    from quads_recipe.study import command
    from quads_recipe.study.presets import PRESETS, STRESSES

    preset = PRESETS[name]
    data = save_data(tmp_path / "data.parquet", rows=256)
    files = command.Files(save_checkpoint(tmp_path / "model", "qwen3_moe"), data, data)
    own = {"data": {"data.parquet": "0"}} if preset.needs_gpu else {}
    devices = ("trainer.n_gpus_per_node=8",) if preset.needs_gpu else ()
    for stress in [(), *(one.overrides for one in STRESSES.values() if one.overrides and name == "quick")]:
        overrides = (*preset.overrides, *devices, *stress)
        plan = make_plan(config=preset.config, overrides=overrides, save_every=preset.save_every, **own)
        assert check(command.compose(plan, "quads", 0, files, tmp_path / "run")) == []
