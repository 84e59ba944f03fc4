"""Removes files and folders. All other modules remove them through this one.

Somebody may have replaced a folder by a link. So nothing is removed by its path alone: the folder above it is opened without following
links.
"""

from __future__ import annotations

import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path

from fsbarrier.store import reading


def remove(path: Path, root: Path | None = None) -> None:
    """Remove a file, a link (not what it points to), or a folder with its contents; nothing if it is not there.

    No link is followed from `root` on (default: the folder above). Raises reading.NotPlain, OSError.
    """
    _remove(path, root or path.parent, ignore_errors=False)


def discard(path: Path, root: Path | None = None) -> None:
    """Remove as much as possible, like `remove`. Never raises OSError."""
    with suppress(OSError):
        _remove(path, root or path.parent, ignore_errors=True)


def _remove(path: Path, root: Path, *, ignore_errors: bool) -> None:
    with suppress(FileNotFoundError), reading.folder_below(root, path.parent) as folder:
        if stat.S_ISDIR(os.stat(path.name, dir_fd=folder, follow_symlinks=False).st_mode):
            shutil.rmtree(path.name, ignore_errors, dir_fd=folder)
        else:
            os.unlink(path.name, dir_fd=folder)
