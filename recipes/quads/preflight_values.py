"""Reading single values of the hydra config, and the checks that need nothing but the value."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from quads_ops.settings import QuadsSettings, SettingsError

ACTOR = "actor_rollout_ref.actor."
ROLLOUT = "actor_rollout_ref.rollout."
MODEL = "actor_rollout_ref.model."


def select(config: DictConfig, name: str, default: Any = None) -> Any:
    """The value of `name`, or `default` where it is missing or null; mappings and lists as plain ones."""
    value = OmegaConf.select(config, name, default=None)
    if isinstance(value, DictConfig | ListConfig):
        value = OmegaConf.to_container(value, resolve=True)
    return default if value is None else value


def local_path(name: str, value: Any) -> Path:
    """The path that the setting `name` holds, without `~`. Raises SettingsError where that stands for no folder."""
    try:
        return Path(str(value)).expanduser()
    except RuntimeError:
        raise SettingsError(name, value, "there is no such user; write out what ~ stands for") from None


def expect(config: DictConfig, name: str, allowed: Collection, remedy: str) -> None:
    """Raises SettingsError unless the value of `name` is one of `allowed`."""
    value = select(config, name)
    if value not in allowed:
        raise SettingsError(name, value, remedy)


def devices(config: DictConfig) -> int:
    """Of the whole run, one rank each."""
    return config.trainer.n_gpus_per_node * config.trainer.nnodes


def is_number(value: Any) -> bool:
    """True for int and float; bool is no number here."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def quantizes(settings: QuadsSettings) -> bool:
    """False where both sides compute in full precision (arm bf16)."""
    return settings.actor.mode != "none" or settings.rollout.mode != "bf16"


def dtype_name(config: DictConfig, name: str, default: str) -> str:
    """The dtype that `name` means, as torch spells it; `bf16`, `half` and the like are translated."""
    value = str(select(config, name) or default)
    names = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
    return names.get(value, value).removeprefix("torch.")


def check_run(config: DictConfig) -> None:
    """How long the run is, and where it logs to.

    Raises:
        SettingsError: a length that trains nothing, or a logger that verl does not have.
    """
    for name in ("trainer.total_training_steps", "trainer.total_epochs"):
        value = select(config, name)
        if value is None and name == "trainer.total_training_steps":
            continue  # as many as the epochs have
        if not is_number(value) or value <= 0:
            raise SettingsError(name, value, "trains nothing; give a number above 0")
    _check_loggers(config)
    _check_resume(config)


def _check_resume(config: DictConfig) -> None:
    expect(config, "trainer.resume_mode", ("disable", "auto", "resume_path"), "use disable, auto or resume_path")
    if config.trainer.resume_mode != "resume_path":
        return
    name = "trainer.resume_from_path"
    path = select(config, name)
    if not isinstance(path, str) or not re.search(r"global_step_\d+/*$", path):
        raise SettingsError(name, path, "resume_mode=resume_path needs a checkpoint's folder, .../global_step_N")
    if "://" not in path and not Path(path).is_dir():
        raise SettingsError(name, path, "no such folder; give a checkpoint's, .../global_step_N")


def _check_loggers(config: DictConfig) -> None:
    from verl.utils.tracking import Tracking

    value = select(config, "trainer.logger")
    known = ", ".join(Tracking.supported_backend)
    for logger in [value] if isinstance(value, str) else value if isinstance(value, list) else [None]:
        if logger not in (*Tracking.supported_backend, "tracking"):  # an old name of wandb that verl still takes
            raise SettingsError("trainer.logger", value, f"{logger} is no logger of verl; use some of {known}")
