"""Opening what others may have written: a plain file, of a bounded size, never through a link, and never waiting for anybody.

Whoever can put one file into a run directory could put a FIFO there (to open it waits for a writer), a device (it never ends), a link
(it leads out of the run) or a sparse file of a terabyte. All that is read from a run directory is opened here, and every limit on what
a file may cost stands here.
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

#: of one record of the protocol, and of the run's own record
RECORD_BYTES, RUN_RECORD_BYTES = 64 * MIB, 16 * MIB
#: of small JSON files beside others: manifests, layouts, configurations
JSON_BYTES = 256 * MIB
#: of one line of a journal or a log; a longer one is passed over
LINE_BYTES = 16 * MIB
#: of one journal: what a year of one node comes to
JOURNAL_BYTES = 4 * GIB
#: of the header of a safetensors file, which is that format's own limit
TENSOR_HEADER_BYTES = 100 * MIB
#: of what is read in one piece of a trajectory file: its directory, an index, the text of a group
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
    """Something else than a plain file has its name, or the file is larger than it may be."""


def open_plain(path: Path | str, *, links: bool = False, dir_fd: int | None = None) -> int:
    """A descriptor of a plain file, for reading. `links`: its name may be a link, as in a folder of the user's own.

    Raises NotPlain, OSError; IsADirectoryError for a folder.
    """
    try:
        fd = os.open(path, _FLAGS | (0 if links else os.O_NOFOLLOW), dir_fd=dir_fd)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotPlain(errno.ELOOP, "it is a link, not a plain file", str(path)) from None
        if error.errno == errno.ENXIO:
            # A socket cannot be opened at all.
            raise NotPlain(errno.EINVAL, "it is no plain file", str(path)) from None
        raise
    try:
        check_plain(os.fstat(fd), path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def check_plain(found: os.stat_result, path: Path | str) -> None:
    """Raises NotPlain, IsADirectoryError where `found` is no plain file."""
    kind = stat.S_IFMT(found.st_mode)
    if kind == stat.S_IFDIR:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if kind != stat.S_IFREG:
        what = "a link" if kind == stat.S_IFLNK else _KINDS.get(kind, "something else")
        raise NotPlain(errno.EINVAL, f"it is {what}, not a plain file", str(path))


def check_may_replace(path: Path) -> None:
    """A file that somebody names may take this name. Raises NotPlain where that would remove a device, a FIFO or a link; OSError."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    check_plain(found, path)


@contextmanager
def open_stream(path: Path | str, most: int | None = None, *, links: bool = False) -> Iterator[BinaryIO]:
    """A plain file, of at most `most` bytes, as a stream of bytes. Raises NotPlain, OSError."""
    with os.fdopen(open_plain(path, links=links), "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        if most is not None and size > most:
            raise NotPlain(errno.EFBIG, f"it has {size} bytes, and {most} are allowed", str(path))
        yield stream


def read_bytes(path: Path | str, most: int, *, links: bool = False) -> bytes:
    """All of a plain file of at most `most` bytes. Raises NotPlain, OSError."""
    with open_stream(path, most, links=links) as stream:
        return read_all(stream, most, path)


def read_all(stream: BinaryIO, most: int, path: Path | str) -> bytes:
    """All of an open file of at most `most` bytes. Raises NotPlain, OSError."""
    size = os.fstat(stream.fileno()).st_size
    # The file may grow while it is read.
    data = stream.read(most + 1) if size <= most else b""
    if size > most or len(data) > most:
        raise NotPlain(errno.EFBIG, f"it has {max(size, len(data))} bytes, and {most} are allowed", str(path))
    return data


def json_object(path: Path, raises: Callable[[str], Exception], *, called: str = "") -> dict[str, Any]:
    """The object in a JSON file of the user's own, which may be a link. `called`: how messages name it, where not by its path.

    Raises what `raises` makes of a message.
    """
    called = called or str(path)
    try:
        found = json.loads(read_bytes(path, JSON_BYTES, links=True))
    except OSError as error:
        raise raises(f"{called}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise raises(f"{called}: is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise raises(f"{called}: is not a JSON object")
    return found


# --- below a folder, with no link on the way -------------------------------------------------------------------------------


@contextmanager
def folder_below(root: Path, folder: Path) -> Iterator[int]:
    """A descriptor of `folder`, which is `root` or lies below it. `root` itself may be reached through links.

    Raises NotPlain where a link is on the way, or the path leads out of `root`; OSError.
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
    """Raises NotPlain where a link leads to `folder`, or it is not below `root`; OSError."""
    with folder_below(root, folder):
        pass


def open_below(root: Path, path: Path) -> int:
    """A descriptor of a plain file below `root`, for reading. Raises as `folder_below` and `open_plain` do."""
    with folder_below(root, path.parent) as fd:
        try:
            return open_plain(path.name, dir_fd=fd)
        except OSError as error:
            # Inside the folder the error names the file without its path.
            error.filename = str(path)
            raise


def parts_below(root: Path, path: Path) -> tuple[str, ...]:
    """The names that lead from `root` to `path`. Raises NotPlain where they lead out of it."""
    try:
        parts = path.relative_to(root).parts
    except ValueError:
        parts = ("..",)
    if ".." in parts:
        raise NotPlain(errno.EXDEV, f"it is not below {root}", str(path))
    return parts
