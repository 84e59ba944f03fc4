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
import stat
from collections.abc import Callable
from pathlib import Path

from fsbarrier import reading
from fsbarrier.retry import FAILING, retry, until_seen

_modes = {"file": 0o600, "dir": 0o700}


def set_shared_group(on: bool) -> None:
    """Choose the permissions of everything written from now on: the owner only (default), or the group too."""
    _modes["file"], _modes["dir"] = (0o660, 0o770) if on else (0o600, 0o700)


def make_dirs(path: Path) -> None:
    """Make `path` and its missing parents with the run's directory mode, whatever the umask; afterwards this mount shows it.

    Raises OSError where the directory cannot be made; an existing one is left as it is.
    """
    until_seen(lambda: try_to_make_dirs(path))


def make_dirs_below(root: Path, folder: Path) -> None:
    """`make_dirs` that makes nothing behind a link below `root`. Raises reading.NotPlain, OSError."""
    parts = reading.parts_below(root, folder)
    for depth in range(len(parts) + 1):
        path = root.joinpath(*parts[:depth])
        make_dirs(path)
        reading.check_below(root, path)


def try_to_make_dirs(path: Path) -> None:
    """`make_dirs` without waiting. Raises FileNotFoundError while this mount hides what another node made, OSError."""
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
            _open_to_group(directory)
        except FileNotFoundError:
            raise
        except OSError as error:
            # It may have been made although an error came back. If it "exists" and cannot be seen, another node made it, and this
            # host still remembers its absence.
            there = _look(directory)
            if there is None and error.errno == errno.EEXIST:
                raise FileNotFoundError(errno.ENOENT, "it is not to be seen yet", str(directory)) from None
            if there is None or not stat.S_ISDIR(there.st_mode):
                raise


def _open_to_group(directory: Path) -> None:
    """What the umask took from the mode of a new directory, where that is wider than the default. Raises OSError."""
    if _modes["dir"] == 0o700:
        return
    # Opened without following links: whoever may write beside it could put one there meanwhile.
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        # What is made in a folder of a shared group may be meant to belong to that group.
        os.fchmod(fd, _modes["dir"] | os.fstat(fd).st_mode & stat.S_ISGID)
    finally:
        os.close(fd)


def open_new(path: Path, more_flags: int = 0) -> int:
    """Create `path` exclusively with the run's file mode and give a descriptor for writing. Raises OSError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC | more_flags
    fd = os.open(path, flags, _modes["file"])
    # The umask can only have narrowed a mode that is wider than the default.
    if _modes["file"] != 0o600:
        os.fchmod(fd, _modes["file"])
    return fd


def open_append(path: Path) -> int:
    """A descriptor that writes at the end of `path`, which is created with the run's file mode if need be. Raises OSError."""
    try:
        return open_new(path, os.O_APPEND)
    except OSError as error:
        # It is there already, or was created although an error came back.
        try:
            return open_own(path, os.O_APPEND)
        except FileNotFoundError:
            raise error from None


def open_own(path: Path, more_flags: int = 0) -> int:
    """A descriptor of the plain file `path`, for reading and writing. Raises OSError.

    A file with a second name (a hard link) may belong to a snapshot of the run, or be anybody's. It is left as it is under that name.
    `path` goes on with a copy of it, if the same people may read both, and else begins anew.
    """
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | more_flags
    fd = os.open(path, flags)
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, fd)
        found = os.fstat(fd)
        reading.check_plain(found, path)
        if found.st_nlink <= 1:
            stack.pop_all()
            return fd
        temporary = temporary_beside(path)
        os.close(open_new(temporary))
        own = os.open(temporary, flags)
        stack.callback(os.close, own)
        try:
            if (found.st_uid, stat.S_IMODE(found.st_mode)) == (os.geteuid(), _modes["file"]):
                with open(fd, "rb", closefd=False) as source, open(own, "wb", closefd=False) as copy:
                    shutil.copyfileobj(source, copy, READ_BYTES)
                os.fsync(own)
        except OSError:
            os.unlink(temporary)
            raise
        rename(temporary, path)
        fsync_dir(path.parent)
        return os.dup(own)


