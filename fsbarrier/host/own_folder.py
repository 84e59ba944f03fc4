"""Folders on this machine that belong to one process and end with it, also when it is killed.

The owner holds a lock on its folder, which the kernel lets go when the owner dies. Whoever makes the next folder in the same place
removes those of the same user that nobody holds any more.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fsbarrier.host.mounts import LOCAL, mount_of

PREFIX = "fsbarrier-own-"
#: for sockets, whose paths must be short
SHORT_PLACE = Path("/tmp")


@contextmanager
def own_folder(base: Path, name: str) -> Iterator[Path]:
    """A new folder in `base` for this process alone, private to its user, with `name` in its name. Raises OSError."""
    remove_abandoned(base)
    # Another process may take it for abandoned at any moment before it is locked.
    while (made := _make_and_lock(base, name)) is None:
        pass
    folder, lock = made
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _make_and_lock(base: Path, name: str) -> tuple[Path, int] | None:
    """A new folder and the descriptor that locks it; None where somebody has removed it meanwhile. Raises OSError."""
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{name}-", dir=base))
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return None
    # Where a filesystem knows no such locks, the folder is not removed for its owner if that is killed.
    with contextlib.suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_EX)
    if folder.is_dir():
        return folder, lock
    os.close(lock)
    return None


def remove_abandoned(base: Path) -> None:
    """Remove the folders in `base` whose owners, processes of this user, are dead. Raises nothing.

    Locks on folders hold on one machine alone: where others may see `base` too, nothing is removed.
    """
    with contextlib.suppress(OSError):
        if mount_of(base).family.category == LOCAL:
            _remove_unheld(base)


def _remove_unheld(base: Path) -> None:
    for folder in base.glob(f"{PREFIX}*"):
        # One that is in use cannot be locked. A folder may be nested deeper than Python can follow.
        with contextlib.suppress(OSError, RecursionError):
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                # Root can open another user's, too.
                if os.fstat(lock).st_uid == os.geteuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
