"""The event journal: one JSONL file an incarnation, every transition and decision, with timings. For people and scripts."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fsbarrier import files
from fsbarrier.protocol.facts import Payload
from fsbarrier.rundir.paths import RunPaths


class Journal:
    """Appends events of one incarnation of one node. A line is written at once and whole; it is not waited for on disk."""

    def __init__(self, path: Path, *, run_id: str, node_rank: int) -> None:
        files.make_dirs(path.parent)
        self._fd = files.open_new(path)
        self._fixed = {"run_id": run_id, "node_rank": node_rank}

    def write(self, event: str, mono_s: float, place: Payload, fields: Payload) -> dict[str, Any]:
        """Record one event. `place` has generation, iteration, phase and phase_name. Gives the line back as a dict."""
        line = {
            "time": datetime.now(UTC).isoformat(timespec="microseconds"),
            "mono_s": round(mono_s, 6),
            **self._fixed,
            **place,
            "event": event,
            **fields,
        }
        os.write(self._fd, json.dumps(line, separators=(",", ":"), default=str).encode() + b"\n")
        return line

    def close(self) -> None:
        os.close(self._fd)


def read_journal(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of one journal; a torn or foreign line is passed over."""
    try:
        data = path.read_bytes()
    except OSError:
        return
    for raw in data.split(b"\n"):
        try:
            line = json.loads(raw)
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict) and isinstance(line.get("event"), str):
            yield line


def read_events(log_path: Path) -> list[dict[str, Any]]:
    """All events of a run, in the order of their wall-clock times (for display: no decision rests on it)."""
    folder = RunPaths(log_path).events
    lines = [line for path in sorted(folder.glob("*.jsonl")) for line in read_journal(path)]
    return sorted(lines, key=lambda line: str(line.get("time", "")))
