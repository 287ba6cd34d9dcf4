"""The command line of one run: `python -m verl.trainer.main_ppo` with the study's settings, one arm and one seed."""

from __future__ import annotations

import copy
import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig

from quads_ops.settings import QuadsSettings
from quads_recipe.paths import configs_dir, hydra_value
from quads_recipe.preflight_rollout import EAGER_MODES
from quads_recipe.study.overrides import refused, unknown
from quads_recipe.study.plan import Plan, StudyError

DEMO_CONFIG = "quads_demo"


@dataclass(frozen=True)
class Files:
    """What a run reads: policy folder, training problems of its seed, held-out problems."""

    policy: Path
    train: Path
    heldout: Path


def overrides(plan: Plan, arm: str, seed: int, files: Files, run_dir: Path) -> list[str]:
    """Hydra overrides of a run; those of the plan (preset, stress, caller) come last, so they win."""
    every = plan.save_every or plan.steps
    settings = {
        **_of_arm(plan, arm),
        "quads.probe.every": plan.probe_every,
        "actor_rollout_ref.model.path": hydra_value(files.policy),
        "actor_rollout_ref.rollout.seed": seed,
        "actor_rollout_ref.actor.data_loader_seed": seed,
        "actor_rollout_ref.actor.fsdp_config.seed": seed,
        "data.train_files": hydra_value(files.train),
        "data.val_files": hydra_value(files.heldout),
        "trainer.total_training_steps": plan.steps,
        "trainer.logger": "[console,tensorboard,file]",
        "trainer.default_local_dir": hydra_value(run_dir / "checkpoints"),
        "trainer.experiment_name": run_dir.name,
        "trainer.save_freq": every,
        "trainer.resume_mode": "auto" if plan.save_every else "disable",
        "trainer.max_actor_ckpt_to_keep": 1,
    }
    contents = "[model,optimizer,extra,hf_model]" if plan.save_every else "[hf_model]"
    settings["actor_rollout_ref.actor.checkpoint.save_contents"] = contents
    if plan.config == DEMO_CONFIG and not plan.data:
        settings["reward.custom_reward_function.path"] = "pkg://quads_recipe.reward"
    return [f"{key}={value}" for key, value in settings.items()] + list(plan.overrides)


def _of_arm(plan: Plan, arm: str) -> dict[str, str]:
    """What runs of different arms differ in."""
    settings = {"quads.arm": arm}
    if plan.config != DEMO_CONFIG and QuadsSettings.from_dict({"arm": arm}).rollout.mode in EAGER_MODES:
        settings["actor_rollout_ref.rollout.enforce_eager"] = "true"
    return settings


def command(plan: Plan, arm: str, seed: int, files: Files, run_dir: Path) -> list[str]:
    """The whole command line."""
    start = [sys.executable, "-m", "verl.trainer.main_ppo", "--config-path", str(configs_dir())]
    given = [*overrides(plan, arm, seed, files, run_dir), f"hydra.run.dir={hydra_value(run_dir / 'hydra')}"]
    return [*start, "--config-name", plan.config, *given]


def environment(plan: Plan, run_dir: Path, metrics: Path) -> dict[str, str]:
    """What a run needs in its environment beside the caller's own."""
    added = {
        "VERL_FILE_LOGGER_PATH": str(metrics),
        "TENSORBOARD_DIR": str(run_dir / "tensorboard"),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    return {"VERL_PLATFORM": "cpu", **added} if plan.config == DEMO_CONFIG else added


def compose_arms(plan: Plan, files: Files, run_dir: Path) -> dict[str, DictConfig]:
    """Arm -> hydra configuration of its run with the first seed. Raises StudyError, as `compose`."""
    composed, configs = {}, {}
    for arm in plan.arms:
        kind = tuple(_of_arm(plan, arm).items())[1:]  # composing takes seconds, and most arms differ in the name only
        if kind not in composed:
            composed[kind] = compose(plan, arm, plan.seeds[0], files, run_dir)
        configs[arm] = copy.deepcopy(composed[kind])
        configs[arm].quads.arm = arm
    return configs


def compose(plan: Plan, arm: str, seed: int, files: Files, run_dir: Path) -> DictConfig:
    """The hydra configuration of a run, without starting it.

    Raises StudyError for an override that hydra refuses: the message is hydra's own, or names what is spelt alike.
    """
    import hydra
    from hydra import initialize_config_dir
    from hydra.errors import HydraException

    def composed(asked: Plan) -> DictConfig:
        with initialize_config_dir(str(configs_dir()), version_base=None):
            return hydra.compose(asked.config, overrides=overrides(asked, arm, seed, files, run_dir))

    try:
        return composed(plan)
    except HydraException as error:
        if name := refused(error):
            raise unknown(name, composed(dataclasses.replace(plan, overrides=()))) from None
        cause = f": {error.__cause__}" if error.__cause__ else ""
        raise StudyError("--set: " + " ".join(f"{error}{cause}".split())) from None
