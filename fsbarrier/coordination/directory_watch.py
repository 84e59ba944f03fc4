"""Wake-up hints on local mounts: a long wait ends a millisecond after the last arrival, not at the next poll.

These are only hints, and polling goes on: inotify does not report writes of other hosts, and the machine may have no watches left. Only
one directory is watched, and only in a long wait, since most barriers are passed before a watch would pay off.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

from watchdog.events import FileCreatedEvent, FileMovedEvent, FileSystemEvent, FileSystemEventHandler
from watchdog.observers import Observer
from watchdog.observers.api import BaseObserver

from fsbarrier.store.mounts import LOCAL, mount_of

# The library's messages about its own threads are noise in our log.
logging.getLogger("watchdog").setLevel(logging.CRITICAL)

#: Facts appear by a create or a rename. Other events, such as this node's own listings, would wake it needlessly.
ARRIVALS: list[type[FileSystemEvent]] = [FileCreatedEvent, FileMovedEvent]


class Hints(FileSystemEventHandler):
    """Calls `wake` when something happens in the watched directory."""

    def __init__(self, root: Path, wake: Callable[[], None]) -> None:
        """`root`: the run directory. Nothing is watched unless it is on a local filesystem."""
        self._wake = wake
        self._observer: BaseObserver | None = None
        self._watched: Path | None = None
        self._usable = _is_local(root)

    def watch(self, directory: Path | None) -> None:
        """Watch this directory (None: nothing) instead of the last one. Never raises."""
        if not self._usable or directory == self._watched:
            return
        try:
            if self._observer is None:
                self._observer = Observer()
                self._observer.daemon = True
                self._observer.start()
            self._observer.unschedule_all()
            if directory is not None:
                self._observer.schedule(self, str(directory), event_filter=ARRIVALS)
            self._watched = directory
        except (OSError, RuntimeError):
            # No inotify, or no watch or thread left. Polling is enough.
            self._usable = False

    def on_any_event(self, event: FileSystemEvent) -> None:
        self._wake()

    def close(self) -> None:
        """Stop watching. Never raises."""
        if self._observer is not None:
            with contextlib.suppress(RuntimeError):
                self._observer.stop()


def _is_local(path: Path) -> bool:
    try:
        return mount_of(path).family.category == LOCAL
    except OSError:
        return False
