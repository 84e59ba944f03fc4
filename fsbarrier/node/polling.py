"""How a node's loop looks at the shared directory: quickly while something happens, then more and more rarely.

The first looks of a wait follow each other fast, so that a short wait ends in time. After that each look comes when the wait has become
one per cent longer. So a wait lasts at most one per cent too long, and in a phase of ten minutes a node looks about once a heartbeat.
The daemon and the members of groups both wait in this way.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from fsbarrier.errors import StoreError
from fsbarrier.node.directory_watch import Hints
from fsbarrier.node.loop import NodeLoop
from fsbarrier.retry import Backoff

#: the shortest pause between two looks
FIRST_PAUSE_S = 0.001
#: A long wait may end so much later than what it waited for, as a part of its own length.
LATENESS = 0.01
#: How often a long pause asks whether the node is to end: a signal handler may not set the event that the pause waits for.
END_S = 0.1


class Polling:
    """Looks for `loop`, and waits between the looks. `wake` ends such a wait at once, from any thread."""

    def __init__(
        self, loop: NodeLoop, wake: threading.Event, look_once: Callable[[float], bool] | None = None
    ) -> None:
        """`look_once`: what a look is, where it is more than the loop's tick."""
        self._loop, self._wake, self._look_once = loop, wake, look_once or loop.tick
        self._root = loop.observer.paths.root
        self._hints = Hints(self._root, wake.set)
        self._pause_s = FIRST_PAUSE_S
        #: when this node last had something to do, and when it looked last
        self._busy_at = self._looked_at = 0.0
        self._failing_since: float | None = None

    def look(self, now: float) -> bool:
        """Let the loop look, decide and act once; True if there was something to do, so that more may follow at once.

        A failing filesystem is tried again for `outage_s`: the others may take this node for lost meanwhile, but if it fails for all
        of them, they go on together. Raises StoreError when it fails for longer, and whatever the loop raises except OSError.
        """
        self._looked_at = now
        try:
            busy = self._look_once(now)
        except OSError as error:
            outage_s = self._loop.rules.limits.outage_s
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
        self, pauses: Backoff, *, busy: bool, hints: bool = True, ended: Callable[[], bool] | None = None
    ) -> None:
        """Wait for the next look, unless the node has `ended`: where that is given, a long wait asks for it again and again.

        `pauses`: the first ones; `hints`: a file that appears may end a longer one early.
        """
        pause_s = self.next_pause(pauses, busy=busy)
        self._hints.watch(self._row_dir() if hints and pause_s >= pauses.most_s else None)
        until = time.monotonic() + pause_s
        while not (ended is not None and ended()) and (left_s := until - time.monotonic()) > 0:
            if self._wake.wait(left_s if ended is None else min(left_s, END_S)):
                self._wake.clear()
                return

    def next_pause(self, pauses: Backoff, *, busy: bool) -> float:
        """How long to wait after the look that has just been."""
        if busy:
            self._busy_at = self._looked_at
        self._pause_s = pauses.first_s if busy else pauses.after(self._pause_s)
        waited_s = self._looked_at - self._busy_at
        due_in_s = self._loop.observer.schedule.beats_due - self._looked_at
        pause_s = max(self._pause_s, LATENESS * waited_s)
        # The heartbeats are not due after a look that failed, and at once where the node wants to see everything anew.
        return min(pause_s, due_in_s) if due_in_s > 0 else self._pause_s

    def close(self) -> None:
        """Stop watching. Never raises."""
        self._hints.close()

    def _row_dir(self) -> Path | None:
        """The directory in which the facts appear that this node waits for."""
        node = self._loop.node
        if node.generation is None or node.position is None:
            return None
        return self._loop.observer.row_dir(node.generation.number, node.position)
