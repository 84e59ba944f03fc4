"""A short `fsbarrier doctor` at each start: rejects an unsuitable filesystem and records the findings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from fsbarrier import files
from fsbarrier.doctor import examine, verdict
from fsbarrier.doctor.findings import Report
from fsbarrier.errors import StoreError, UsageError
from fsbarrier.host.identity import host_name
from fsbarrier.protocol.timing import BEAT_S, DEAD_S, SUSPECT_S
from fsbarrier.retry import FAILING, retry, until_seen
from fsbarrier.rundir.paths import RunPaths

#: Above this number of nodes the timeouts grow with it, so that the heartbeats do not increase the load on the file server.
MANY_NODES = 160
LIMITS = ("coordination.beat_s", "coordination.suspect_s", "coordination.dead_s")


def admit(log_path: Path, *, write: bool) -> Report:
    """A quick check of the filesystem under `log_path`, which need not exist yet. `write`: include write tests.

    Raises StoreError if the filesystem fails or is unsuitable, UsageError without write permission.
    """
    try:
        report = retry(lambda: examine.short(log_path, write=write), errnos=FAILING)
    except OSError as error:
        if error.errno in FAILING:
            raise StoreError(f"--log-path {log_path}: {error.strerror}") from None
        raise UsageError(f"--log-path {log_path}: not writable: {error.strerror or error}") from None
    if report.refused:
        found = report.refused[0]
        advice = f"; {found.advice}" if found.advice else ""
        raise StoreError(
            f"--log-path {log_path}: its filesystem cannot support a run: {found.finding}{advice} (details: fsbarrier doctor)"
        )
    return report


def limits(report: Report, given: Mapping[str, object], num_nodes: int) -> dict[str, float]:
    """Longer timeouts for a filesystem with stale reads or for many nodes; {} if the user set any of them."""
    stale, crowd = report.stale_s >= verdict.FRESH_S, num_nodes / MANY_NODES
    if any(name in given for name in LIMITS) or not (stale or crowd > 1):
        return {}
    timeouts = report.timeouts if stale else dict(zip(LIMITS, (BEAT_S, SUSPECT_S, DEAD_S), strict=True))
    return {name: round(seconds * max(1.0, crowd), 1) for name, seconds in timeouts.items()}


def record(report: Report, paths: RunPaths, node_rank: int) -> None:
    """Store this node's findings in the run directory, replacing those of an earlier start. Raises StoreError."""
    about = {"host": host_name(), "time": datetime.now(UTC).isoformat(timespec="seconds")}
    body = json.dumps({"node_rank": node_rank, **about, **report.as_json()}, indent=2)
    path = paths.filesystem(node_rank)
    try:
        files.make_dirs_below(paths.root, path.parent)
        until_seen(lambda: files.write_atomic(path, body.encode() + b"\n"))
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror or error}") from None
