"""A local folder that only this user can enter, for locks, sockets and files exchanged between programs.

Names in a temporary directory are predictable, so another user could create them first. Fsbarrier's files are therefore placed only in a
subfolder that is verified to belong to this user.
"""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from fsbarrier.errors import UsageError
from fsbarrier.store.trusted_folder import user_name


def user_dir() -> Path:
    """The folder in the temporary directory, created if necessary. Raises UsageError if it is not this user's alone, OSError."""
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
