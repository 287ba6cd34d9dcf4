"""Checks of `--set`: what hydra can't read, and what is the study's own to set."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from quads_recipe.preflight_fields import alike
from quads_recipe.preflight_values import ACTOR, MODEL, ROLLOUT, select
from quads_recipe.study.plan import StudyError

_SEEDS = "the study numbers its seeds; use --seeds"
_START = "every run of a study starts from --policy; leave it out"
RESERVED = {
    "quads.arm": "use --arms",
    MODEL + "path": "use --policy",
    MODEL + "tokenizer_path": "evaluations read the policy's folder; save the tokenizer there",
    MODEL + "custom_chat_template": "evaluations read the policy's folder; save it there as chat_template.jinja",
    ROLLOUT + "seed": _SEEDS,
    ROLLOUT + "engine_kwargs.vllm.seed": _SEEDS,
    ACTOR + "data_loader_seed": _SEEDS,
    ACTOR + "fsdp_config.seed": _SEEDS,
    "data.train_files": "use --data",
    "data.val_files": "use --data",
    "trainer.total_training_steps": "use --steps",
    "trainer.default_local_dir": "runs lie in the study's folder; use --out",
    "trainer.experiment_name": "runs are named by arm and seed; leave it out",
    "trainer.resume_mode": _START,
    "trainer.resume_from_path": _START,
    "hydra": "hydra's own settings are the study's; leave it out",
}
"""Settings that --set may not have -> what to do instead."""

OPTIONS = {
    MODEL + "path": "--policy",
    "data.train_files": "--data",
    "data.val_files": "--data",
    "trainer.total_training_steps": "--steps",
}
"""Settings that options of the study give: errors about them name the option."""


def check(given: Sequence[str]) -> None:
    """Reads each `--set` with hydra's parser. Raises StudyError."""
    for text in given:
        for name, value in _settings(text):
            if (reserved := _reserved(name, value)) is not None:
                raise StudyError(f"--set: {text!r} sets {reserved}: {RESERVED[reserved]}")


def check_groups(given: Sequence[str], before: DictConfig) -> None:
    """before: a run's configuration without `--set`. Raises StudyError for one that replaces a group of settings."""
    for text in given:
        for name, value in _settings(text):
            group = OmegaConf.select(before, name, throw_on_resolution_failure=False)
            if isinstance(group, DictConfig) and len(group) and not isinstance(value, dict):
                one = f"{name}.{next(iter(group))}=..."
                raise StudyError(f"--set: {text!r} replaces a group of settings; set single ones, such as {one}")


def check_composed(config: DictConfig) -> None:
    """Raises StudyError unless runs with this configuration leave what the study reads."""
    for name, part in (("trainer.logger", "file"), (ACTOR + "checkpoint.save_contents", "hf_model")):
        value = select(config, name)
        if not isinstance(value, list) or part not in value:
            raise StudyError(f"--set: {name} = {value!r}: the study reads what {part} leaves; add {part}")
    every = select(config, "trainer.save_freq")
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise StudyError(f"--set: trainer.save_freq = {every!r}: the last weights are evaluated; give 1 or more steps")


def refused(error: Exception) -> str | None:
    """The setting that hydra could not override since there is none of this name; None for other errors."""
    found = re.match(r"Could not override '([^']+)'", str(error))
    return found[1] if found else None


def unknown(name: str, config: DictConfig) -> StudyError:
    """Says what there is instead of the setting `name`, as near as it is spelt. config: a run's, without `--set`."""
    group, done = config, []
    for part in name.split("."):
        where = ".".join(done)
        if not isinstance(group, DictConfig):
            return StudyError(f"--set: {name}: {where} is a single setting and has no {part}; set {where} itself")
        if part not in group:
            return StudyError(f"--set: {name}: there is no {part} in {where or 'the configuration'}; " + _instead(
                name, part, group, bool(done)
            ))  # fmt: skip
        group, done = group[part], [*done, part]
    return StudyError(f"--set: {name}: hydra can't override it; set single values")


def _instead(name: str, part: str, group: DictConfig, inner: bool) -> str:
    known = [str(key) for key in group if key != "_target_"]
    if near := alike(part, known):
        return f"perhaps {' or '.join(near)} is meant"
    has = f"it has {', '.join(sorted(known))}" if known else "it is empty"
    # What verl makes an object of takes its own fields only.
    own = inner and "_target_" not in group
    return has + (f"; +{name}=... adds one, where other code reads it" if own else "")


def named(given: Sequence[str], setting: str) -> bool:
    """Whether a `--set` gives this setting, or a part of it, or what it is a part of."""
    names = [name for text in given for name, _ in _settings(text)]
    return any(_within(name, setting) or _within(setting, name) for name in names)


def _settings(text: str) -> Iterator[tuple[str, Any]]:
    """Full names and values. Raises StudyError."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    if "=" not in text:
        raise StudyError(f"--set: {text!r} has no '='; write it as key=value")
    try:
        override = OverridesParser.create().parse_override(text)
        value = override.value()
    except HydraException as error:
        raise StudyError(f"--set: hydra can't read {text!r}: {_line(error)}; write it as key=value") from None
    if not override.key_or_group:
        raise StudyError(f"--set: {text!r} names no setting; write it as key=value")
    if override.is_delete():
        raise StudyError(f"--set: {text!r} removes a setting, which verl may need; set a value, such as null")
    if override.is_sweep_override():
        raise StudyError(
            f"--set: {text!r} gives several values; a list is written as [a,b], a text with commas as 'a,b'"
        )
    yield override.key_or_group.replace("/", "."), value


def _reserved(name: str, value: Any) -> str | None:
    """The reserved setting that this sets, replaces or changes a part of."""
    if isinstance(value, dict):
        inner = (_reserved(f"{name}.{key}", part) for key, part in value.items())
        return next((found for found in inner if found is not None), None)
    return next((own for own in RESERVED if _within(name, own)), None)


def _within(name: str, other: str) -> bool:
    return f"{name}.".startswith(f"{other}.")


def _line(error: Exception) -> str:
    return " ".join(str(error).partition("See https")[0].split())
