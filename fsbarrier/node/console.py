"""What a daemon tells about its events: one line each in plain words, and the evidence below the bad ones."""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from fsbarrier.view.event_text import event_line

AGAIN = "again: "  # how the reason of a generation begins that tries a failed program once more


class Console:
    """Prints in a thread of its own: a terminal that somebody stopped, or a full disk behind it, must not hold a node up."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[tuple[int, str] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._print, name="console", daemon=True)
        self._thread.start()

    def say(self, text: str, *, to: int = 1) -> None:
        """Print to standard output (1) or standard error (2), soon."""
        self._waiting.put((to, text))

    def close(self, timeout_s: float) -> None:
        """Wait until all is printed, or can be printed no more."""
        self._waiting.put(None)
        self._thread.join(timeout_s)

    def _print(self) -> None:
        sys.stdout.flush()
        while (item := self._waiting.get()) is not None:
            fd, text = item
            with contextlib.suppress(OSError):  # nobody need read along; the journal has it
                os.write(fd, text.encode(errors="surrogateescape"))


def told(line: Mapping[str, Any]) -> list[str]:
    """The lines for the console and the daemon's log; [] where an event is not worth any."""
    text = event_line(line)
    return [text, *(f"  | {detail}" for detail in _evidence(line))] if text else []


def _evidence(line: Mapping[str, Any]) -> Iterator[str]:
    match line["event"]:
        case "node_lost":
            for item in line["lost"]:
                if item.get("beat_age_s") is not None:
                    yield f"node {item['node_rank']}: last heartbeat seen {item['beat_age_s']:.1f} s ago"
                yield from (f"node {item['node_rank']}: {words}" for words in item.get("log", ()))
        case "work_failed":
            yield from line.get("log", ())
        case "generation_started" if line["reason"].startswith(AGAIN):
            yield line["reason"].removeprefix(AGAIN)
