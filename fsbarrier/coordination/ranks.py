"""The rank of a start: a second daemon of a rank is refused before it disturbs the first, and `--rank auto` finds a free one.

The join record itself, `joins/node-RRRR.inc-IIII`, is the claim on a rank, since it is created exclusively. If a rank looks free at
incarnation 3, a node takes it as incarnation 4 or not at all. The first of several nodes gets it, even if another was started with that
rank by name. Nothing is ever deleted to free a rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock

from fsbarrier.errors import UsageError
from fsbarrier.network.this_host import host_name
from fsbarrier.protocol.membership import GONE
from fsbarrier.rundir.heartbeats import beats_of_newest_starts, live_nodes, newer_beats, read_beats
from fsbarrier.rundir.names import START, StartName
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.record_store import PosixStore
from fsbarrier.store.local_folders import user_dir


class RankTaken(UsageError):
    """Another process is the daemon of this rank."""


@contextmanager
def hold_rank(root: Path, rank: int, watch_s: float) -> Iterator[None]:
    """Inside the block this process is the only daemon of `rank` within reach of the lock. Raises RankTaken, OSError.

    The lock is in this user's private folder on this machine. Another host or a second container on this host does not see it. So
    unless the rank's last heartbeat says that its daemon has ended or was killed, the rank is watched for `watch_s`: the heartbeat of a
    living node would change in that time. If two daemons start at the same instant, the one with the lower incarnation ends later, with
    exit code 6.

    A lock is never removed: one small file for each rank of a run that began on this machine.
    """
    name = hashlib.sha256(f"{root.resolve()}:{rank}".encode()).hexdigest()[:16]
    lock = filelock.FileLock(user_dir() / f"{name}.lock", mode=0o600)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        beat = read_beats(root, rank).get(rank)
        who = f"process {beat.pid}" if beat else "another process"
        raise RankTaken(
            f"node {rank} of {root} is already running on this host ({who}); end it first"
        ) from None
    try:
        if alive := live_nodes(root, watch_s, rank):
            raise RankTaken(
                f"node {rank} of {root} is already running on {alive[0].host}, process {alive[0].pid}; "
                "give this node another rank, or end that one first"
            )
        yield
    finally:
        lock.release()


def free_ranks(paths: RunPaths, num_nodes: int, dead_s: float) -> Iterator[StartName]:
    """Yield the ranks that this node may take, each with its next incarnation, the best first. Raises OSError.

    First come the ranks that this host had, whose local files may still be useful; then those that nobody has had; then those whose
    node has ended; last those that are silent for `dead_s`, which are found only when asked for. For the first kind the caller still has
    to check whether the last start is alive (`hold_rank`).
    """
    newest = {rank: StartName(rank, 0) for rank in range(num_nodes)}
    for start in START.parse_all(PosixStore().names(paths.joins)):
        if start.rank in newest:
            newest[start.rank] = max(newest[start.rank], start)
    # A start without a heartbeat may be about to write its first one, so an older start's heartbeat says nothing.
    beats = {
        rank: beat
        for rank, beat in read_beats(paths.root).items()
        if rank in newest and beat.incarnation == newest[rank].incarnation
    }

    def as_next(ranks: Iterable[int]) -> Iterator[StartName]:
        return (StartName(rank, newest[rank].incarnation + 1) for rank in ranks)

    ended = [rank for rank, beat in beats.items() if beat.state in GONE]
    yield from as_next(rank for rank, beat in beats.items() if beat.host == host_name())
    yield from as_next(rank for rank, start in newest.items() if not start.incarnation)
    yield from as_next(ended)
    others = {rank for rank, start in newest.items() if start.incarnation}.difference(ended)
    yield from as_next(_silent_ranks(paths, others, dead_s))


def _silent_ranks(paths: RunPaths, ranks: Collection[int], watch_s: float) -> list[int]:
    """The ranks whose heartbeat does not change for `watch_s`."""
    before, silent = beats_of_newest_starts(paths.root), set(ranks)
    for newer in newer_beats(paths.root, before, watch_s) if silent else ():
        silent -= {beat.rank for beat in newer}
        if not silent:
            break
    return sorted(silent)
