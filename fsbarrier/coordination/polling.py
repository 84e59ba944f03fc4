"""Polls the shared directory with back-off, for the daemon and for members of groups.

The first looks of a wait follow each other quickly, so a short wait ends in time. After that the pause is one per cent of the wait so
far: a wait ends at most one per cent late, and in a phase of ten minutes a node looks about once a heartbeat.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from fsbarrier.coordination.directory_watch import Hints
from fsbarrier.coordination.loop import NodeLoop
from fsbarrier.store.retry import Backoff

#: the shortest pause between two looks
FIRST_PAUSE_S = 0.001
#: the longest pause of a short wait, in seconds; in longer ones it grows further (Polling)
POLL_MAX_S = 0.05
#: the pause between two looks, as a part of the wait so far
LATENESS = 0.01
#: how often a long pause checks for the end, since a signal handler may not set the event that the pause waits for
END_S = 0.1


class Pace:
    """The pauses of one node between its looks. Time is passed in."""

    def __init__(self, loop: NodeLoop) -> None:
        self._loop = loop
        self._pause_s = FIRST_PAUSE_S
        #: when this node last had something to do
        self._busy_at = 0.0

    def next_pause(self, looked_at: float, pauses: Backoff, *, busy: bool) -> float:
        """The pause after a look. `pauses`: the first ones of a wait. `busy`: something happened, so more may follow at once."""
        if busy:
            self._busy_at = looked_at
        self._pause_s = pauses.first_s if busy else pauses.after(self._pause_s)
        due_in_s = self._loop.observer.schedule.beats_due - looked_at
        pause_s = max(self._pause_s, LATENESS * (looked_at - self._busy_at))
        # Not positive: heartbeats are due at once, or the last look failed before it read them.
        return min(pause_s, due_in_s) if due_in_s > 0 else self._pause_s


class LookWaits:
    """A thread's waits for the next look of its node. Any thread may end one by setting `wake`."""

    def __init__(self, loop: NodeLoop, wake: threading.Event) -> None:
        self._loop, self._wake = loop, wake
        self._hints = Hints(loop.observer.paths.root, wake.set)

    def wait(self, pause_s: float, *, hints: bool = True, ended: Callable[[], bool] | None = None) -> None:
        """Wait for `pause_s`, or until the node has `ended`. `hints`: a file that appears may end the wait early."""
        self._hints.watch(self._row_dir() if hints else None)
        until = time.monotonic() + pause_s
        while not (ended is not None and ended()) and (left_s := until - time.monotonic()) > 0:
            if self._wake.wait(left_s if ended is None else min(left_s, END_S)):
                self._wake.clear()
                return

    def close(self) -> None:
        """Stop watching. Never raises."""
        self._hints.close()

    def _row_dir(self) -> Path | None:
        """The directory of the facts that this node waits for."""
        node = self._loop.node
        if node.generation is None or node.position is None:
            return None
        return self._loop.observer.row_dir(node.generation.number, node.position)
