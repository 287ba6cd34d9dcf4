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
_LONGEST_SOCKET = 107
"""Bytes of a socket's path on Linux."""
_LONGEST_FOLDER = _LONGEST_SOCKET - len("/session_2026-01-01_00-00-00_000000_0000000/sockets/plasma_store")
"""What they leave of Ray's folder."""
_SOCKET = "quads-0123456789-100-10.sock"


def check(config: DictConfig) -> None:
    """A cluster that runs already is not looked at: its machines are others, and have what they were started with.

    Raises:
        SettingsError.
    """
    if not isinstance(config.get("ray_kwargs"), DictConfig) or not isinstance(select(config, _INIT), dict):
        raise SettingsError(_INIT, select(config, _INIT), "must be a mapping; leave it out, or set single keys of it")
    _check_sockets()
    if joins_cluster(config):
        return
    _check_cpus(config)
    _check_folder(config)


def joins_cluster(config: DictConfig) -> bool:
    """Whether `ray.init` will join a cluster that runs already: by `ray_init.address`, by RAY_ADDRESS (which `ray job
    submit` sets), or by the file that `ray start` leaves on its machine."""
    init = select(config, _INIT) if isinstance(config.get("ray_kwargs"), DictConfig) else None
    init = init if isinstance(init, dict) else {}
    address = init.get("address")
    if address in (None, "", "auto"):  # only then Ray looks further
        address = os.environ.get("RAY_ADDRESS") or address
    if address:
        return address != "local"
    folder = init.get("_temp_dir") or (None if _on_cpu() else _folder_of_ray())  # on a CPU each run has its own
    return folder is not None and os.path.exists(os.path.join(folder, "ray_current_cluster"))


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
    if given:
        name, shown, folder = _INIT + "._temp_dir", given, given
    elif _on_cpu():
        name, shown, folder = "TMPDIR", tempfile.gettempdir(), f"{tempfile.gettempdir()}/quads-12345678"
    else:
        name = "RAY_TMPDIR" if "RAY_TMPDIR" in os.environ else "TMPDIR"
        folder = _folder_of_ray()
        shown = os.path.dirname(folder)
    if len(str(folder).encode()) > _LONGEST_FOLDER:
        raise SettingsError(
            name, shown, "is too long for the sockets that Ray puts there; use a short one, such as /tmp"
        )


def _check_sockets() -> None:
    """Of the weight sync, which lie in TMPDIR (`quads_recipe.run_id`)."""
    folder = tempfile.gettempdir()
    if len(os.path.join(folder, _SOCKET).encode()) > _LONGEST_SOCKET:
        raise SettingsError("TMPDIR", folder, "is too long for the sockets of the weight sync; use one such as /tmp")


def _on_cpu() -> bool:
    return os.environ.get("VERL_PLATFORM", "").lower() == "cpu"


def _folder_of_ray() -> str:
    """Ray's own choice where none is given (`get_default_ray_temp_dir` in ray/_common/utils.py)."""
    return os.path.join(os.environ.get("RAY_TMPDIR", os.environ.get("TMPDIR", "/tmp")), "ray")
