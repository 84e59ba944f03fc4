"""Writes an operator's request to stop a run, from any machine that mounts its directory."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from fsbarrier.errors import UsageError
from fsbarrier.network.this_host import user_at_host
from fsbarrier.protocol.facts import Beat, Member, StopRequest
from fsbarrier.rundir.heartbeats import beats_of_newest_starts, newer_beats, not_gone, read_beats
from fsbarrier.rundir.names import START, STOP_REQUEST
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.record_store import PosixStore


def request_stop(log_path: Path, *, now: bool) -> StopRequest:
    """Ask all nodes of a run to stop: at the next start of an iteration, or at once. Returns the request.

    The request concerns the newest start of each rank. Raises UsageError if there is no run, OSError.
    """
    paths = RunPaths(log_path)
    if not paths.record.is_file():
        raise UsageError(f"no run at {log_path}: there is no {paths.record.name}")
    store = PosixStore()
    store.make_dir(paths.stops)
    made_at = datetime.now(UTC).isoformat(timespec="seconds")
    request = StopRequest(now, user_at_host(), made_at, _newest_starts(store, paths))
    number = max(STOP_REQUEST.parse_all(store.names(paths.stops)), default=0) + 1
    while not store.create(paths.stop(number), request):
        number += 1
    return request


def stop(log_path: Path, *, now: bool, watch_s: float) -> list[Beat]:
    """Ask all nodes of a run to stop, and return the last heartbeats of those that it reaches.

    It reaches the nodes that write a heartbeat or end within `watch_s` after the request. A node that joins only in that time is asked by
    another request. Raises UsageError if there is no run, OSError.
    """
    before = beats_of_newest_starts(log_path)
    request = request_stop(log_path, now=now)
    silent, reached = not_gone(before), dict[int, Beat]()
    for newer in newer_beats(log_path, before, watch_s):
        for beat in newer:
            if not request.concerns(beat.rank, beat.incarnation):
                request = request_stop(log_path, now=now)
            reached[beat.rank] = beat
        silent -= reached.keys()
        if reached and not silent:
            break
    return [reached[rank] for rank in sorted(reached)]


def _newest_starts(store: PosixStore, paths: RunPaths) -> tuple[Member, ...]:
    """The newest start of each rank, according to joins/ and the status files. Raises OSError."""
    newest = {rank: beat.incarnation for rank, beat in read_beats(paths.root).items()}
    for start in START.parse_all(store.names(paths.joins)):
        newest[start.rank] = max(newest.get(start.rank, 0), start.incarnation)
    return tuple(Member(rank, incarnation) for rank, incarnation in sorted(newest.items()))
