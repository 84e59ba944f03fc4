"""Writes an operator's request to stop a run, from any machine that mounts its directory."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from fsbarrier.errors import UsageError
from fsbarrier.host.identity import user_at_host
from fsbarrier.protocol.facts import Member, StopRequest
from fsbarrier.protocol.membership import GONE
from fsbarrier.rundir.heartbeats import read_beats
from fsbarrier.rundir.names import START, STOP_REQUEST
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.record_store import PosixStore


def request_stop(log_path: Path, *, now: bool) -> Path:
    """Ask all nodes of a run to stop: at the next start of an iteration, or at once. Returns the request's path.

    It concerns the current starts, and nodes that come late to their session. Raises UsageError if there is no run, OSError.
    """
    paths = RunPaths(log_path)
    if not paths.record.is_file():
        raise UsageError(f"no run at {log_path}: there is no {paths.record.name}")
    store = PosixStore()
    store.make_dir(paths.stops)
    alive, ended = _starts(store, paths)
    time = datetime.now(UTC).isoformat(timespec="seconds")
    request = StopRequest(now, user_at_host(), time, alive, ended)
    number = max(STOP_REQUEST.parse_all(store.names(paths.stops)), default=0) + 1
    while not store.create(paths.stop(number), request):
        number += 1
    return paths.stop(number)


def _starts(store: PosixStore, paths: RunPaths) -> tuple[tuple[Member, ...], tuple[Member, ...]]:
    """The newest start of each rank: those that may be alive, and those that have ended by their last heartbeat. Raises OSError."""
    beats = read_beats(paths.root)
    newest = {rank: beat.incarnation for rank, beat in beats.items()}
    for start in START.parse_all(store.names(paths.joins)):
        newest[start.rank] = max(newest.get(start.rank, 0), start.incarnation)
    alive, ended = list[Member](), list[Member]()
    for rank, incarnation in sorted(newest.items()):
        beat = beats.get(rank)
        gone = beat is not None and beat.incarnation == incarnation and beat.state in GONE
        (ended if gone else alive).append(Member(rank, incarnation))
    return tuple(alive), tuple(ended)
