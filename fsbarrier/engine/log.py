"""Reads a vLLM server's log: why the server ended, and what it wrote since a moment."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from fsbarrier import reading

# Before what a line says: which of vLLM's processes, the level, the time and the place in its code.
_PREFIX = re.compile(r"^(?:\(\w+ pid=\d+\) )?(?:[A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] )?")
_ERROR = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|error): \S")
# Errors that only say that there was another one before.
_GENERIC = ("Engine core initialization failed", "WorkerProc initialization failed")


def cause(lines: Sequence[str]) -> str:
    """The line that most likely says why it failed: the last error that does not only point at another one; "" if none."""
    found = [line for line in (_PREFIX.sub("", line).strip() for line in lines) if _ERROR.match(line)]
    specific = [line for line in found if not any(text in line for text in _GENERIC)]
    return (specific or found or [""])[-1][:300]


def size(path: Path) -> int:
    """The log's size now, in bytes."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def since(path: Path, offset: int) -> str:
    """What was written from `offset` on, at most a MiB."""
    try:
        with reading.open_stream(path) as stream:
            stream.seek(offset)
            return stream.read(1 << 20).decode("utf-8", errors="replace")
    except OSError:
        return ""
