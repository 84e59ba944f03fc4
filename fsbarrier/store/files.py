"""Crash-safe atomic writes on a shared filesystem, and removals. All other modules write and remove files through this one.

A reader sees no file, the old file or the complete new one. Data is written to a temporary file in the same directory, fsynced if it must
survive a power loss, and then renamed or linked to its final name. The file is longer than others, so that all these steps and their
ambiguous errors are in one place.

Somebody may have replaced a folder by a link. So nothing is removed by its path alone: the folder above it is opened without following
links.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from fsbarrier.store import reading
from fsbarrier.store.retry import FAILING, HIDDEN_S, fails_or_hides, patiently

_modes = {"file": 0o600, "dir": 0o700}
# The record of the run that this process works for.
_run_records: set[Path] = set()


def set_shared_group(on: bool) -> None:
    """Set the permissions of all files written from now on: owner only (default), or owner and group."""
    _modes["file"], _modes["dir"] = (0o660, 0o770) if on else (0o600, 0o700)


def make_dirs_only_beside(record: Path) -> None:
    """From now on this process makes folders in the directory of a run only while the run's `record` is there.

    Example: the run directory was renamed, or its disk unmounted. Without this, nodes would make it again at its old path and work there.
    """
    _run_records.add(record)


def make_dirs(path: Path) -> None:
    """Create `path` and its missing parents with the run's directory mode, whatever the umask, and wait until this mount shows it.

    Raises OSError if the directory cannot be created. An existing one is not changed.
    """
    patiently(lambda: try_to_make_dirs(path), HIDDEN_S, passes=fails_or_hides)


def make_dirs_below(root: Path, folder: Path) -> None:
    """`make_dirs` that does not follow links below `root`. Raises reading.NotPlain, OSError."""
    parts = reading.parts_below(root, folder)
    for depth in range(len(parts) + 1):
        path = root.joinpath(*parts[:depth])
        make_dirs(path)
        reading.check_below(root, path)


def try_to_make_dirs(path: Path) -> None:
    """`make_dirs` without waiting. Raises FileNotFoundError while this mount does not show a directory made by another node, OSError."""
    missing = []
    current = path
    while not current.is_dir():
        missing.append(current)
        if current.parent == current:
            break
        current = current.parent
    for record in _run_records if missing else ():
        if record.parent in (path, *path.parents):
            _check_is_there(record)
    for directory in reversed(missing):
        try:
            os.mkdir(directory, _modes["dir"])
            _open_to_group(directory)
        except FileNotFoundError:
            raise
        except OSError as error:
            # The call may have succeeded despite the error. If the directory exists but is not visible, another node made it, and
            # this host still has a negative cache entry.
            status = _look(directory)
            if status is None and error.errno == errno.EEXIST:
                raise FileNotFoundError(
                    errno.ENOENT, "not visible on this mount yet", str(directory)
                ) from None
            if status is None or not stat.S_ISDIR(status.st_mode):
                raise


def _check_is_there(record: Path) -> None:
    """Check that the run's record exists. Raises OSError but never FileNotFoundError, since callers take that for a late directory."""
    try:
        names = os.listdir(record.parent)
    except FileNotFoundError:
        names = []
    if record.name not in names:
        raise OSError(errno.ESTALE, "the run was moved, removed or unmounted", str(record.parent))


def _open_to_group(directory: Path) -> None:
    """Restore the mode bits that the umask removed from a new directory. Raises OSError."""
    if _modes["dir"] == 0o700:
        return
    # O_NOFOLLOW, because another user with write access to the parent could replace the directory by a link.
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        # Keep the setgid bit, which makes new files belong to the shared group.
        os.fchmod(fd, _modes["dir"] | os.fstat(fd).st_mode & stat.S_ISGID)
    finally:
        os.close(fd)


def open_new(path: Path, more_flags: int = 0) -> int:
    """Create `path` exclusively with the run's file mode and return a descriptor for writing. Raises OSError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC | more_flags
    fd = os.open(path, flags, _modes["file"])
    # The umask can only have removed bits if the mode is wider than the default.
    if _modes["file"] != 0o600:
        os.fchmod(fd, _modes["file"])
    return fd


def open_append(path: Path) -> int:
    """A descriptor that appends to `path`, which is created with the run's file mode if necessary. Raises OSError."""
    try:
        return open_new(path, os.O_APPEND)
    except OSError as error:
        # It already exists, or was created despite the error.
        try:
            return open_own(path, os.O_APPEND)
        except FileNotFoundError:
            raise error from None


