"""Refuses a second daemon of a node rank before it disturbs the first."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import filelock

from fsbarrier.errors import UsageError
from fsbarrier.rundir.heartbeats import live_nodes, read_newest_starts
from fsbarrier.store import reading
from fsbarrier.store.mounts import LOCAL, mount_of_resolved
from fsbarrier.store.private_folder import private_folder


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
            mount = mount_of_resolved(self.folder).point
            self.note.write_text(json.dumps({**self._start(incarnation), "mount": mount}))

    def last_start_was(self, incarnation: int) -> bool:
        """Whether the last holder of this lock was this start of the rank."""
        with contextlib.suppress(OSError, ValueError):
            return self._start(incarnation).items() <= _read_note(self.note).items()
        return False

    def _start(self, incarnation: int) -> dict[str, object]:
        return {"run_id": self.run_id, "incarnation": incarnation, "folder": str(self.folder)}


def _read_note(note: Path) -> dict[str, object]:
    """Raises OSError, and ValueError for an invalid note."""
    try:
        found = json.loads(reading.read_bytes(note, 1 << 16))
    except RecursionError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"{note} is no note")
    return found


@contextmanager
def hold_rank(root: Path, run_id: str, rank: int, watch_s: float) -> Iterator[RankLock]:
    """In this block this process is the only daemon of `rank` within reach of the lock. Raises RankTaken, OSError.

    `root`: the directory of a run, or of a pool of nodes, which has ranks too.

    The lock is in this user's private folder on this machine. Another host has another lock, and so has a second container on this
    host. So the lock proves only that its last holder has ended. If the rank's last heartbeat is from a different start, it is watched
    for `watch_s`, in which the heartbeat of a living node would change. If two daemons start at the same instant, the one with the
    lower incarnation ends later, with exit code 6.
    """
    real = root.resolve()
    name = hashlib.sha256(f"{real}:{rank}".encode()).hexdigest()[:16]
    private = private_folder().path
    lock_file = private / f"{name}.lock"
    lock = filelock.FileLock(lock_file, mode=0o600)
    start, beat = next(iter(read_newest_starts(root, rank)), (None, None))
    try:
        with _folder_lock(private, fcntl.LOCK_SH):
            lock.acquire(timeout=0)
    except filelock.Timeout:
        who = f"process {beat.pid}" if beat else "another process"
        raise RankTaken(
            f"node {rank} of {root} is already running on this host ({who}); end it first"
        ) from None
    try:
        _remove_locks_of_gone_runs(private)
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


# --- the locks of runs that are gone ---------------------------------------------------------------------------------------


@contextmanager
def _folder_lock(folder: Path, how: int) -> Iterator[None]:
    """Shared while a rank's lock is taken; exclusive while locks are removed, so that nobody takes a lock whose file is just unlinked."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # Some filesystems have no such locks. There a rank is taken without one, and old locks stay.
        if how == fcntl.LOCK_SH:
            with contextlib.suppress(OSError):
                fcntl.flock(fd, how)
        else:
            fcntl.flock(fd, how)
        yield
    finally:
        os.close(fd)


def _remove_locks_of_gone_runs(folder: Path) -> None:
    """Remove the unheld locks of runs whose directories no longer exist on this machine's disks. Never raises.

    Directories on a network mount are not checked, since that may hang, and those on an unmounted disk may still exist.
    """
    # Another process may be doing this.
    with contextlib.suppress(OSError), _folder_lock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB):
        for lock_file in folder.glob("*.lock"):
            with contextlib.suppress(OSError):
                if _run_is_gone(lock_file.with_suffix(".holder")):
                    _remove_unheld(lock_file)


def _run_is_gone(note: Path) -> bool:
    """Whether the run's directory no longer exists, although its disk is mounted. Raises OSError."""
    try:
        found = _read_note(note)
        run, mount = Path(str(found["folder"])), found["mount"]
    except (FileNotFoundError, ValueError, KeyError):
        # The lock was never used, or by an earlier version, which did not record the directory.
        return True
    now = mount_of_resolved(run)
    return now.family.category == LOCAL and now.point == mount and not os.path.lexists(run)


def _remove_unheld(lock_file: Path) -> None:
    """Raises OSError, also if it is held."""
    fd = os.open(lock_file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        lock_file.with_suffix(".holder").unlink(missing_ok=True)
        lock_file.unlink()
    finally:
        os.close(fd)
