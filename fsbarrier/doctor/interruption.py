"""Signals that end a doctor in order, so that nothing of it stays in the directory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interruption:
    """Its `handle` is the handler of signals; they end the command by a SystemExit with their exit code.

    The first one is only noted, and raised where the doctor calls `heed`: its threads are at work, and an exception out of nowhere
    can break the joining of one. Inside `at_once`, where it only waits, it is raised on the spot; so is a second signal, anywhere.
    """

    def __init__(self) -> None:
        self._noted: list[int] = []
        self._at_once = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        self._noted.append(number)
        if self._at_once or len(self._noted) > 1:
            self.heed()

    def heed(self) -> None:
        """Raise SystemExit if a signal has come."""
        if self._noted:
            raise SystemExit(128 + self._noted[0])

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Let a signal interrupt what is done inside."""
        self._at_once = True
        try:
            self.heed()
            yield
        finally:
            self._at_once = False
