"""One daemon a node rank: refuses a second one before it disturbs the first."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import filelock

from fsbarrier.errors import UsageError
from fsbarrier.host.private_folder import private_folder
from fsbarrier.rundir.heartbeats import live_nodes, read_beats


class Ranked(Protocol):
    """What has nodes with ranks: a run, or a pool of nodes."""

    @property
    def log_path(self) -> Path: ...

    @property
    def run_id(self) -> str: ...


class RankTaken(UsageError):
    """Another process is the daemon of this rank."""


@dataclass(frozen=True, slots=True)
class RankLock:
    """A lock that is held. `note_start` writes beside it which start of the rank holds it."""

    note: Path
    run_id: str

    def note_start(self, incarnation: int) -> None:
        """Before this start's first heartbeat. Without the note the next start only takes longer."""
        with contextlib.suppress(OSError):
            self.note.write_text(self._text(incarnation))

    def last_start_was(self, incarnation: int) -> bool:
        """Whether the daemon that held this lock last was this start of the rank."""
        try:
            return self.note.read_text() == self._text(incarnation)
        except OSError:
            return False

    def _text(self, incarnation: int) -> str:
        return f"{self.run_id} {incarnation}"


@contextmanager
def hold_rank(record: Ranked, rank: int, watch_s: float) -> Iterator[RankLock]:
    """While this lasts, this process is the only daemon of `rank` in reach of a lock. Raises RankTaken, OSError.

    The lock lies in this user's private folder of this machine. Another host has another one, and so has a second container on this
    host, whatever its host name. So the lock proves only that the start which held it last has ended. If the rank's last heartbeat is
    not that start's, this watches it for `watch_s`, in which a living node's heartbeat would be seen to change. If two start at the
    same instant, the one with the lower incarnation ends later, with exit code 6.
    """
    root = record.log_path
    name = hashlib.sha256(f"{root.resolve()}:{rank}".encode()).hexdigest()[:16]
    lock_file = private_folder().path / f"{name}.lock"
    lock = filelock.FileLock(lock_file, mode=0o600)
    beat = read_beats(root, rank).get(rank)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        who = f"process {beat.pid}" if beat else "another process"
        raise RankTaken(
            f"node {rank} of {root} is already running on this host ({who}); end it first"
        ) from None
    try:
        held = RankLock(lock_file.with_suffix(".holder"), record.run_id)
        proven = beat is None or held.last_start_was(beat.incarnation)
        if not proven and (alive := live_nodes(root, watch_s, rank)):
            raise RankTaken(
                f"node {rank} of {root} is already running on {alive[0].host}, process {alive[0].pid}; "
                "give this node another rank, or end that one first"
            )
        yield held
    finally:
        lock.release()
