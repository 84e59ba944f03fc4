"""The short form of `fsbarrier doctor` at each start: refuses a filesystem that cannot carry the run, and records what was found."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from fsbarrier import files
from fsbarrier.doctor import delays, examine
from fsbarrier.doctor.findings import Report
from fsbarrier.errors import StoreError, UsageError
from fsbarrier.host.identity import host_name
from fsbarrier.protocol.timing import BEAT_S, DEAD_S, SUSPECT_S
from fsbarrier.retry import FAILING, retry, until_seen
from fsbarrier.rundir.paths import RunPaths

#: From so many nodes on all times grow with the nodes, so that the heartbeats of all cost the server no more.
MANY_NODES = 160
LIMITS = ("coordination.beat_s", "coordination.suspect_s", "coordination.dead_s")


def admit(log_path: Path, *, write: bool) -> Report:
    """What this node can tell in a moment of the filesystem under `log_path`, which need not exist yet. `write`: try it too.

    Raises StoreError where it cannot carry a run or fails, UsageError where this user may not write.
    """
    try:
        report = retry(lambda: examine.short(log_path, write=write), errnos=FAILING)
    except OSError as error:
        if error.errno in FAILING:
            raise StoreError(f"--log-path {log_path}: {error.strerror}") from None
        raise UsageError(f"--log-path {log_path}: cannot be written: {error.strerror or error}") from None
    if report.refused:
        found = report.refused[0]
        advice = f"; {found.advice}" if found.advice else ""
        raise StoreError(
            f"--log-path {log_path}: its filesystem cannot carry a run: {found.finding}{advice} (fsbarrier doctor shows more)"
        )
    return report


def limits(report: Report, given: Mapping[str, object], num_nodes: int) -> dict[str, float]:
    """Longer timeouts where this filesystem is known to show things late, or has many nodes to serve, unless some were given."""
    stale, crowd = report.stale_s >= delays.FRESH_S, num_nodes / MANY_NODES
    if any(name in given for name in LIMITS) or not (stale or crowd > 1):
        return {}
    timeouts = report.timeouts if stale else dict(zip(LIMITS, (BEAT_S, SUSPECT_S, DEAD_S), strict=True))
    return {name: round(seconds * max(1.0, crowd), 1) for name, seconds in timeouts.items()}


def record(report: Report, paths: RunPaths, node_rank: int) -> None:
    """Put what this node found into the run, in place of what it found at an earlier start. Raises StoreError."""
    about = {"host": host_name(), "time": datetime.now(UTC).isoformat(timespec="seconds")}
    body = json.dumps({"node_rank": node_rank, **about, **report.as_json()}, indent=2)
    path = paths.filesystem(node_rank)
    try:
        files.make_dirs_below(paths.root, path.parent)
        until_seen(lambda: files.write_atomic(path, body.encode() + b"\n"))
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror or error}") from None
