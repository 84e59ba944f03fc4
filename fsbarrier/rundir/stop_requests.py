"""What an operator may ask of a run from any machine that sees its directory."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from fsbarrier.errors import UsageError
from fsbarrier.host.identity import user_at_host
from fsbarrier.protocol.facts import StopRequest
from fsbarrier.rundir.names import STOP_REQUEST
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.record_store import PosixStore


def request_stop(log_path: Path, *, now: bool) -> Path:
    """Ask all nodes of a run to end: at the next start of an iteration, or at once. Gives the request's path.

    Only nodes that run now see it; a later start does not. Raises UsageError where there is no run, OSError.
    """
    paths = RunPaths(log_path)
    if not paths.record.is_file():
        raise UsageError(f"no run at {log_path}: there is no {paths.record.name}")
    store = PosixStore()
    store.make_dir(paths.stops)
    request = StopRequest(now=now, who=user_at_host(), time=datetime.now(UTC).isoformat(timespec="seconds"))
    number = max(STOP_REQUEST.parse_all(store.names(paths.stops)), default=0) + 1
    while not store.create(paths.stop(number), request):
        number += 1
    return paths.stop(number)
