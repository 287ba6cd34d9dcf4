"""Checks of what Ray is started with: too few CPUs make it wait for ever, and long paths are no sockets."""

from __future__ import annotations

import os
import tempfile

from omegaconf import DictConfig

from quads_ops.settings import SettingsError
from quads_recipe.preflight_values import is_number, select

_INIT = "ray_kwargs.ray_init"
_PER_DEVICE = 3
"""CPUs that verl 0.9.1 reserves for each device (`max_colocate_count` in verl/single_controller/ray/base.py)."""
_LONGEST_FOLDER = 107 - len("/session_2026-01-01_00-00-00_000000_0000000/sockets/plasma_store")
"""What Linux's 107 bytes for a socket's path leave of Ray's folder."""


def check(config: DictConfig) -> None:
    """A cluster that runs already (`ray_init.address`) is not looked at.

    Raises:
        SettingsError.
    """
    if not isinstance(config.get("ray_kwargs"), DictConfig) or not isinstance(select(config, _INIT), dict):
        raise SettingsError(_INIT, select(config, _INIT), "must be a mapping; leave it out, or set single keys of it")
    if select(config, _INIT + ".address"):
        return
    _check_cpus(config)
    _check_folder(config)


def _check_cpus(config: DictConfig) -> None:
    name = _INIT + ".num_cpus"
    value = select(config, name)
    available = os.cpu_count() if value is None else value
    devices = config.trainer.n_gpus_per_node
    needed = _PER_DEVICE * devices + 1
    if not is_number(available) or available < needed:
        raise SettingsError(
            name,
            value,
            f"is too few, and Ray would wait for ever: verl reserves {_PER_DEVICE} CPUs for each of {devices} devices "
            f"of a node, and one for itself. Set it to {needed} or more; Ray does not check that they exist",
        )


def _check_folder(config: DictConfig) -> None:
    given = select(config, _INIT + "._temp_dir")
    name = _INIT + "._temp_dir" if given else "TMPDIR"
    folder = given or f"{tempfile.gettempdir()}/quads-12345678"
    if len(str(folder).encode()) > _LONGEST_FOLDER:
        shown = given or tempfile.gettempdir()
        raise SettingsError(
            name, shown, "is too long for the sockets that Ray puts there; use a short one, such as /tmp"
        )
