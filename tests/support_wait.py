"""Waiting for what another process does."""

import time
from collections.abc import Callable


def eventually(done: Callable[[], bool], seconds: float = 60) -> bool:
    """Whether `done` comes true within that time."""
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True
