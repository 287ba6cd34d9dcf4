"""Checks of the data files: there, readable, with enough rows, and with the columns that the run will ask for."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from quads_ops.settings import SettingsError
from quads_recipe.preflight_values import ROLLOUT, local_path, select

# What these managers of verl read of every row before they call a reward function, the user's own included.
_MANAGERS = ("naive", "dapo")
_REWARD_COLUMNS = ("data_source", "reward_model")
_OLD_NAMES = ("reward_manager", "reward_loop_source", "enable")  # verl still takes them, and they win
_OWN_REWARD = ("reward.custom_reward_function", "custom_reward_function")
_AGENTS = ("single_turn_agent", "tool_agent")


TRAIN, HELDOUT = "data.train_files", "data.val_files"


def check(config: DictConfig) -> int:
    """Returns the rows for training; sys.maxsize or more where not all can be counted. Raises SettingsError."""
    rows, batch = check_files(config, TRAIN), config.data.train_batch_size
    if rows < batch:
        few = f"holds {rows} rows, which is no batch; lower data.train_batch_size ({batch})"
        raise SettingsError(TRAIN, select(config, TRAIN), few)
    check_files(config, HELDOUT)
    return rows


def check_files(config: DictConfig, name: str) -> int:
    """The files that the setting `name` holds. Returns their rows; sys.maxsize or more where not all can be counted.

    Raises:
        SettingsError.
    """
    needed = _needed_columns(config)
    scored = "data_source" in needed and not any(select(config, f"{own}.path") for own in _OWN_REWARD)
    value = select(config, name)
    files = value if isinstance(value, list) else [value]
    if not files or not all(isinstance(file, str) and file for file in files):
        raise SettingsError(name, value, "no file; give a verl parquet, or a list of them")
    local = [local_path(name, file) for file in files if "://" not in file]
    rows = sum(_check_file(name, file, needed, scored) for file in local)
    return rows if len(local) == len(files) else sys.maxsize


def _needed_columns(config: DictConfig) -> dict[str, str]:
    """Column -> the setting that asks for it. None where the user's own code reads or scores the rows."""
    if select(config, "data.custom_cls.path"):
        return {}
    needed = {config.data.prompt_key: "data.prompt_key"}
    manager = select(config, "reward.reward_manager", {})
    stock = (
        manager.get("source") == "register"
        and manager.get("name") in _MANAGERS
        and not select(config, "reward.reward_model.enable")
        and not any(select(config, f"reward_model.{name}") for name in _OLD_NAMES)
        and select(config, ROLLOUT + "agent.default_agent_loop") in _AGENTS
        and not select(config, ROLLOUT + "agent.agent_loop_manager_class")
    )
    if stock:
        needed |= dict.fromkeys(_REWARD_COLUMNS, f"reward.reward_manager.name={manager['name']}")
    return needed


def _check_file(name: str, file: Path, needed: dict[str, str], scored: bool) -> int:
    """Its rows; one that is no parquet counts as many.

    scored: by verl's own functions.
    """
    if not file.is_file():
        raise SettingsError(name, str(file), "no such file; give a verl parquet")
    if file.suffix != ".parquet":
        if needed and file.suffix not in (".json", ".jsonl"):
            raise SettingsError(name, str(file), "verl reads files that end with .parquet, .json or .jsonl; give one")
        return sys.maxsize
    try:
        with _Parquet(file) as data:
            _check_columns(data, needed)
            if not data.rows:
                raise _Unfit("has no rows; give one that has")
            if "data_source" in needed:  # verl's own agents, which read chats
                _check_chats(data, next(iter(needed)))
            if scored and "agent_name" not in data.columns:
                _check_scored(data)
            return data.rows
    except _Unfit as problem:
        raise SettingsError(name, str(file), str(problem)) from None


class _Unfit(Exception):
    """Says what is wrong with the file, and the remedy."""


class _Parquet:
    """A file of data, opened once.

    Attributes:
        columns: their names.
        rows: how many.
    """

    def __init__(self, file: Path):
        from pyarrow import ArrowException, parquet

        self._errors = (ArrowException, OSError)
        try:
            self._file = parquet.ParquetFile(file)
        except self._errors as error:
            raise self._unreadable(error) from None
        self.columns: list[str] = self._file.schema_arrow.names
        self.rows: int = self._file.metadata.num_rows

    def __enter__(self) -> _Parquet:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def column(self, name: str) -> Any:
        """As a pyarrow.ChunkedArray."""
        try:
            return self._file.read(columns=[name]).column(name)
        except self._errors as error:
            raise self._unreadable(error) from None

    @staticmethod
    def _unreadable(error: Exception) -> _Unfit:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return _Unfit(f"not a parquet that can be read: {lines[0]}")


def _check_columns(data: _Parquet, needed: dict[str, str]) -> None:
    for column, setting in needed.items():
        # A row may name an agent of its own, which then scores it.
        if column not in data.columns and not (column in _REWARD_COLUMNS and "agent_name" in data.columns):
            there = ", ".join(data.columns)
            raise _Unfit(f"has no column {column} ({setting}); it has {there}. Add the column, or set another")


def _check_chats(data: _Parquet, column: str) -> None:
    """Every prompt is a list of messages, with at least one."""
    from pyarrow import compute, types

    prompts = data.column(column)
    if not (types.is_list(prompts.type) or types.is_large_list(prompts.type)):
        raise _Unfit(f"column {column} holds {prompts.type}; verl needs chat messages, a list of role and content")
    empty = compute.or_kleene(compute.is_null(prompts), compute.equal(compute.list_value_length(prompts), 0))
    row = compute.index(empty, True).as_py()
    if row >= 0:
        raise _Unfit(f"row {row + 1} of column {column} is empty; leave it out, or fill it")


def _check_scored(data: _Parquet) -> None:
    """verl's own scoring must know every `data_source`.

    It is asked with nothing to score: unknown ones raise NotImplementedError, known ones something else, or nothing.
    """
    from verl.utils.reward_score import default_compute_score

    for source in data.column("data_source").unique().to_pylist():
        try:
            default_compute_score(source, None, None)
        except NotImplementedError:
            remedy = f"set {_OWN_REWARD[0]}.path to a file with yours"
            raise _Unfit(f"verl has no reward for data_source {source!r}; {remedy}") from None
        except Exception:  # noqa: S110 - a known source, with nothing to score
            pass