def temporary_beside(path: Path) -> Path:
    """A name that nobody else uses, in the directory of `path`: for what is to take the name of `path` once it is whole.

    It begins with a dot, so that readers who list the directory skip it.
    """
    return path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")


def write_atomic(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Put `data` at `path` in one step, replacing what is there. `durable`: it also survives a power loss. Raises OSError."""
    rename(_write_temporary(path, data, durable), path)
    if durable:
        fsync_dir(path.parent)


def write_in_place(path: Path, data: bytes) -> None:
    """Put `data` at `path` without a temporary file: readers may see part of it. Raises OSError."""
    try:
        fd = open_new(path)
    except FileExistsError:
        # What is there may be a FIFO, a link, or a second name of a file of somebody else's: it is never written to.
        os.unlink(path)
        fd = open_new(path)
    _fill(fd, data, durable=False)


def remove_tree(folder: Path | str, dir_fd: int | None = None) -> None:
    """Remove a folder and all in it; no link is followed. Raises OSError, also for folders nested deeper than Python can follow."""
    try:
        shutil.rmtree(folder, dir_fd=dir_fd)
    except RecursionError:
        raise OSError(
            errno.ENAMETOOLONG, "its folders are nested too deep to be removed", str(folder)
        ) from None


def rename(temporary: Path, path: Path) -> None:
    """Give what was made under a name of `temporary_beside` its final name. If that fails, nothing is left. Raises OSError."""
    try:
        os.replace(temporary, path)
    except OSError:
        try:
            os.unlink(temporary)
        except FileNotFoundError:
            # An error came back although it was done: nobody else knows the temporary name, and it is gone.
            if path.name in os.listdir(path.parent):
                return
        except OSError:
            pass
        raise


def create_exclusive(path: Path, data: bytes, *, durable: bool = True, never_torn: bool = False) -> bool:
    """Put `data` at `path` unless something is there already; True where `path` now holds *our* file.

    A hard link decides who is first. After an error look at the file to learn who was, never at the error code: an NFS server may
    answer EEXIST to a request that it carried out itself, and some filesystems answer EPERM to the loser of a race. Where a
    filesystem has no hard links, the final name itself is created exclusively, and a process that is killed before it has written all
    leaves it torn for good. With `never_torn` it is created as a folder with the record in it, which `read_created` reads.
    Raises OSError for anything else.
    """
    temporary = _write_temporary(path, data, durable)
    try:
        won = _link(temporary, path, data)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
    if won is None:
        won = (_create_as_folder if never_torn else _create_in_place)(path, data, durable)
    if won and durable:
        fsync_dir(path.parent)
    return won


def _link(temporary: Path, path: Path, data: bytes) -> bool | None:
    """Whether `path` now is a link to `temporary`, which holds `data`; None where the filesystem has no hard links. Raises OSError."""
    try:
        os.link(temporary, path)
        return True
    except OSError as error:
        there, mine = _look(path), os.stat(temporary)
        if there is None:
            if error.errno in NO_LINKS:
                return None
            raise
        if (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino):
            return True
        # The link may have been made although an error came back. sshfs gives each name of a file an identity of its own, so that
        # only the content shows it.
        return error.errno in FAILING and reading.read_bytes(path, reading.RECORD_BYTES) == data


#: what says that a filesystem has no links (and, on some, that somebody else was first: then the name is there)
NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})


def _look(path: Path) -> os.stat_result | None:
    """What `path` is; None where nothing is there, and its parent's listing does not know it either.

    To open the parent anew makes an NFS client forget that the name was absent a moment ago.
    """
    try:
        return os.stat(path)
    except FileNotFoundError:
        return os.stat(path) if path.name in os.listdir(path.parent) else None


def _create_in_place(path: Path, data: bytes, durable: bool) -> bool:
    """`create_exclusive` without hard links. Nobody removes a torn file: a process that only seemed dead may still complete it."""
    try:
        fd = open_new(path)
    except OSError as error:
        if error.errno == errno.EEXIST or _look(path) is not None:
            return False
        raise
    _fill(fd, data, durable)
    return True


def _create_as_folder(path: Path, data: bytes, durable: bool) -> bool:
    """`create_exclusive` without hard links, whole or not at all: a folder that holds the record takes the name in one step.

    A folder cannot be renamed to the name of a file, nor to that of a folder in which something lies. So exactly one process wins, also
    where another host can make hard links. One that dies before that step leaves a temporary name and nothing else.
    """
    folder, record = temporary_beside(path), f"record-{secrets.token_hex(6)}"
    try_to_make_dirs(folder)
    try:
        _fill(open_new(folder / record), data, durable)
        if durable:
            fsync_dir(folder)
        os.rename(folder, path)
        return True
    except OSError:
        # The name of the record inside is nobody else's, and tells whose it is where an error came back although the rename was done.
        there = _look(path)
        if there is not None and stat.S_ISDIR(there.st_mode) and record in os.listdir(path):
            return True
        shutil.rmtree(folder, ignore_errors=True)
        if there is None:
            raise
        return False


def read_created(path: Path) -> bytes:
    """What `create_exclusive` put at `path`, as a file or as a folder, freshly opened. Raises OSError."""
    try:
        return reading.read_bytes(path, reading.RECORD_BYTES)
    except IsADirectoryError:
        pass
    for name in os.listdir(path):
        return reading.read_bytes(path / name, reading.RECORD_BYTES)
    raise FileNotFoundError(errno.ENOENT, "its record is not to be seen yet", str(path))


def _write_temporary(path: Path, data: bytes, durable: bool) -> Path:
    temporary = temporary_beside(path)
    try:
        fd = open_new(temporary)
    except OSError as error:
        # It may have been created although an error came back; if the client then tried again by itself, that is EEXIST. Take another
        # name, and leave nothing under this one.
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


def _fill(fd: int, data: bytes, durable: bool) -> None:
    """Write all of `data` and close. Raises OSError, also for what only shows at the end."""
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        if durable:
            os.fsync(fd)
    finally:
        os.close(fd)


def fsync_dir(path: Path) -> None:
    """Make the names in `path` durable; does nothing on filesystems without such a call (NFS)."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(fd)


#: how much of a long file is read between two chances to end that
READ_BYTES = 1 << 20


def sha256_file(path: Path) -> str:
    """The SHA-256 of the content of a file of the user's, in hexadecimal. Raises OSError."""
    fd = reading.open_plain(path, links=True)
    try:
        return sha256_open(fd)
    finally:
        os.close(fd)


def sha256_open(fd: int, between_reads: Callable[[], None] = lambda: None) -> str:
    """`sha256_file` of an open file. Raises OSError, and what `between_reads` raises, by which a long check can be ended."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(READ_BYTES))
    while size := retry(lambda: os.readv(fd, [buffer]), errnos=FAILING):
        digest.update(buffer[:size])
        between_reads()
    return digest.hexdigest()


def link_or_copy(
    source: Path,
    target: Path,
    last_look: Callable[[], None] = lambda: None,
    between_reads: Callable[[], None] = lambda: None,
) -> None:
    """Give `source` a second name, replacing what is there in one step; a copy where the filesystem has no hard links.

    `last_look` is called directly before that step, `between_reads` all the while that a copy takes; both may refuse to go on by
    raising. Raises OSError, and what they raise.
    """
    temporary = temporary_beside(target)
    try:
        _link_or_copy(source, temporary, between_reads)
        last_look()
        rename(temporary, target)
    finally:
        with contextlib.suppress(OSError):
            # Renaming one name of a file to another name of it does nothing, so the temporary name may still be there after a success.
            os.unlink(temporary)
    fsync_dir(target.parent)


def _link_or_copy(source: Path, temporary: Path, between_reads: Callable[[], None]) -> None:
    try:
        os.link(source, temporary)
        return
    except OSError:
        # If the link was made although an error came back, a copy would be written into the source: it needs a name that is free.
        with contextlib.suppress(OSError):
            os.unlink(temporary)
    with reading.open_stream(source) as stream, open(open_new(temporary), "wb") as copy:
        while piece := stream.read(READ_BYTES):
            copy.write(piece)
            between_reads()
        copy.flush()
        os.fsync(copy.fileno())
