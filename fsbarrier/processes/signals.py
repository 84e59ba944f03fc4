"""Handlers for the signals that end a program."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(SystemExit):
    """A signal asked this process to end. Unless this is caught, the process exits with the usual code."""

    code: int


def end(number: int, frame: FrameType | None) -> NoReturn:
    """A handler that ends the program with an exception, so that clean-up code runs."""
    raise Interrupted(130 if number == signal.SIGINT else 143)


def end_once(number: int, frame: FrameType | None) -> NoReturn:
    """Do the same as `end`, but ignore later signals, so that a program can wait for its nodes to stop."""
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
