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
from fsbarrier.errors import StoreError
from fsbarrier.store.retry import Backoff

#: the shortest pause between two looks
FIRST_PAUSE_S = 0.001
#: the longest pause of a short wait, in seconds; in longer ones it grows further (Polling)
POLL_MAX_S = 0.05
#: the pause between two looks, as a part of the wait so far
LATENESS = 0.01
#: how often a long pause checks for the end, since a signal handler may not set the event that the pause waits for
END_S = 0.1


class Polling:
    """Runs the looks of `loop` and the pauses between them. Any thread may end a pause by setting `wake`."""

    def __init__(
        self, loop: NodeLoop, wake: threading.Event, look_once: Callable[[float], bool] | None = None
    ) -> None:
        """`look_once`: one look, if it is more than the loop's tick."""
        self._loop, self._wake, self._look_once = loop, wake, look_once or loop.tick
        self._root = loop.observer.paths.root
        self._hints = Hints(self._root, wake.set)
        self._pause_s = FIRST_PAUSE_S
        #: when this node last had something to do, and when it looked last
        self._busy_at = self._looked_at = 0.0
        self._failing_since: float | None = None

    @property
    def failing(self) -> bool:
        """Whether the filesystem failed in the last look."""
        return self._failing_since is not None

    def look(self, now: float) -> bool:
        """Run one tick; True if anything happened, so more may follow at once.

        A failing filesystem is retried for `outage_s`. The others may declare this node lost meanwhile, but if it fails for all of them,
        they go on together afterwards. Raises StoreError if it fails for longer, and whatever the loop raises except OSError.
        """
        self._looked_at = now
        try:
            busy = self._look_once(now)
        except OSError as error:
            outage_s = self._loop.observer.paces.outage_s
            self._failing_since = now if self._failing_since is None else self._failing_since
            failing_s = now - self._failing_since
            if failing_s < outage_s:
                return False
            rank, host = self._loop.node.rank, self._loop.join.host
            message = f"node {rank}: {self._root} has failed for {outage_s:g} s: {error}"
            raise StoreError(message, rank, host, failing_s) from None
        self._failing_since = None
        return busy

    def pause(
        self,
        pauses: Backoff,
        *,
        busy: bool,
        hints: bool = True,
        ended: Callable[[], bool] | None = None,
        most_s: float = float("inf"),
    ) -> None:
        """Wait until the next look is due, or the node has `ended`, and at most `most_s`.

        `pauses`: the first pauses. `hints`: a file that appears may end a longer pause early.
        """
        pause_s = min(self.next_pause(pauses, busy=busy), most_s)
        self._hints.watch(self._row_dir() if hints and pause_s >= pauses.most_s else None)
        until = time.monotonic() + pause_s
        while not (ended is not None and ended()) and (left_s := until - time.monotonic()) > 0:
            if self._wake.wait(left_s if ended is None else min(left_s, END_S)):
                self._wake.clear()
                return

    def next_pause(self, pauses: Backoff, *, busy: bool) -> float:
        """The pause after the last look."""
        if busy:
            self._busy_at = self._looked_at
        self._pause_s = pauses.first_s if busy else pauses.after(self._pause_s)
        waited_s = self._looked_at - self._busy_at
        due_in_s = self._loop.observer.schedule.beats_due - self._looked_at
        pause_s = max(self._pause_s, LATENESS * waited_s)
        # Not positive: heartbeats are due at once, or the last look failed before it read them.
        return min(pause_s, due_in_s) if due_in_s > 0 else self._pause_s

    def close(self) -> None:
        """Stop watching. Never raises."""
        self._hints.close()

    def _row_dir(self) -> Path | None:
        """The directory of the facts that this node waits for."""
        node = self._loop.node
        if node.generation is None or node.position is None:
            return None
        return self._loop.observer.row_dir(node.generation.number, node.position)
