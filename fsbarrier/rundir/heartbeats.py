"""Reads the status files beside the heartbeats, for views and commands that need to know whether a node is alive, and asks nodes to stop.

The heartbeats themselves are file names (`names.PULSE`), which a node reads in one listing. A process that writes nothing in that folder
may see an old listing for half a minute on some mounts, but it opens fresh contents. So this module reads the status files. Neither file
has a time, since the clocks of two hosts may differ. A node is alive as long as others see its counter move.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from fsbarrier.errors import UsageError
from fsbarrier.network.this_host import user_at_host
from fsbarrier.protocol.facts import Beat, Member, Pulse, StopRequest
from fsbarrier.protocol.membership import GONE
from fsbarrier.rundir.names import PULSE, START, STOP_REQUEST, StartName
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.record_store import PosixStore, Store
from fsbarrier.store.retry import patiently

LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class HeartbeatReader:
    """Reads the status files of nodes in `folder`."""

    store: Store
    folder: Path

    def read(
        self, wanted: Callable[[StartName], bool] = lambda newest: True
    ) -> Iterator[tuple[StartName, Beat | None]]:
        """Yield each rank's newest start, and the newest readable status of the rank's starts (None: no status is readable).

        `wanted` decides by a rank's newest start whether to read that rank. Raises OSError.
        """
        by_rank: dict[int, list[StartName]] = {}
        for start in sorted(START.parse_all(self.store.names(self.folder)), reverse=True):
            by_rank.setdefault(start.rank, []).append(start)
        for starts in by_rank.values():
            if wanted(starts[0]):
                yield starts[0], self._newest_of(starts)

    def _newest_of(self, starts: list[StartName]) -> Beat | None:
        for start in starts:
            beat = self.store.read(self.folder / START.build(start.rank, start.incarnation), Beat)
            if beat is not None and (beat.rank, beat.incarnation) == (start.rank, start.incarnation):
                return beat
        return None


def read_beats(log_path: Path, rank: int | None = None) -> dict[int, Beat]:
    """The last heartbeat of each rank (or only of `rank`) in a run, without unreadable ones. Raises OSError."""
    starts = read_newest_starts(log_path, rank)
    return {start.rank: beat for start, beat in starts if beat is not None}


def read_newest_starts(log_path: Path, rank: int | None = None) -> list[tuple[StartName, Beat | None]]:
    """The newest start of each rank (or only of `rank`) with a heartbeat, and the newest readable heartbeat, maybe of an older start.

    If a daemon was killed, only the heartbeat's name says so (processes/death_notice.py), and on a full disk only the name is
    updated. So a name that is newer than the status replaces its counter and state. A listing may be old, but names in it did exist.
    Raises OSError.
    """
    store, paths = PosixStore(), RunPaths(log_path)
    reader = HeartbeatReader(store, paths.status)
    starts = patiently(lambda: [*reader.read(lambda newest: rank is None or newest.rank == rank)])
    names = patiently(lambda: names_of_beats(store, paths))
    return [(start, with_name(beat, names) if beat is not None else None) for start, beat in starts]


def names_of_beats(store: Store, paths: RunPaths) -> dict[StartName, Pulse]:
    """The newest heartbeat of each start, from the file names. Raises OSError."""
    pulses = sorted(PULSE.parse_all(store.names(paths.beats)))
    return {StartName(pulse.rank, pulse.incarnation): pulse for pulse in pulses}


def with_name(beat: Beat, names: Mapping[StartName, Pulse]) -> Beat:
    """A node's status, with the counter and state of its heartbeat's name if that is newer."""
    pulse = names.get(StartName(beat.rank, beat.incarnation))
    if pulse is None or pulse.counter <= beat.counter:
        return beat
    return replace(beat, counter=pulse.counter, state=pulse.state)


def iteration_of_others(log_path: Path, rank: int) -> int:
    """The last iteration of the nodes other than `rank` that have not ended; 0 if there are none. Raises OSError."""
    beats = [beat for beat in read_beats(log_path).values() if beat.rank != rank and beat.state not in GONE]
    return max((beat.iteration for beat in beats), default=0)


def live_nodes(log_path: Path, watch_s: float, rank: int | None = None) -> list[Beat]:
    """The nodes (or only `rank`) whose counter moves within `watch_s` seconds; for commands that are not nodes themselves.

    Returns as soon as every node is known to be alive or gone. An unreadable status counts as unknown, since a live node may just be
    replacing it. Raises OSError.
    """
    before, alive = beats_of_newest_starts(log_path, rank), dict[int, Beat]()
    unknown = not_gone(before)
    for newer in newer_beats(log_path, before, watch_s, rank) if unknown else ():
        alive |= {beat.rank: beat for beat in newer if beat.state not in GONE}
        unknown -= {beat.rank for beat in newer}
        if not unknown:
            break
    return [alive[node] for node in sorted(alive)]


def not_gone(beats: Mapping[int, Beat | None]) -> set[int]:
    """The nodes that may be alive, because their last status is unreadable or does not say that they ended."""
    return {node for node, beat in beats.items() if beat is None or beat.state not in GONE}


def newer_beats(
    log_path: Path, before: dict[int, Beat | None], watch_s: float, rank: int | None = None
) -> Iterator[list[Beat]]:
    """Look for `watch_s`, and yield at each look the heartbeats that are newer than those in `before`. Raises OSError."""
    pause, deadline = threading.Event(), time.monotonic() + watch_s
    while time.monotonic() < deadline:
        pause.wait(LOOK_S)
        newer = []
        for node, beat in beats_of_newest_starts(log_path, rank).items():
            if beat is None or beat == before.get(node):
                continue
            if node in before and before[node] is None and beat.state not in GONE:
                # This is the first successful read. Only a later change shows that the node is alive.
                before[node] = beat
            else:
                newer.append(beat)
        yield newer


def beats_of_newest_starts(log_path: Path, rank: int | None = None) -> dict[int, Beat | None]:
    """The heartbeat of each rank's newest start; None if it is unreadable, even if an older start's is readable. Raises OSError."""
    return {
        start.rank: beat if beat is not None and beat.incarnation == start.incarnation else None
        for start, beat in read_newest_starts(log_path, rank)
    }


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
