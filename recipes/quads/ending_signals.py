"""The signals that ask a command to end: ignored for a while, and their handlers put back."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def kept() -> Iterator[dict[signal.Signals, Any]]:
    """Gives the handlers in force, and puts them back at the end. In the main thread, where alone they can be set."""
    before = {name: signal.getsignal(name) for name in ENDING}
    try:
        yield before
    finally:
        for name, handler in before.items():
            signal.signal(name, signal.SIG_DFL if handler is None else handler)  # None: not set from Python


@contextmanager
def handled(handler: Callable[..., None]) -> Iterator[None]:
    """With `handler` for each of them that is not ignored already, as SIGHUP is under nohup."""
    with kept() as before:
        for name, former in before.items():
            if former != signal.SIG_IGN:
                signal.signal(name, handler)
        yield


def ignore() -> None:
    for name in ENDING:
        signal.signal(name, signal.SIG_IGN)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ignores them. Only the main thread gets them; in another one this does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with kept():
        ignore()
        yield
