"""Values of the wrong type anywhere in verl's configuration: verl checks none, and takes the text `no` for true."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from typing import Any

from omegaconf import DictConfig, OmegaConf

from quads_ops.settings import SettingsError
from quads_recipe.preflight_values import is_number, select

# A number by default, that may be the text of two: `0.5_2.0`.
_ALSO_TEXT = ("algorithm.rollout_correction.rollout_is_threshold",)


def check(config: DictConfig) -> None:
    """Compares with verl's defaults: where these have a truth value or a number, the run may not have text or a list.

    Null is let pass, and a number for a truth value (`reshard_after_forward` may be one).

    Raises:
        SettingsError.
    """
    given = dict(_leaves(OmegaConf.to_container(config, throw_on_missing=False), ""))
    for name, default in _defaults().items():
        value = given.get(name)
        if isinstance(value, str) and "${" in value:
            value = select(config, name)
        if isinstance(default, bool):
            if isinstance(value, str | list):
                raise SettingsError(name, value, "must be true or false")
        elif is_number(value):
            if math.isnan(value):
                raise SettingsError(name, value, "must be a number that can be computed with")
        elif value is not None and name not in _ALSO_TEXT:
            raise SettingsError(name, value, "must be a number")


@cache
def _defaults() -> dict[str, bool | int | float]:
    """verl's settings that are a truth value or a number; references to others are left out."""
    file = files("verl.trainer.config") / "_generated_ppo_trainer.yaml"  # ppo_trainer with its parts put together
    leaves = _leaves(OmegaConf.to_container(OmegaConf.create(file.read_text())), "")
    return {name: value for name, value in leaves if isinstance(value, bool | int | float)}


def _leaves(values: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Full names and values of all that is no mapping."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
