"""Signals are handled in some way for a while, then as before."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def end(number: int, frame: FrameType | None) -> NoReturn:
    """A handler that ends the program by an exception, so that what is half made is removed."""
    raise SystemExit(128 + number)


@contextmanager
def handled(
    numbers: Sequence[signal.Signals], handle: Callable[[int, FrameType | None], None]
) -> Iterator[None]:
    """While this lasts, `handle` is called for these signals. For the main thread."""
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
