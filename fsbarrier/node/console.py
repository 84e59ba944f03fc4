"""Where a daemon prints."""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading


class Console:
    """Prints in a thread of its own: a stopped terminal, or a full disk that output goes to, must not hold the node up."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[tuple[int, str] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._print, name="console", daemon=True)
        self._thread.start()

    def say(self, text: str, *, to: int = 1) -> None:
        """Print to standard output (1) or standard error (2), soon."""
        self._waiting.put((to, text))

    def close(self, timeout_s: float) -> None:
        """Wait until everything is printed, for at most `timeout_s`."""
        self._waiting.put(None)
        self._thread.join(timeout_s)

    def _print(self) -> None:
        sys.stdout.flush()
        while (item := self._waiting.get()) is not None:
            fd, text = item
            # The terminal may be gone. The journal has every event too.
            with contextlib.suppress(OSError):
                os.write(fd, text.encode(errors="surrogateescape"))
