"""Prints the ends of logs, and follows new lines: `logs`, `jobs logs`, and node 0's output in `launch ssh`."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fsbarrier.rundir.log_tail import fit_for_terminal
from fsbarrier.store import reading

#: polling interval for new lines and new files while following
LOOK_S = 0.5
#: the most bytes of a log that are read at once, and the most that are shown of a line (its end)
MOST_BYTES, LINE_BYTES = 16 << 20, 64 << 10


@dataclass(frozen=True, slots=True)
class Log:
    """A log file, and the prefix of each printed line."""

    label: str
    path: Path


def show(logs: Callable[[], Sequence[Log]], count: int, follows: Callable[[], bool]) -> None:
    """Print the last `count` lines of each log, then new lines and new logs as long as `follows`."""
    offsets: dict[Path, int] = {}
    pause, first = threading.Event(), True
    while True:
        # Ask before reading the logs: if a program ends in between, its last output is still read.
        goes_on = follows()
        for log in logs():
            lines, offsets[log.path] = read_lines(
                log.path, offsets.get(log.path, -MOST_BYTES if first else 0)
            )
            for line in lines[-count or len(lines) :] if first else lines:
                print(log.label, line, flush=True)
        if not goes_on:
            return
        first = False
        pause.wait(LOOK_S)


def read_lines(path: Path, offset: int) -> tuple[list[str], int]:
    """The complete lines of a log after `offset`, and the offset after them. A negative one counts from the end."""
    try:
        with reading.open_stream(path) as stream:
            size = stream.seek(0, os.SEEK_END)
            # If the log is shorter than it was, it has been truncated.
            begin = max(0, size + offset) if offset < 0 else offset if offset <= size else 0
            stream.seek(begin)
            data = stream.read(MOST_BYTES)
    except OSError as error:
        return [f"(cannot read this log: {error.strerror})"] if offset < 0 else [], max(0, offset)
    whole, newline, rest = data.rpartition(b"\n")
    if not newline and len(data) == MOST_BYTES:
        # One line is longer than what is read: it is shown in pieces.
        whole, rest = data, b""
    lines = whole.split(b"\n") if whole or newline else []
    if offset < 0 and begin > 0 and newline:
        # The beginning of this line was not read.
        del lines[0]
    return [_decoded(line) for line in lines], begin + len(data) - len(rest)


def _decoded(line: bytes) -> str:
    cut = f"({len(line) - LINE_BYTES} bytes) ... " if len(line) > LINE_BYTES else ""
    # A progress bar overwrites itself, so only the end of the line matters.
    return cut + fit_for_terminal(line[-LINE_BYTES:].decode("utf-8", errors="replace"))
