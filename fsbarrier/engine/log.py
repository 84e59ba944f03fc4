"""Reads what a vLLM server has written to its log since some moment."""

from __future__ import annotations

from pathlib import Path

from fsbarrier.store import reading


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
