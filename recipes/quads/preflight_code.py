"""Checks of the user's own code that verl loads by file and name: both are there. It is read, not run."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from quads_ops.settings import SettingsError
from quads_recipe.preflight_values import select

# (what holds the file, what holds the name in it)
_OWN = (
    ("reward.custom_reward_function.path", "reward.custom_reward_function.name"),
    ("custom_reward_function.path", "custom_reward_function.name"),  # an old place, which wins
    ("data.custom_cls.path", "data.custom_cls.name"),
    ("trainer.v1.sampler.custom_sampler.path", "trainer.v1.sampler.custom_sampler.name"),
)
_MANAGER = ("reward.reward_manager.module.path", "reward.reward_manager.name")
_MAKES_NAMES = ("globals", "exec", "setattr", "__getattr__")


def check(config: DictConfig) -> None:
    """Raises SettingsError."""
    own = [pair for pair in _OWN if select(config, pair[0]) is not None]
    if select(config, "reward.reward_manager.source") == "importlib":
        own.append(_MANAGER)
    for path_setting, name_setting in own:
        path, name = select(config, path_setting), select(config, name_setting)
        if not isinstance(name, str) or not name:
            raise SettingsError(name_setting, name, f"name what to take of {path_setting} ({path})")
        file = _file(path_setting, path)
        if file is not None and not _may_define(path_setting, path, file, name):
            raise SettingsError(name_setting, name, f"{file.name} has nothing of this name; name what it defines")


def _file(setting: str, path: Any) -> Path | None:
    """Where the source is, as verl finds it; None for what has none, such as a compiled module."""
    if not isinstance(path, str) or not path:
        raise SettingsError(setting, path, "no file; give a Python file, or pkg:// and a module's name")
    if path.startswith("pkg://"):
        return _module(setting, path)
    file = Path(path.removeprefix("file://"))
    if not file.is_file():
        home = "; write out what ~ stands for" if path.startswith("~") else "; give a Python file"
        raise SettingsError(setting, path, f"no such file{home}")
    if file.suffix not in (".py", ".pyc", ".so"):
        raise SettingsError(setting, path, "is no Python file; verl loads those that end with .py")
    return file if file.suffix == ".py" else None


def _module(setting: str, path: str) -> Path | None:
    name = path.removeprefix("pkg://").replace("/", ".")
    try:
        spec = find_spec(name)
    except (ImportError, ValueError) as error:
        raise SettingsError(setting, path, f"no such module: {error}; install it, or add it to PYTHONPATH") from None
    if spec is None:
        raise SettingsError(setting, path, f"no such module as {name}; install it, or add it to PYTHONPATH")
    return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None


def _may_define(setting: str, path: str, file: Path, name: str) -> bool:
    """False only if the module surely has nothing of that name."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError) as error:
        raise SettingsError(setting, path, f"is no Python that can be read: {error}") from None
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.alias):
            names = [(node.asname or node.name).partition(".")[0]]
        elif isinstance(node, ast.Name):
            names = [node.id]
        else:
            continue
        if name in names or "*" in names or any(one in _MAKES_NAMES for one in names):
            return True
    return False
