"""Folders on this machine: those that belong to one process and are removed after it, even if it is killed, and the one of this user.

The owner holds a lock on its folder, which the kernel releases when the owner dies. The next process that creates a folder in the same
place removes the unlocked folders of the same user.

Names in a temporary directory are predictable, so another user could create them first. What programs exchange is therefore placed only
in a subfolder that is verified to belong to this user.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fsbarrier.errors import UsageError
from fsbarrier.store import files
from fsbarrier.store.mounts import LOCAL, mount_of
from fsbarrier.store.trusted_folder import user_name

PREFIX = "fsbarrier-own-"
#: a base for sockets, whose paths have a length limit
SHORT_PLACE = Path("/tmp")


@contextmanager
def scratch_dir(base: Path, name: str) -> Iterator[Path]:
    """A new folder in `base` for this process, private to its user, with `name` in its name. Raises OSError."""
    remove_abandoned(base)
    # Until the folder is locked, another process may remove it as abandoned; then make another one.
    while (made := _make_and_lock(base, name)) is None:
        pass
    folder, lock = made
    try:
        yield folder
    finally:
        files.discard(folder)
        os.close(lock)


def _make_and_lock(base: Path, name: str) -> tuple[Path, int] | None:
    """A new folder and the descriptor that locks it; None if another process removed it in the meantime. Raises OSError."""
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{name}-", dir=base))
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return None
    # On a filesystem without such locks, the folder of a killed owner is never removed.
    with contextlib.suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_EX)
    if folder.is_dir():
        return folder, lock
    os.close(lock)
    return None


def remove_abandoned(base: Path) -> None:
    """Remove the folders in `base` whose owners are dead processes of this user. Never raises.

    These locks are local to one machine, so nothing is removed if `base` is on a shared filesystem.
    """
    with contextlib.suppress(OSError):
        if mount_of(base).family.category == LOCAL:
            _remove_unheld(base)


def _remove_unheld(base: Path) -> None:
    for folder in base.glob(f"{PREFIX}*"):
        # A folder in use cannot be locked.
        with contextlib.suppress(OSError):
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                # Root can open other users' folders too.
                if os.fstat(lock).st_uid == os.geteuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    files.discard(folder)
            finally:
                os.close(lock)


def user_dir() -> Path:
    """This user's own folder in the temporary directory, created if necessary. Raises UsageError if others could write in it, OSError."""
    path = Path(tempfile.gettempdir()) / f"fsbarrier-{os.geteuid()}"
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)
    status = path.lstat()
    if status.st_uid != os.geteuid():
        problem = f"belongs to {user_name(status.st_uid)}"
    elif not stat.S_ISDIR(status.st_mode):
        problem = "is not a folder"
    elif status.st_mode & 0o077:
        problem = f"is accessible to other users (mode {stat.S_IMODE(status.st_mode):o})"
    else:
        return path
    raise UsageError(f"{path} {problem}; remove it, or set TMPDIR to a folder of your own")
