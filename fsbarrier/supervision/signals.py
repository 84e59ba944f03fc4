"""Signal handlers: one that ends a program by unwinding it, and handlers that hold for a while only."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def end(number: int, frame: FrameType | None) -> NoReturn:
    """A handler that ends the program by an exception, so that what is half made is removed."""
    raise SystemExit(128 + number)


@contextmanager
def ending_signals_handled(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """While this lasts, `handle` is called for the signals that end programs; afterwards they do what they did before.

    For the main thread, where alone Python lets handlers be set.
    """
    before = {number: signal.signal(number, handle) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
