"""Words with numbers, for the terminal, messages and the report."""

from __future__ import annotations


def plural(count: int, noun: str) -> str:
    """`1 run`, `2 runs`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
