"""Polls the shared directory with back-off, for the daemon and for members of groups.

The first looks of a wait follow each other quickly, so a short wait ends in time. After that the pause is one per cent of the wait so
far: a wait ends at most one per cent late, and in a phase of ten minutes a node looks about once a heartbeat.

On a local mount a file that appears ends a long wait early. That is only a hint: inotify does not report writes of other hosts, and the
machine may have no watches left. Only one directory is watched, and only in a long wait, since most barriers are passed before a watch
would pay off.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from watchdog.events import FileCreatedEvent, FileMovedEvent, FileSystemEvent, FileSystemEventHandler
from watchdog.observers import Observer
from watchdog.observers.api import BaseObserver

from fsbarrier.coordination.loop import LookAgain, NodeLoop
from fsbarrier.store.mounts import LOCAL, mount_of
from fsbarrier.store.retry import Backoff

# The library's messages about its own threads are noise in our log.
logging.getLogger("watchdog").setLevel(logging.CRITICAL)

#: the shortest pause between two looks
FIRST_PAUSE_S = 0.001
#: the longest pause of a short wait, in seconds; in longer ones it grows further (Polling)
POLL_MAX_S = 0.05
#: the pause between two looks, as a fraction of the wait so far
LATENESS = 0.01
#: how often a long pause checks for the end, since a signal handler may not set the event that the pause waits for
END_S = 0.1
#: Facts appear by a create or a rename. Other events, such as this node's own listings, would wake it needlessly.
ARRIVALS: list[type[FileSystemEvent]] = [FileCreatedEvent, FileMovedEvent]


class Pace:
    """The pauses of one node between its looks, in seconds. Time is passed in."""

    def __init__(self, loop: NodeLoop) -> None:
        self._loop = loop
        self._pause_s = FIRST_PAUSE_S
        #: when this node last had something to do
        self._busy_at = 0.0

    def next_pause(self, looked_at: float, pauses: Backoff, again: LookAgain) -> float:
        """The pause after a tick that returned `again`. `pauses`: the first pauses of a wait."""
        if again is not LookAgain.AT_USUAL_PACE:
            self._busy_at, self._pause_s = looked_at, pauses.first_s
            return 0.0 if again is LookAgain.NOW else self._pause_s
        self._pause_s = pauses.after(self._pause_s)
        due_in_s = self._loop.observer.schedule.beats_due - looked_at
        pause_s = max(self._pause_s, LATENESS * (looked_at - self._busy_at))
        # If `due_in_s` is not positive, heartbeats are due at once, or the last look failed before it read them.
        return min(pause_s, due_in_s) if due_in_s > 0 else self._pause_s


class LookWaits(FileSystemEventHandler):
    """A thread's waits for the next look of its node. Any thread may end one by setting `wake`."""

    def __init__(self, loop: NodeLoop, wake: threading.Event) -> None:
        self._loop, self._wake = loop, wake
        self._watcher: BaseObserver | None = None
        self._watched: Path | None = None
        self._may_watch = _is_local(loop.observer.paths.root)

    def wait(self, pause_s: float, *, hints: bool = True, ended: Callable[[], bool] | None = None) -> None:
        """Wait for `pause_s`, or until the node has `ended`. `hints`: a file that appears may end the wait early."""
        self._watch(self._row_dir() if hints else None)
        until = time.monotonic() + pause_s
        while not (ended is not None and ended()) and (left_s := until - time.monotonic()) > 0:
            if self._wake.wait(left_s if ended is None else min(left_s, END_S)):
                self._wake.clear()
                return

    def on_any_event(self, event: FileSystemEvent) -> None:
        self._wake.set()

    def close(self) -> None:
        """Stop watching. Never raises."""
        if self._watcher is not None:
            with contextlib.suppress(RuntimeError):
                self._watcher.stop()

    def _watch(self, directory: Path | None) -> None:
        """Watch this directory (None: nothing) instead of the last one. Never raises."""
        if not self._may_watch or directory == self._watched:
            return
        try:
            if self._watcher is None:
                self._watcher = Observer()
                self._watcher.daemon = True
                self._watcher.start()
            self._watcher.unschedule_all()
            if directory is not None:
                self._watcher.schedule(self, str(directory), event_filter=ARRIVALS)
            self._watched = directory
        except (OSError, RuntimeError):
            # No inotify, or no watch or thread left. Polling is enough.
            self._may_watch = False

    def _row_dir(self) -> Path | None:
        """The directory of the facts that this node waits for."""
        node = self._loop.node
        if node.generation is None or node.position is None:
            return None
        return self._loop.observer.row.row_dir(node.generation.number, node.position)


def _is_local(path: Path) -> bool:
    try:
        return mount_of(path).family.category == LOCAL
    except OSError:
        return False
