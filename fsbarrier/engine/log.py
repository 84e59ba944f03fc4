"""Reads a vLLM server's log to find out why it failed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from fsbarrier import reading

# Prefix of a log line: vLLM's process, level, time and source location.
_PREFIX = re.compile(r"^(?:\(\w+ pid=\d+\) )?(?:[A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] )?")
_ERROR = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|error): \S")
# Generic errors that only refer to an earlier one.
_GENERIC = ("Engine core initialization failed", "WorkerProc initialization failed")


def cause(lines: Sequence[str]) -> str:
    """The most likely cause of the failure: the last error that is not generic; "" if there is none."""
    found = [line for line in (_PREFIX.sub("", line).strip() for line in lines) if _ERROR.match(line)]
    specific = [line for line in found if not any(text in line for text in _GENERIC)]
    return (specific or found or [""])[-1][:300]


def size(path: Path) -> int:
    """The current size of the log, in bytes."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def since(path: Path, offset: int) -> str:
    """The log from `offset` on, at most a MiB."""
    try:
        with reading.open_stream(path) as stream:
            stream.seek(offset)
            return stream.read(1 << 20).decode("utf-8", errors="replace")
    except OSError:
        return ""
