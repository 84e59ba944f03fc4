"""Refuses a second daemon of a node rank before it disturbs the first."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import filelock

from fsbarrier.errors import UsageError
from fsbarrier.rundir.heartbeats import live_nodes, read_newest_starts
from fsbarrier.store import reading
from fsbarrier.store.user_dir import user_dir


class RankTaken(UsageError):
    """Another process is the daemon of this rank."""


@dataclass(frozen=True, slots=True)
class RankLock:
    """A held lock. `note_start` records which start of the rank holds it."""

    note: Path
    run_id: str
    # The run directory, with links resolved.
    folder: Path

    def note_start(self, incarnation: int) -> None:
        """Called before this start's first heartbeat. Without the note the next start only takes longer."""
        with contextlib.suppress(OSError):
            self.note.write_text(json.dumps(self._start(incarnation)))

    def last_start_was(self, incarnation: int) -> bool:
        """Whether the last holder of this lock was this start of the rank."""
        with contextlib.suppress(OSError, ValueError, RecursionError):
            return bool(json.loads(reading.read_bytes(self.note, 1 << 16)) == self._start(incarnation))
        return False

    def _start(self, incarnation: int) -> dict[str, object]:
        return {"run_id": self.run_id, "incarnation": incarnation, "folder": str(self.folder)}


@contextmanager
def hold_rank(root: Path, run_id: str, rank: int, watch_s: float) -> Iterator[RankLock]:
    """In this block this process is the only daemon of `rank` within reach of the lock. Raises RankTaken, OSError.

    `root`: the directory of a run, or of a pool of nodes, which has ranks too.

    The lock is in this user's private folder on this machine. Another host has another lock, and so has a second container on this
    host. So the lock proves only that its last holder has ended. If the rank's last heartbeat is from a different start, it is watched
    for `watch_s`, in which the heartbeat of a living node would change. If two daemons start at the same instant, the one with the
    lower incarnation ends later, with exit code 6.

    A lock and its note are never removed: two small files for each rank of a run that began on this machine.
    """
    real = root.resolve()
    name = hashlib.sha256(f"{real}:{rank}".encode()).hexdigest()[:16]
    lock_file = user_dir() / f"{name}.lock"
    lock = filelock.FileLock(lock_file, mode=0o600)
    start, beat = next(iter(read_newest_starts(root, rank)), (None, None))
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        who = f"process {beat.pid}" if beat else "another process"
        raise RankTaken(
            f"node {rank} of {root} is already running on this host ({who}); end it first"
        ) from None
    try:
        held = RankLock(lock_file.with_suffix(".holder"), run_id, real)
        proven = start is None or held.last_start_was(start.incarnation)
        if not proven and (alive := live_nodes(root, watch_s, rank)):
            raise RankTaken(
                f"node {rank} of {root} is already running on {alive[0].host}, process {alive[0].pid}; "
                "give this node another rank, or end that one first"
            )
        yield held
    finally:
        lock.release()
