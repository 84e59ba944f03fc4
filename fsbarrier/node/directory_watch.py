"""Wake-up hints on local mounts: a long wait ends a millisecond after the last arrival instead of at the next poll.

Only a hint. Polling goes on as before and is the truth: inotify says nothing of what other hosts write, and may fail for want of
watches. One directory is watched at a time, and only once a wait has lasted: most barriers are passed before.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

from watchdog.events import FileCreatedEvent, FileMovedEvent, FileSystemEvent, FileSystemEventHandler
from watchdog.observers import Observer
from watchdog.observers.api import BaseObserver

from fsbarrier.host.mounts import LOCAL, mount_of

# What the library says of its own threads helps nobody.
logging.getLogger("watchdog").setLevel(logging.CRITICAL)

#: Facts are created or renamed into place. That somebody lists the directory, this node above all, is no news.
ARRIVALS: list[type[FileSystemEvent]] = [FileCreatedEvent, FileMovedEvent]


class Hints(FileSystemEventHandler):
    """Calls `wake` when something happens in the watched directory."""

    def __init__(self, root: Path, wake: Callable[[], None]) -> None:
        """`root`: the run directory; nothing is ever watched unless it is on a local filesystem."""
        self._wake = wake
        self._observer: BaseObserver | None = None
        self._watched: Path | None = None
        self._usable = _is_local(root)

    def watch(self, directory: Path | None) -> None:
        """Watch this directory (None: no directory) instead of the one before. Never raises."""
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
            # No inotify, no more watches, or no more threads: polling does without.
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
