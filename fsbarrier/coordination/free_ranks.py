"""Finds a rank for a node that was started with `--rank auto`.

The join record itself, `joins/node-RRRR.inc-IIII`, is the claim on a rank, since it is created exclusively. If a rank looks free at
incarnation 3, a node takes it as incarnation 4 or not at all: the first of several nodes gets it, even if one of them was given that rank
by name. Nothing is ever deleted to free a rank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from fsbarrier.protocol.facts import Join
from fsbarrier.protocol.membership import GONE
from fsbarrier.rundir.heartbeats import beats_of_newest_starts, newer_beats, read_beats
from fsbarrier.rundir.names import START, StartName
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.record_store import PosixStore
from fsbarrier.store.identity import host_name


def free_ranks(paths: RunPaths, num_nodes: int, dead_s: float) -> Iterator[StartName]:
    """The ranks that this node may take, as the incarnation to take them with, the best first. Lazy. Raises OSError.

    First the ranks that this host had, whose local files may still be useful; then those that nobody has had; then those whose node
    has ended; last those that are silent for `dead_s`. For the first kind the caller still has to check whether the last start is
    alive (`hold_rank`).
    """
    newest = _newest_starts(paths, num_nodes)
    yield from (
        _next_start(start)
        for start in newest.values()
        if start.incarnation and _host_of(paths, start) == host_name() and _has_beaten(paths, start)
    )
    yield from (_next_start(start) for start in newest.values() if not start.incarnation)
    beats = read_beats(paths.root)
    ended = {
        rank: start
        for rank, start in newest.items()
        if (beat := beats.get(rank)) is not None
        and beat.incarnation == start.incarnation
        and beat.state in GONE
    }
    yield from map(_next_start, ended.values())
    others = {rank for rank, start in newest.items() if start.incarnation and rank not in ended}
    yield from (_next_start(newest[rank]) for rank in _silent_ranks(paths, others, dead_s))


def _newest_starts(paths: RunPaths, num_nodes: int) -> Mapping[int, StartName]:
    """The newest start of each rank; incarnation 0 if there is none."""
    found = {rank: StartName(rank, 0) for rank in range(num_nodes)}
    for start in START.parse_all(PosixStore().names(paths.joins)):
        if start.rank in found:
            found[start.rank] = max(found[start.rank], start)
    return found


def _next_start(start: StartName) -> StartName:
    return StartName(start.rank, start.incarnation + 1)


def _host_of(paths: RunPaths, start: StartName) -> str:
    join = PosixStore().read(paths.join(start.rank, start.incarnation), Join)
    return join.host if join is not None else ""


def _has_beaten(paths: RunPaths, start: StartName) -> bool:
    """Whether a start has written a heartbeat. If not, it may be about to write its first one."""
    beat = read_beats(paths.root, start.rank).get(start.rank)
    return beat is not None and beat.incarnation == start.incarnation


def _silent_ranks(paths: RunPaths, ranks: Collection[int], watch_s: float) -> list[int]:
    """The ranks whose heartbeat does not change for `watch_s`."""
    before, silent = beats_of_newest_starts(paths.root), set(ranks)
    for newer in newer_beats(paths.root, before, watch_s) if silent else ():
        silent -= {beat.rank for beat in newer}
        if not silent:
            break
    return sorted(silent)
