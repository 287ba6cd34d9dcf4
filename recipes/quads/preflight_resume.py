"""The checkpoint that a run goes on from: complete, readable, and written with which settings. Before Ray starts."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

from omegaconf import DictConfig

from quads_ops.settings import QuadsSettings, SettingsError
from quads_recipe import alarms
from quads_recipe.preflight_values import ACTOR, devices, select
from quads_recipe.settings_difference import compute_otherwise, differences

MODE, FROM = "trainer.resume_mode", "trainer.resume_from_path"
TRACKER = "latest_checkpointed_iteration.txt"
"""Holds the number of the latest checkpoint; verl writes it last."""
FILES = {
    "model": "model_world_size_{}_rank_{}.pt",
    "optimizer": "optim_world_size_{}_rank_{}.pt",
    "extra": "extra_state_world_size_{}_rank_{}.pt",
}
"""What verl 0.9.1 loads for each word of `checkpoint.load_contents` (fsdp_checkpoint_manager.py there)."""

_WORLD_SIZE = re.compile(r"_world_size_(\d+)_rank_")


def check(config: DictConfig, settings: QuadsSettings) -> list[str]:
    """Lines for the terminal; none for a run that starts from scratch.

    Raises:
        SettingsError: a file of the checkpoint is missing or broken; names it.
    """
    mode = select(config, MODE)
    if mode == "disable":
        return []
    name = MODE if mode == "auto" else FROM
    folder = _latest(config) if mode == "auto" else _given(config)
    if folder is None:
        return []
    if not folder.is_dir():
        return [f"warning: {folder} is the latest checkpoint by {TRACKER}, but is not there; training starts anew"]
    _check_world_size(config, name, folder)
    for file in _files(config, folder):
        if trouble := _trouble(file):
            raise SettingsError(name, select(config, name), f"{file} {trouble}; {_remedy(folder)}")
    return _compare(name, select(config, name), folder, settings)


def _given(config: DictConfig) -> Path | None:
    path = select(config, FROM)
    return None if "://" in path else Path(path).absolute()


def _latest(config: DictConfig) -> Path | None:
    """What verl's `find_latest_ckpt_path` finds, there or not; None where there is no checkpoint yet."""
    root = Path(config.trainer.default_local_dir).absolute()
    tracker = root / TRACKER
    if not tracker.is_file():
        return None
    text = tracker.read_text(errors="replace").strip()
    if not re.fullmatch(r"\d+", text):
        raise SettingsError(
            MODE, "auto", f"{tracker} holds {text[:40]!r}, not a step; write the number of a checkpoint into it"
        )
    return root / f"global_step_{text}"


def _everything_here(config: DictConfig) -> bool:
    """False where the workers may have other disks than this machine, each with its own part of the checkpoint."""
    return config.trainer.nnodes == 1 and not select(config, "ray_kwargs.ray_init.address")


def _check_world_size(config: DictConfig, name: str, folder: Path) -> None:
    """Files have the number of devices in their names, so another number finds none."""
    written = {int(match[1]) for file in (folder / "actor").glob("*.pt") if (match := _WORLD_SIZE.search(file.name))}
    count = devices(config)
    if written and count not in written:
        raise SettingsError(
            name,
            select(config, name),
            f"{folder} was written by {min(written)} devices, and this run has {count} (trainer.nnodes x "
            f"trainer.n_gpus_per_node); use as many, or start anew with {MODE}=disable",
        )


def _files(config: DictConfig, folder: Path) -> Iterator[Path]:
    """What verl will load."""
    count = devices(config)
    for content in select(config, ACTOR + "checkpoint.load_contents", list(FILES)):
        for rank in range(count) if content in FILES else ():
            file = folder / "actor" / FILES[content].format(count, rank)
            if file.exists() or _everything_here(config):
                yield file
    if (data := folder / "data.pt").exists():  # verl takes the data from the start where it is missing
        yield data


def _trouble(file: Path) -> str | None:
    """What is wrong with a file of torch.save, a zip archive, whose directory is at its end."""
    if not file.is_file():
        return "is missing"
    if not file.stat().st_size:
        return "is empty"
    try:
        with zipfile.ZipFile(file):
            return None
    except (zipfile.BadZipFile, OSError) as error:
        return f"can't be read, as if it was cut off ({error})"


def _remedy(folder: Path) -> str:
    """Names the latest checkpoint before this one."""
    step = _step(folder)
    earlier = [other for other in folder.parent.glob("global_step_*") if _step(other) < step]
    other = max(earlier, key=_step, default=folder.parent / "global_step_N")
    return f"resume from an earlier one ({MODE}=resume_path {FROM}={other}), or start anew ({MODE}=disable)"


def _step(folder: Path) -> float:
    digits = folder.name.removeprefix("global_step_")
    return int(digits) if digits.isdecimal() else float("inf")


def _compare(name: str, value: str, folder: Path, settings: QuadsSettings) -> list[str]:
    """Other settings than the checkpoint's are allowed, such as arm quads after a warm-up in bf16, but said."""
    try:
        found = differences(alarms.saved_settings(folder), settings)
    except (ValueError, OSError) as error:
        remedy = f"{folder / alarms.FILE} can't be read ({error}); remove it, and the alarms start anew"
        raise SettingsError(name, value, remedy) from None
    if not found:
        return []
    changes = ", ".join(f"{d.name} was {d.before!r} and is {d.now!r}" for d in found)
    anew = "; the alarms take a new baseline of |d|" if compute_otherwise(found) and settings.alarms.enabled else ""
    return [f"warning: resuming {folder} with other settings: {changes}{anew}"]
