"""Reads the JSON files of a study. What is damaged gives one line: the file, the field, its value and the remedy."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

Check = Callable[[object, str], None]
"""Takes a value and where it is in the file; raises Misfit."""


class StudyError(Exception):
    """A wrong argument or a folder that doesn't fit: the message names it and the remedy."""


class Misfit(Exception):
    """A value that a file can't have there: the message names the field, the value and what it must be."""


def _misfit(where: str, value: object, must: str) -> Misfit:
    return Misfit(f"{where} is {shown(value)}, must be {must}")


def shown(value: object) -> str:
    """A value of JSON for a message: one line of ASCII, cut to 60 characters."""
    try:
        text = json.dumps(value)
    except ValueError:  # a whole number of more digits than Python prints
        return "a number of thousands of digits"
    return text if len(text) <= 60 else text[:57] + "..."


def read_object(file: Path, remedy: str, fields: Mapping[str, Check] | None = None) -> dict:
    """The JSON object in a file.

    fields: what must be in it, with what its value must be; what may be missing is `optional`.
    Raises StudyError, which names the file and ends with `remedy`.
    """
    try:
        values = parse(_text(file))
        if not isinstance(values, dict):
            raise Misfit(f"holds no JSON object but {shown(values)}")
        record(fields or {})(values, "")
    except (ValueError, Misfit) as error:
        raise StudyError(f"{file}: is broken, {error}; {remedy}") from None
    return values


def _text(file: Path) -> str:
    if file.is_dir():
        raise ValueError("a folder and no file")
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"no JSON (byte {error.start} is no UTF-8)") from None
    except OSError as error:
        raise ValueError(f"it can't be read ({error.strerror})") from None


def parse(text: str) -> object:
    """A value of JSON. Raises ValueError: it is none, is nested too deeply, or holds half of a surrogate pair."""
    if not text.strip():
        raise ValueError("no JSON (it is empty)")
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("no JSON that can be read (it is nested too deeply)") from None
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise ValueError(f"holds {half}, half of a surrogate pair, which is no character") from None
    except ValueError as error:
        raise ValueError(f"no JSON ({error})") from None
    return value


# -- checks


def number(value: object, where: str) -> None:
    """A finite number."""
    try:
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return
    except OverflowError:  # a whole number beyond all floats
        pass
    raise _misfit(where, value, "a finite number")


def text(value: object, where: str) -> None:
    if not isinstance(value, str):
        raise _misfit(where, value, "a text")


def truth(value: object, where: str) -> None:
    if not isinstance(value, bool):
        raise _misfit(where, value, "true or false")


def whole(least: int, most: int = 2**53) -> Check:
    """A whole number of at least `least` and at most `most`."""

    def check(value: object, where: str) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            upper = f" and at most {most}" if most < 2**53 else ""
            raise _misfit(where, value, f"a whole number of at least {least}{upper}")

    return check


def at_least(least: float) -> Check:
    """A finite number of at least `least`."""

    def check(value: object, where: str) -> None:
        number(value, where)
        if value < least:
            raise _misfit(where, value, f"at least {least:g}")

    return check


def one_of(choices: Collection[str]) -> Check:
    def check(value: object, where: str) -> None:
        if not isinstance(value, str) or value not in choices:
            raise _misfit(where, value, f"one of {', '.join(choices)}")

    return check


class optional:  # noqa: N801, one of the checks
    """null, or missing, or what `inner` wants."""

    def __init__(self, inner: Check):
        self._inner = inner

    def __call__(self, value: object, where: str) -> None:
        if value is not None:
            self._inner(value, where)


def many(inner: Check, least: int = 1, most: int | None = None, distinct: bool = False) -> Check:
    """A list of `least` to `most` of what `inner` wants; distinct: none of them twice."""

    def check(value: object, where: str) -> None:
        if not isinstance(value, list) or len(value) < least or (most is not None and len(value) > most):
            raise _misfit(where, value, f"a list of {least if least == most else f'{least} or more'}")
        for i, one in enumerate(value):
            inner(one, f"{where}[{i}]")
            if distinct and one in value[:i]:
                raise _misfit(f"{where}[{i}]", one, "there once")

    return check


def table(inner: Check) -> Check:
    """An object with any names, every value of which is what `inner` wants."""

    def check(value: object, where: str) -> None:
        if not isinstance(value, dict):
            raise _misfit(where, value, "a JSON object")
        for name, one in value.items():
            inner(one, f"{where}.{shown(name)[1:-1]}")

    return check


def record(fields: Mapping[str, Check]) -> Check:
    """An object with these fields, and maybe more; `where` is empty for that of the whole file."""

    def check(value: object, where: str) -> None:
        if not isinstance(value, dict):
            raise _misfit(where, value, "a JSON object")
        lacking = [name for name, inner in fields.items() if name not in value and not isinstance(inner, optional)]
        if lacking:
            raise Misfit(f"{where} has no {', '.join(lacking)}".lstrip())
        for name, inner in fields.items():
            inner(value.get(name), f"{where}.{name}".lstrip("."))

    return check