def open_own(path: Path, more_flags: int = 0) -> int:
    """A descriptor of the regular file `path`, for reading and writing. Raises reading.NotPlain, OSError."""
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | more_flags)
    try:
        reading.check_plain(os.fstat(fd), path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def temporary_beside(path: Path) -> Path:
    """A unique temporary name in the directory of `path`, to be renamed to `path` when complete.

    It begins with a dot, so readers that list the directory skip it.
    """
    return path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")


def write_atomic(path: Path, data: bytes | memoryview, *, durable: bool = False) -> None:
    """Write `data` to `path` atomically, replacing an existing file. `durable`: survives a power loss. Raises OSError."""
    rename(_write_temporary(path, data, durable), path)
    if durable:
        fsync_dir(path.parent)


def write_in_place(path: Path, data: bytes) -> None:
    """Write `data` to `path` without a temporary file: readers may see a partial file. Raises OSError."""
    try:
        fd = open_new(path)
    except FileExistsError:
        # Never write to an existing file: it may be a FIFO, a link, or a hard link to another user's file.
        os.unlink(path)
        fd = open_new(path)
    _fill(fd, data, durable=False)


def rename(temporary: Path, path: Path) -> None:
    """Rename a file made under a name from `temporary_beside` to its final name. Removes it on failure. Raises OSError."""
    try:
        os.replace(temporary, path)
    except OSError:
        try:
            os.unlink(temporary)
        except FileNotFoundError:
            # The rename succeeded despite the error: only this process knows the temporary name, and it is gone.
            if path.name in os.listdir(path.parent):
                return
        except OSError:
            pass
        raise


def create_exclusive(path: Path, data: bytes, *, durable: bool = True) -> bool:
    """Create `path` with `data` unless it exists; True if `path` now contains *our* file.

    A hard link decides which process is first. After an error, inspect the file to find the winner and ignore the error code: an NFS server
    may return EEXIST for a retransmitted request of our own, and some filesystems return EPERM to the loser of a race. Raises OSError if
    the name is still free, also on a filesystem without hard links.
    `durable`: the name is flushed even if it is taken, because an earlier call may have created it and failed to flush it.
    """
    temporary = _write_temporary(path, data, durable)
    try:
        won = _link(temporary, path, data)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
    if durable:
        fsync_dir(path.parent)
    return won


def _link(temporary: Path, path: Path, data: bytes) -> bool:
    """Whether `path` is now a link to `temporary`, which contains `data`. Raises OSError."""
    try:
        os.link(temporary, path)
        return True
    except OSError as error:
        existing, mine = _look(path), os.stat(temporary)
        if existing is None:
            raise
        if (existing.st_dev, existing.st_ino) == (mine.st_dev, mine.st_ino):
            return True
        # The link may have been created despite the error. sshfs gives each hard link its own inode number, so compare the
        # contents.
        return error.errno in FAILING and reading.read_bytes(path, reading.RECORD_BYTES) == data


def _look(path: Path) -> os.stat_result | None:
    """The stat of `path`; None if it does not exist and is not in its parent's listing either.

    Reopening the parent makes an NFS client drop a negative cache entry.
    """
    try:
        return os.stat(path)
    except FileNotFoundError:
        return os.stat(path) if path.name in os.listdir(path.parent) else None


def _write_temporary(path: Path, data: bytes | memoryview, durable: bool) -> Path:
    temporary = temporary_beside(path)
    try:
        fd = open_new(temporary)
    except OSError as error:
        # The file may have been created despite the error, and a retry by the client then returns EEXIST. Remove it and use another
        # name.
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if error.errno not in FAILING and error.errno != errno.EEXIST:
            raise
        temporary = temporary_beside(path)
        fd = open_new(temporary)
    try:
        _fill(fd, data, durable)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    return temporary


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write all of `data`; one call may write only a part, for example on a disk that becomes full. Raises OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _fill(fd: int, data: bytes | memoryview, durable: bool) -> None:
    """Write all of `data` and close. Raises OSError, including errors that are only reported on close."""
    try:
        write_all(fd, data)
        if durable:
            os.fsync(fd)
    finally:
        os.close(fd)


def fsync_dir(path: Path) -> None:
    """fsync a directory, to make its names durable; does nothing on filesystems that do not support it (NFS)."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(fd)


#: how much of a large file to read between two calls of `between_reads`
READ_BYTES = 1 << 20


def sha256_file(path: Path) -> str:
    """The SHA-256 of a user's file, in hexadecimal. Raises OSError."""
    fd = reading.open_plain(path, links=True)
    try:
        return sha256_open(fd)
    finally:
        os.close(fd)


def sha256_open(fd: int, between_reads: Callable[[], None] = lambda: None) -> str:
    """`sha256_file` of an open file. `between_reads` may raise to abort a long computation. Raises OSError."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(READ_BYTES))
    while size := patiently(lambda: os.readv(fd, [buffer])):
        digest.update(buffer[:size])
        between_reads()
    return digest.hexdigest()


def link(source: Path, target: Path, last_look: Callable[[], None] = lambda: None) -> None:
    """Hard-link `source` to a second name, atomically replacing an existing file.

    `last_look` is called directly before the final step and may raise to abort. Raises OSError and the exceptions of `last_look`.
    """
    temporary = temporary_beside(target)
    try:
        try:
            os.link(source, temporary)
        except OSError:
            # If the name exists despite the error, the call has succeeded, since nobody else makes such a name.
            if temporary.name not in os.listdir(temporary.parent):
                raise
        last_look()
        rename(temporary, target)
    finally:
        with contextlib.suppress(OSError):
            # Renaming one hard link of a file onto another does nothing, so the temporary name may still exist after a success.
            os.unlink(temporary)
    fsync_dir(target.parent)


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
