"""The JSON files of a checkpoint, read before transformers does, which takes each for an object."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from quads_ops.settings import SettingsError

MODEL = ("config.json", "generation_config.json")
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")

_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_SURROGATE = re.compile("[\ud800-\udfff]")


def check(setting: str, folder: Path, names: Iterable[str]) -> None:
    """Of the files `names`, those that are there.

    Args:
        setting: what holds `folder`, for messages.
        folder: the checkpoint's; anything else is not checked.
        names: relative to the folder.

    Raises:
        SettingsError: a file that can't be read, is no JSON in UTF-8, holds no object, or text that is no Unicode.
    """
    for name in names:
        if os.path.lexists(folder / name):
            read(setting, folder, name)


def read(setting: str, folder: Path, name: str) -> dict[str, Any]:
    """The object in a file. Raises SettingsError."""
    try:
        return _object(read_text(setting, folder, name))
    except _Unfit as problem:
        raise SettingsError(setting, str(folder), f"{name} {problem}") from None


def read_text(setting: str, folder: Path, name: str) -> str:
    """The text of a file. Raises SettingsError."""
    try:
        return (folder / name).read_text(encoding="utf-8")
    except OSError as error:
        problem = f"{name} can't be read ({error.strerror}); copy it again"
    except UnicodeDecodeError as error:
        problem = f"{name} is not UTF-8 text (byte {error.start}); copy it again, or save it as UTF-8"
    raise SettingsError(setting, str(folder), problem)


class _Unfit(Exception):
    """Says what is wrong with the file, and the remedy."""


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        without = ", or save it without a byte order mark" if text.startswith("\ufeff") else ""
        raise _Unfit(f"is not JSON ({error}); copy it again{without}") from None
    except ValueError as error:  # a number of more digits than Python reads
        raise _Unfit(f"holds a number that can't be read ({error}); copy it again") from None
    except RecursionError:
        raise _Unfit("is nested too deeply to be read; copy it again") from None
    if not isinstance(value, dict):
        raise _Unfit(f"holds {shown(value)}, and must hold an object, {{...}}; copy it again")
    broken = next(surrogates(value), None) if _ESCAPED_SURROGATE.search(text) else None
    if broken is not None:
        raise _Unfit(f"holds text that is no Unicode (a lone surrogate) in {broken}; correct it, or copy it again")
    return value


def surrogates(value: Any, place: str = "") -> Iterator[str]:
    """Fields of a JSON value that hold a lone surrogate, which is no Unicode, or are called so.

    place: that of the value itself.
    """
    if isinstance(value, str) and _SURROGATE.search(value):
        yield place
    elif isinstance(value, dict):
        for key, part in value.items():
            here = f"{place}.{key}".removeprefix(".")
            yield from [ascii(here)] if _SURROGATE.search(key) else surrogates(part, here)
    elif isinstance(value, list):
        for number, part in enumerate(value):
            yield from surrogates(part, f"{place}[{number}]")


def shown(value: Any) -> str:
    """A value for a message, as JSON has it, on one line and not longer than one."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= 80 else f"{text[:77]}..."


def one_line(error: Exception) -> str:
    """What a library raised, for a message."""
    text = " ".join(str(error).split()).encode("utf-8", "backslashreplace").decode()
    return f"{type(error).__name__}: {text[:400]}" if text else type(error).__name__


def culprit(folder: Path, name: str, loads: Callable[[Path], object]) -> str | None:
    """Which field of a file makes `loads` fail: the first without which it doesn't, as `name: field = value`.

    Args:
        folder: for which `loads` fails.
        name: a file that `read` reads.
        loads: is given folders with the same files but this one. What it raises counts as failing.
    """
    document = read("", folder, name)
    with tempfile.TemporaryDirectory() as temporary:
        for file in folder.iterdir():
            if file.name != name:
                (Path(temporary) / file.name).symlink_to(file.resolve())
        for field, value in document.items():
            rest = {key: other for key, other in document.items() if key != field}
            (Path(temporary) / name).write_text(json.dumps(rest), encoding="utf-8")
            try:
                loads(Path(temporary))
            except Exception:  # noqa: S112 - of the libraries, on a file that they refuse
                continue
            return f"{name}: {field} = {shown(value)}"
    return None
