"""Which rank a node takes that was started with `--rank auto`.

The claim on a rank is the record of the start itself, `joins/node-RRRR.inc-IIII`, which is created exclusively. So a rank that was seen
to be free at incarnation 3 is taken as incarnation 4 or not at all: of two nodes that want it, also one whose rank was named, the first
has it, and nothing is ever deleted to make a rank free.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator, Mapping

from fsbarrier.host.identity import host_name
from fsbarrier.protocol.facts import Join
from fsbarrier.protocol.membership import GONE
from fsbarrier.rundir.heartbeats import LOOK_S, read_beats
from fsbarrier.rundir.names import START, StartName
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.record_store import PosixStore


def free_ranks(paths: RunPaths, num_nodes: int, dead_s: float) -> Iterator[StartName]:
    """The starts that this node may be, the best first. Looks when it is asked for the next one. Raises OSError.

    First the ranks that this host had, since its memory and its local files may still serve them; then those that nobody ever had;
    then those whose node said that it ended; last those of which nothing is heard for `dead_s`. Whoever takes a rank of the first kind
    still has to find out whether its last start lives (`hold_rank`).
    """
    newest = _newest_starts(paths, num_nodes)
    yield from (
        _next(start)
        for start in newest.values()
        if start.incarnation and _host_of(paths, start) == host_name() and _has_beaten(paths, start)
    )
    yield from (_next(start) for start in newest.values() if not start.incarnation)
    beats = read_beats(paths.root)
    ended = {
        rank: start
        for rank, start in newest.items()
        if (beat := beats.get(rank)) is not None
        and beat.incarnation == start.incarnation
        and beat.state in GONE
    }
    yield from map(_next, ended.values())
    others = {rank for rank, start in newest.items() if start.incarnation and rank not in ended}
    yield from (_next(newest[rank]) for rank in _silent(paths, others, dead_s))


def _newest_starts(paths: RunPaths, num_nodes: int) -> Mapping[int, StartName]:
    """The newest start of each rank; incarnation 0 where there was none."""
    found = {rank: StartName(rank, 0) for rank in range(num_nodes)}
    for start in START.parse_all(PosixStore().names(paths.joins)):
        if start.rank in found:
            found[start.rank] = max(found[start.rank], start)
    return found


def _next(start: StartName) -> StartName:
    return StartName(start.rank, start.incarnation + 1)


def _host_of(paths: RunPaths, start: StartName) -> str:
    join = PosixStore().read(paths.join(start.rank, start.incarnation), Join)
    return join.host if join is not None else ""


def _has_beaten(paths: RunPaths, start: StartName) -> bool:
    """Without a heartbeat this start may just be about to write its first one."""
    beat = read_beats(paths.root, start.rank).get(start.rank)
    return beat is not None and beat.incarnation == start.incarnation


def _silent(paths: RunPaths, ranks: Collection[int], watch_s: float) -> list[int]:
    """Those of the ranks whose heartbeat does not change for `watch_s`."""
    first, silent = read_beats(paths.root), set(ranks)
    pause, deadline = threading.Event(), time.monotonic() + watch_s
    while silent and time.monotonic() < deadline:
        pause.wait(LOOK_S)
        silent -= {rank for rank, beat in read_beats(paths.root).items() if beat != first.get(rank)}
    return sorted(silent)
