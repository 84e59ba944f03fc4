"""Crash-safe writing of whole files on a shared filesystem. The only place that knows the recipe.

A reader either finds no file, the old file or the whole new one: the bytes go to a temporary name in the same directory, are
flushed where they must outlive the machine, and then take their final name in one step.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import shutil
from pathlib import Path

_modes = {"file": 0o600, "dir": 0o700}


def set_shared_group(on: bool) -> None:
    """Choose the permissions of everything written from now on: the owner only (default), or the group too."""
    _modes["file"], _modes["dir"] = (0o660, 0o770) if on else (0o600, 0o700)


def make_dirs(path: Path) -> None:
    """Make `path` and its missing parents with the run's directory mode, whatever the umask.

    Raises OSError where the directory cannot be made; an existing one is left as it is.
    """
    missing = []
    current = path
    while not current.is_dir():
        missing.append(current)
        if current.parent == current:
            break
        current = current.parent
    for directory in reversed(missing):
        try:
            os.mkdir(directory, _modes["dir"])
            os.chmod(directory, _modes["dir"])
        except FileExistsError:
            if not directory.is_dir():
                raise


def open_new(path: Path) -> int:
    """Create `path` exclusively with the run's file mode and give a descriptor for writing. Raises OSError."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, _modes["file"])
    if _modes["file"] != 0o600:  # only a wider mode can have been narrowed by the umask
        os.fchmod(fd, _modes["file"])
    return fd


def write_atomic(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Put `data` at `path` in one step, replacing what is there. `durable`: it also survives a power loss. Raises OSError."""
    temporary = _write_temporary(path, data, durable)
    try:
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    if durable:
        fsync_dir(path.parent)


def create_exclusive(path: Path, data: bytes, *, durable: bool = True) -> bool:
    """Put `data` at `path` unless something is there already; True where `path` now holds *our* file.

    A hard link decides, and then what is really there, never the error code: an NFS server may answer EEXIST to a request
    that it carried out itself, and some filesystems answer EPERM to the loser of a race. Raises OSError for anything else.
    """
    temporary = _write_temporary(path, data, durable)
    try:
        mine = os.stat(temporary)
        failure: OSError | None = None
        try:
            os.link(temporary, path)
        except OSError as error:
            failure = error
        try:
            there = os.stat(path)
        except FileNotFoundError:
            if failure is not None and failure.errno not in (errno.EEXIST, errno.EPERM):
                raise failure from None
            raise OSError(
                errno.EOPNOTSUPP, "the filesystem cannot create a hard link exclusively", str(path)
            ) from failure
        won = (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
    if won and durable:
        fsync_dir(path.parent)
    return won


def _write_temporary(path: Path, data: bytes, durable: bool) -> Path:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    fd = open_new(temporary)
    try:
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            if durable:
                os.fsync(fd)
        finally:
            os.close(fd)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    return temporary


def fsync_dir(path: Path) -> None:
    """Make the names in `path` durable; filesystems that have no such thing (NFS) are content without."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(fd)


def sha256_file(path: Path) -> str:
    """The SHA-256 of a file's content in hexadecimal. Raises OSError."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def link_or_copy(source: Path, target: Path) -> None:
    """Give `source` a second name, replacing what is there in one step; a copy where hard links are not to be had. Raises OSError."""
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(6)}.tmp")
    try:
        try:
            os.link(source, temporary)
        except OSError:
            shutil.copyfile(source, temporary)
            os.chmod(temporary, _modes["file"])
        os.replace(temporary, target)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)  # renaming one name of a file onto another of the same file does nothing
    fsync_dir(target.parent)
