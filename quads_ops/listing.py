"""Names in messages: the first few, and how many more."""

from __future__ import annotations

from collections.abc import Sequence


def first_names(names: Sequence[str], show: int) -> str:
    """`a, b, c and 5 more`."""
    more = f" and {len(names) - show} more" if len(names) > show else ""
    return ", ".join(names[:show]) + more
