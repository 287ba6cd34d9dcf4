"""Settings that verl's dataclasses don't have, and values that they refuse: verl finds out when it builds them."""

from __future__ import annotations

import difflib
import inspect
import re
import warnings
from collections.abc import Iterator, Sequence

from omegaconf import DictConfig, OmegaConf

from quads_ops.settings import SettingsError
from quads_recipe.preflight_values import ACTOR, MODEL, ROLLOUT

_REF = "actor_rollout_ref.ref"
_MOVED_OF_REF = (
    "log_prob_micro_batch_size",
    "log_prob_micro_batch_size_per_gpu",
    "log_prob_use_dynamic_bsz",
    "log_prob_max_token_len_per_gpu",
)
"""What verl's worker renames in the reference policy's settings before it builds them."""
_BUILT = (ACTOR, ROLLOUT)
"""These need no files: they are built here too. Models are checked by `preflight_model`."""


def check(config: DictConfig) -> None:
    """Looks at every node that verl makes an object of in this run.

    Raises:
        SettingsError: a setting that its class doesn't have (names those that are spelt alike, else all), or values
        that it refuses.
    """
    for name in _nodes(config):
        _check_names(OmegaConf.select(config, name), name)
    for name in _BUILT:
        _build(OmegaConf.select(config, name.rstrip(".")))


def alike(name: str, known: Sequence[str]) -> list[str]:
    """Those of `known` that are spelt like `name`, the nearest first, at most three."""
    return difflib.get_close_matches(name, known, n=3)


def _nodes(config: DictConfig) -> list[str]:
    """What verl's worker and trainer build in this run, by name."""
    from verl.trainer.ppo.utils import need_critic, need_reference_policy, need_teacher_policy

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # verl's note that there is no critic
        needed = {
            _REF: need_reference_policy(config),
            "critic": need_critic(config),
            "distillation": need_teacher_policy(config),
        }
    always = [name.rstrip(".") for name in (ACTOR, ROLLOUT, MODEL)]
    return always + [name for name, there in needed.items() if there]


def _check_names(node: DictConfig, name: str) -> None:
    for at, inner in _groups(node, name):
        target = inner.get("_target_")
        if not isinstance(target, str):
            continue
        fields = _fields(f"{at}._target_", target)
        known = (*fields, *(_MOVED_OF_REF if at == _REF else ())) if fields else None
        for key in inner:
            if known and key not in known and not re.fullmatch("_.*_", str(key)):  # hydra's own
                near = alike(str(key), known)
                meant = f"perhaps {' or '.join(near)} is meant" if near else f"it has {', '.join(sorted(fields))}"
                value = OmegaConf.to_container(inner).get(key)
                raise SettingsError(f"{at}.{key}", value, f"verl's {target.split('.')[-1]} has no such field; {meant}")


def _groups(node: DictConfig, name: str) -> Iterator[tuple[str, DictConfig]]:
    """The node and all mappings in it, with their names; not those that refer to others."""
    yield name, node
    for key in node:
        if OmegaConf.is_missing(node, key) or OmegaConf.is_interpolation(node, key):
            continue
        if isinstance(inner := node[key], DictConfig):
            yield from _groups(inner, f"{name}.{key}")


def _fields(setting: str, target: str) -> list[str] | None:
    """What a class takes; None if that is anything. Raises SettingsError: there is no such class."""
    from hydra.utils import get_object

    try:
        parameters = inspect.signature(get_object(target)).parameters.values()
    except Exception as error:  # whatever the user's own module raises
        reason = " ".join(str(error).split())
        raise SettingsError(setting, target, f"can't be imported; leave verl's own: {reason}") from None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return [parameter.name for parameter in parameters if parameter.name != "_target_"]


def _build(node: DictConfig) -> None:
    from hydra.errors import InstantiationException
    from verl.utils.config import omega_conf_to_dataclass

    try:
        omega_conf_to_dataclass(node)
    except InstantiationException as error:
        said = re.search(r"^full_key: (\S+)", str(error), re.MULTILINE)
        name = said[1] if said else str(node._get_full_key(None))
        target = re.search(r"target '([^']+)'", str(error))
        shown = target[1].split(".")[-1] if target else None
        cause = error.__cause__ or error
        reason = " ".join(f"{type(cause).__name__}: {cause}".split())
        raise SettingsError(name, shown, f"verl can't build it; correct what this names: {reason}") from None
