"""Signal handlers."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(SystemExit):
    """A signal asked this process to end. It ends with the usual exit code, unless somebody catches this."""

    code: int


def end(number: int, frame: FrameType | None) -> NoReturn:
    """A handler that ends the program with an exception, so that clean-up code runs."""
    raise Interrupted(130 if number == signal.SIGINT else 143)


def end_once(number: int, frame: FrameType | None) -> NoReturn:
    """As `end`; later signals are ignored, so that whoever waits for nodes to stop is not interrupted."""
    for each in ENDING:
        signal.signal(each, signal.SIG_IGN)
    end(number, frame)


@contextmanager
def ending_signals_handled(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Use `handle` for terminating signals inside this context, and restore the previous handlers afterwards.

    Only for the main thread, because Python sets handlers only there.
    """
    before = {number: signal.signal(number, handle) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
