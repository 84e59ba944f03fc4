"""Waiting for a state: the one loop for it in the tests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

# For a machine under any load; most of what is waited for takes milliseconds.
DEADLINE_S = 240.0


def until(
    holds: Callable[[], T],
    said: Callable[[], object] = str,
    *,
    deadline_s: float = DEADLINE_S,
    lives: Callable[[], object] = lambda: True,
) -> T:
    """What `holds` gives, once that is true. `said`: what is known where it does not come; `lives`: whether it may still come."""
    end, pause = time.monotonic() + deadline_s, threading.Event()
    while not (found := holds()):
        assert time.monotonic() < end and lives(), f"what was waited for does not come\n{said()}"
        pause.wait(0.01)
    return found
