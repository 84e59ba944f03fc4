"""Safely opens files that other users may have written: only regular files of bounded size, without following links or blocking.

A user with write access to a run directory could place a FIFO there (open would block), a device (endless), a link out of the run, or a
sparse file of a terabyte. All files in a run directory are opened through this module, which also defines all size limits.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

MIB, GIB = 1 << 20, 1 << 30

#: limits: a protocol record, and the run's record
RECORD_BYTES, RUN_RECORD_BYTES = 64 * MIB, 16 * MIB
#: small JSON files: manifests, layouts, configurations
JSON_BYTES = 256 * MIB
#: a line of a journal; longer lines are skipped. Fsbarrier writes a few hundred bytes a line, or a few thousand with the end of a log.
LINE_BYTES = MIB // 4
#: a task: a line of a task file, with the images that are in it
TASK_BYTES = 64 * MIB
#: an answer of a judge, which may be another organisation's server
ANSWER_BYTES = 8 * MIB
#: a journal: about a year of one node
JOURNAL_BYTES = 4 * GIB
#: the header of a safetensors file (the format's own limit)
TENSOR_HEADER_BYTES = 100 * MIB
#: a piece of a trajectory file that is read at once: its directory, an index, the text of a group
PIECE_BYTES = GIB

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC


class NotPlain(OSError):
    """Not a regular file, or larger than allowed."""


def open_plain(path: Path | str, *, links: bool = False, dir_fd: int | None = None) -> int:
    """Open a regular file for reading. `links`: follow a link, for files in the user's own folders.

    Raises NotPlain, OSError; IsADirectoryError for a folder.
    """
    try:
        fd = os.open(path, _FLAGS | (0 if links else os.O_NOFOLLOW), dir_fd=dir_fd)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotPlain(errno.ELOOP, "it is a link, not a plain file", str(path)) from None
        if error.errno == errno.ENXIO:
            # Opening a socket fails with this error.
            raise NotPlain(errno.EINVAL, "it is no plain file", str(path)) from None
        raise
    try:
        check_plain(os.fstat(fd), path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def check_plain(status: os.stat_result, path: Path | str) -> None:
    """Raises NotPlain or IsADirectoryError if `status` is not a regular file's."""
    kind = stat.S_IFMT(status.st_mode)
    if kind == stat.S_IFDIR:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if kind != stat.S_IFREG:
        what = "a link" if kind == stat.S_IFLNK else _KINDS.get(kind, "something else")
        raise NotPlain(errno.EINVAL, f"it is {what}, not a plain file", str(path))


def check_may_replace(path: Path) -> None:
    """Check that a user-named output file may replace this path. Raises NotPlain for a device, a FIFO or a link; OSError."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return
    check_plain(status, path)


@contextmanager
def open_stream(path: Path | str, most: int | None = None, *, links: bool = False) -> Iterator[BinaryIO]:
    """Open a regular file of at most `most` bytes as a stream. Raises NotPlain, OSError."""
    with os.fdopen(open_plain(path, links=links), "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        if most is not None and size > most:
            raise NotPlain(errno.EFBIG, f"it has {size} bytes, and {most} are allowed", str(path))
        yield stream


def read_bytes(path: Path | str, most: int, *, links: bool = False) -> bytes:
    """Read a regular file of at most `most` bytes. Raises NotPlain, OSError."""
    with open_stream(path, most, links=links) as stream:
        return read_all(stream, most, path)


def read_all(stream: BinaryIO, most: int, path: Path | str) -> bytes:
    """Read an open file of at most `most` bytes. Raises NotPlain, OSError."""
    size = os.fstat(stream.fileno()).st_size
    # The file may grow while it is being read.
    data = stream.read(most + 1) if size <= most else b""
    # None means that a read would block, as of /proc/kmsg.
    if data is None:
        raise NotPlain(errno.EINVAL, "it is no plain file", str(path))
    if size > most or len(data) > most:
        raise NotPlain(errno.EFBIG, f"it has {max(size, len(data))} bytes, and {most} are allowed", str(path))
    return data


def json_object(path: Path, raises: Callable[[str], Exception], *, called: str = "") -> dict[str, Any]:
    """Read a user's JSON file, which may be a link and must contain an object. `called`: its name in messages (default: its path).

    Raises the exception that `raises` makes from a message.
    """
    called = called or str(path)
    try:
        parsed = json.loads(read_bytes(path, JSON_BYTES, links=True))
    except OSError as error:
        raise raises(f"{called}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise raises(f"{called}: is not JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise raises(f"{called}: is not a JSON object")
    return parsed


# --- below a folder, without following links -------------------------------------------------------------------------------


@contextmanager
def folder_below(root: Path, folder: Path) -> Iterator[int]:
    """Open `folder`, which is `root` or below it. Only the path of `root` itself may contain links.

    Raises NotPlain if there is a link below `root` or the path leads out of it; OSError.
    """
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in parts_below(root, folder):
            try:
                inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
            except OSError as error:
                if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                    raise
                raise NotPlain(errno.ENOTDIR, f"{name} is a link, or no folder", str(folder)) from None
            os.close(fd)
            fd = inner
        yield fd
    finally:
        os.close(fd)


def check_below(root: Path, folder: Path) -> None:
    """Raises NotPlain if there is a link on the way to `folder`, or it is not below `root`; OSError."""
    with folder_below(root, folder):
        pass


def open_below(root: Path, path: Path) -> int:
    """Open a regular file below `root` for reading. Raises the errors of `folder_below` and `open_plain`."""
    with folder_below(root, path.parent) as fd:
        try:
            return open_plain(path.name, dir_fd=fd)
        except OSError as error:
            # The error contains only the name relative to the folder.
            error.filename = str(path)
            raise


def parts_below(root: Path, path: Path) -> tuple[str, ...]:
    """The path components from `root` to `path`. Raises NotPlain if they lead out of it."""
    try:
        parts = path.relative_to(root).parts
    except ValueError:
        parts = ("..",)
    if ".." in parts:
        raise NotPlain(errno.EXDEV, f"it is not below {root}", str(path))
    return parts
