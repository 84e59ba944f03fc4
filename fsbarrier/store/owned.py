"""What belongs to this user: the one way to remove files and folders, and to open a folder that is used for long.

Whoever removes something in a folder where others may write could be led elsewhere: by a link in place of the folder, or by another
folder of the victim's that was renamed there. So nothing is removed by its path alone. The folder above it is opened without following
links, the owner is compared, and everything below goes through descriptors.
"""

from __future__ import annotations

import errno
import os
import pwd
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fsbarrier.store import reading

#: whether this process works for a run of a group, whose members may remove what another of them made
_trusts_group = False
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class NotOwn(OSError):
    """It belongs to another user, or others may write to it."""


def trust_group(on: bool) -> None:
    """Whether the folders from now on are those of a run that was started with --shared-group."""
    global _trusts_group
    _trusts_group = on


def remove(path: Path, root: Path | None = None) -> None:
    """Remove a file, a link (not what it points to), or a folder with its contents; nothing if it is not there.

    No link is followed from `root` on (default: the folder above). It must belong to this user, or to the owner of `root`, who is somebody
    else where a server maps users and in a run of a group. Raises NotOwn, reading.NotPlain, OSError.
    """
    _remove(path, root or path.parent, ignore_errors=False)


def _remove(path: Path, root: Path, *, ignore_errors: bool) -> None:
    with suppress(FileNotFoundError), reading.folder_below(root, path.parent) as folder:
        found = os.stat(path.name, dir_fd=folder, follow_symlinks=False)
        _check_owner(found, path, found.st_uid if _trusts_group else os.stat(root).st_uid)
        if stat.S_ISDIR(found.st_mode):
            _remove_tree(path.name, folder, ignore_errors=ignore_errors)
        else:
            os.unlink(path.name, dir_fd=folder)


def discard(path: Path, root: Path | None = None) -> None:
    """`remove`, as far as it can be removed. Never raises OSError."""
    with suppress(OSError):
        _remove(path, root or path.parent, ignore_errors=True)


def _remove_tree(name: str, folder: int, *, ignore_errors: bool = False) -> None:
    try:
        shutil.rmtree(name, ignore_errors, dir_fd=folder)
    except RecursionError:
        raise OSError(errno.ENAMETOOLONG, "its folders are nested too deeply to remove", name) from None


@contextmanager
def scratch(base: Path, prefix: str) -> Iterator[Path]:
    """A new folder in `base` for this process, which is removed at the end. Raises OSError.

    The path goes through a descriptor, and only this folder is emptied, whatever somebody may put in its place.
    """
    name = f"{prefix}{secrets.token_hex(8)}"
    os.mkdir(base / name, 0o700)
    with opened(base / name) as folder:
        if os.listdir(folder):
            raise NotOwn(errno.ENOTEMPTY, "somebody has put another folder in its place", str(base / name))
        try:
            yield folder
        finally:
            empty(folder)
            _remove_if(base / name, os.stat(folder))


@contextmanager
def opened(path: Path) -> Iterator[Path]:
    """A path to this user's private folder `path` that stays valid whatever is renamed: it goes through a descriptor.

    Raises NotOwn if it is a link, belongs to somebody else, or others may write to it; OSError.
    """
    try:
        folder = os.open(path, _FOLDER)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise NotOwn(errno.ELOOP, "it is a link, or no folder", str(path)) from None
        raise
    try:
        found = os.fstat(folder)
        _check_owner(found, path, owner_here(folder) if found.st_uid != os.geteuid() else found.st_uid)
        if found.st_mode & 0o022:
            raise NotOwn(errno.EPERM, "others may write to it", str(path))
        yield Path(f"/proc/self/fd/{folder}")
    finally:
        os.close(folder)


def empty(folder: Path) -> None:
    """Remove what is in a folder from `opened` or `scratch`. What cannot be removed stays."""
    fd = os.open(folder, _FOLDER & ~os.O_NOFOLLOW)
    try:
        for name in os.listdir(fd):
            with suppress(OSError):
                if stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
                    _remove_tree(name, fd)
                else:
                    os.unlink(name, dir_fd=fd)
    finally:
        os.close(fd)


def remove_emptied(path: Path, folder: Path) -> None:
    """Remove the folder `path`, if it is empty and still the one behind `folder`, a path from `opened`. Never raises OSError."""
    with suppress(OSError):
        _remove_if(path, os.stat(folder))


def _remove_if(path: Path, same: os.stat_result) -> None:
    with suppress(OSError):
        there = os.lstat(path)
        if (there.st_dev, there.st_ino) == (same.st_dev, same.st_ino):
            os.rmdir(path)


def _check_owner(found: os.stat_result, path: Path, also: int) -> None:
    if found.st_uid not in (os.geteuid(), also):
        raise NotOwn(errno.EPERM, f"it belongs to {user_name(found.st_uid)}", str(path))


def owner_here(folder: int) -> int:
    """Whom a new file in this folder belongs to: on a server that maps users, that is who we are there. -1: none can be made."""
    name = f".fsbarrier-{secrets.token_hex(8)}"
    try:
        made = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
    except OSError:
        return -1
    try:
        return os.fstat(made).st_uid
    finally:
        os.close(made)
        os.unlink(name, dir_fd=folder)


def user_name(uid: int) -> str:
    """For messages."""
    try:
        return f"{pwd.getpwuid(uid).pw_name} (user id {uid})"
    except KeyError:
        return f"user id {uid}"
