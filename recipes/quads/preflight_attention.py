"""Checks of the actor's attention: its package is there, and verl can part it over sequence parallel ranks."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from omegaconf import DictConfig

from quads_ops.settings import SettingsError
from quads_recipe.preflight_values import ACTOR, MODEL, select

NAME = MODEL + "override_config.attn_implementation"
_DEFAULT = "flash_attention_2"
"""verl's, where the setting is missing (`HFModelConfig` in verl/workers/config/model.py)."""
_SEQUENCE = ("ulysses_sequence_parallel_size", "fsdp_config.ulysses_sequence_parallel_size")


def check(config: DictConfig) -> None:
    """Raises SettingsError."""
    chosen = select(config, MODEL + "override_config", {}).get("attn_implementation", _DEFAULT)
    _check_package(config, chosen)
    for name in _SEQUENCE:
        size = select(config, ACTOR + name, 1)
        if isinstance(size, int) and size > 1 and "flash" not in str(chosen):
            # verl patches only transformers' flash attention (verl/models/transformers/monkey_patch.py); any other
            # would look at the part of the sequence that its rank has, without a word.
            remedy = f"is for flash attention only, and {NAME} is {chosen}; set it to 1"
            raise SettingsError(ACTOR + name, size, remedy)


def _check_package(config: DictConfig, chosen: str) -> None:
    """Only where this machine has a GPU, as those of the workers: another may have other packages."""
    if config.trainer.device != "cuda" or not torch.cuda.is_available() or chosen != _DEFAULT:
        return
    if not _installed("flash_attn") and not _installed("kernels"):  # transformers takes either
        raise SettingsError(
            NAME,
            chosen,
            f"needs the package flash-attn, which is not installed; install it (docs/install.md), or set +{NAME}=sdpa",
        )


def _installed(package: str) -> bool:
    """A mere folder of that name on the path, as a checkout's own `kernels` is when it is worked in, is no package."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None
