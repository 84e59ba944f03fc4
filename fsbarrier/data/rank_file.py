"""The file to which one rank appends its finished groups: framed msgpack. Reading it needs no torch and executes nothing.

    MAGIC | header frame | group frame | group frame | ... | end frame

    frame = HEAD | content

HEAD has the size of the content, its CRC-32, and the CRC-32 of these two (three little-endian numbers of 32 bits). The content is a
msgpack map: `{"header": ...}` says whose file this is; `{"task_index": ..., "trajectories": [...]}` is a group; `{"end": ...}` is there
once the rank has finished the file.

A group is committed once its whole frame is written. A later group of a task takes the place of an earlier one: a program that starts
again rolls out again what had failed. Bytes after the last whole frame are a torn tail, which was never acknowledged. A
damaged frame loses only its own group, unless its HEAD is damaged: then the following frames cannot be found, and count as torn.
"""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgpack

from fsbarrier.data.group_stats import GroupStats
from fsbarrier.data.trajectory import Trajectory
from fsbarrier.errors import StoreError, UsageError
from fsbarrier.protocol.facts import JsonObject
from fsbarrier.store.reading import PIECE_BYTES, open_plain
from fsbarrier.store.retry import patiently

MAGIC = b"fsbgrp1\n"
HEAD = struct.Struct("<3I")
#: array types that torch has too; their codes are also the codes of the msgpack extensions
TYPECODES = "ifBqd"
#: msgpack extension of integers beyond 64 bits
BIG_INT = 1
#: the largest integer; Python converts none of more than 4300 digits to text
INT_BITS = 4096
#: maximum nesting of containers in a value
MAX_DEPTH = 200
#: the key of the end frame's content
END = "end"
#: bytes per read when computing a checksum
CHUNK = 1 << 20


class FormatError(UsageError):
    """Not a trajectory file, or damaged."""


class NotOurs(FormatError):
    """A file that was not written by fsbarrier."""


class GroupEntry(NamedTuple):
    """One committed group of a file; `offset` and `end` of its frame in bytes."""

    task_index: int
    stats: GroupStats
    offset: int
    end: int


#: receives each valid group while a file is read, also those whose place a later one takes
OnGroup = Callable[[GroupEntry, list[Trajectory]], None]


@dataclass(frozen=True)
class RankFile:
    """The contents of a rank's file. `valid_bytes` + `torn_bytes` = the file's size (or the given limit)."""

    path: Path
    header: JsonObject
    groups: tuple[GroupEntry, ...]
    valid_bytes: int
    torn_bytes: int
    finished: bool
    #: descriptions of the damage before the last whole frame
    damaged: tuple[str, ...] = ()

    @property
    def stats(self) -> GroupStats:
        """The sums over its groups."""
        return GroupStats.total(group.stats for group in self.groups)


# --- frames --- ------------------------------------------------------------------------------------------------------------------


def frame(content: JsonObject, what: str) -> bytes:
    """The bytes of a frame. Raises UsageError if it would be too large, or `what` holds something that a trajectory cannot."""
    packed = pack(content, what)
    if len(packed) > PIECE_BYTES:
        raise UsageError(
            f"a group of {len(packed)} bytes, and {PIECE_BYTES} are allowed; make groups smaller"
        )
    sums = struct.pack("<2I", len(packed), zlib.crc32(packed))
    return sums + struct.pack("<I", zlib.crc32(sums)) + packed


def pack(value: object, what: str) -> bytes:
    """`value` as msgpack. Raises UsageError if `what` holds something that a trajectory cannot."""
    check_plain(value, what)
    packed: bytes = msgpack.packb(value, default=_extension, unicode_errors="surrogatepass")
    return packed


def _extension(value: object) -> msgpack.ExtType:
    if isinstance(value, int):
        return msgpack.ExtType(BIG_INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
    assert isinstance(value, array)
    return msgpack.ExtType(ord(_typecode(value)), value.tobytes())


def _typecode(value: array[Any]) -> str:
    """The array's type; `l` is another name of `q` on most machines."""
    return "q" if value.typecode == "l" and value.itemsize == 8 else value.typecode


def unpack(data: bytes) -> Any:
    """The value that `pack` has encoded. Raises FormatError."""
    try:
        return msgpack.unpackb(data, ext_hook=_from_extension, unicode_errors="surrogatepass")
    except (msgpack.UnpackException, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise FormatError(f"cannot be decoded: {error}") from None


def _from_extension(code: int, data: bytes) -> object:
    if code == BIG_INT:
        if len(data) > INT_BITS // 8 + 1:
            raise ValueError(f"an integer of {len(data)} bytes")
        return int.from_bytes(data, "little", signed=True)
    if chr(code) not in TYPECODES:
        raise ValueError(f"unknown extension {code}")
    values = array(chr(code))
    values.frombytes(data)
    return values


def check_plain(value: object, where: str, depth: int = 0) -> None:
    """Raises UsageError if `value` contains anything that a trajectory cannot hold, and says where."""
    if isinstance(value, int) and value.bit_length() > INT_BITS:
        raise UsageError(f"{where}: an integer of more than {INT_BITS} bits")
    if value is None or isinstance(value, str | int | float):
        return
    if depth > MAX_DEPTH:
        raise UsageError(f"{where}: nested more than {MAX_DEPTH} deep")
    if isinstance(value, dict):
        for name, item in value.items():
            if not isinstance(name, str):
                raise UsageError(f"{where}: the key {name!r} is not a string")
            check_plain(item, f"{where}.{name}", depth + 1)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            check_plain(item, f"{where}[{index}]", depth + 1)
    elif not isinstance(value, array):
        raise UsageError(
            f"{where} is a {type(value).__name__}; a trajectory holds None, bool, int, float, str, list, tuple, "
            "dict with string keys, and array.array"
        )
    elif _typecode(value) not in TYPECODES:
        raise UsageError(f"{where}: array type {value.typecode!r} has no torch type here; use {TYPECODES}")


# --- reading --- -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """Open `path` for reading; errors inside the context name the file. Raises StoreError, FormatError."""
    try:
        fd = patiently(lambda: _open(path))
        try:
            yield fd
        finally:
            # The file was only read, so errors on close are irrelevant.
            with contextlib.suppress(OSError):
                os.close(fd)
    except OSError as error:
        raise StoreError(f"{path}: cannot read it: {error.strerror or error}") from error
    except FormatError as error:
        raise type(error)(f"{path}: {error}") from None


def _open(path: Path) -> int:
    try:
        return open_plain(path)
    except FileNotFoundError:
        # NFS may cache the absence of the name for 30 s; listing its directory makes it look again.
        os.listdir(path.parent)
        return open_plain(path)


def read_at(fd: int, offset: int, size: int) -> bytes:
    """`size` bytes from `offset`, or fewer at the end of the file; transient errors are retried. Raises OSError."""
    pieces: list[bytes] = []
    while size:
        piece = patiently(partial(os.pread, fd, size, offset))
        if not piece:
            break
        pieces.append(piece)
        offset, size = offset + len(piece), size - len(piece)
    return b"".join(pieces)


def scan_rank_file(path: Path, limit_bytes: int | None = None, on_group: OnGroup | None = None) -> RankFile:
    """List the committed groups of a rank's file, finished or not; all of it is read and verified, one group at a time.

    `limit_bytes`: consider only this many bytes, for example those that were acknowledged.
    Raises StoreError (unreadable), NotOurs, FormatError (the header is damaged).
    """
    with opened(path) as fd:
        size = patiently(lambda: os.fstat(fd)).st_size
        size = size if limit_bytes is None else min(size, limit_bytes)
        start = read_at(fd, 0, min(len(MAGIC), size))
        if start != MAGIC and any(start) and not MAGIC.startswith(start):
            raise NotOurs("it was not written by fsbarrier")
        header: JsonObject | None = None
        groups: dict[int, GroupEntry] = {}
        # Count damage only between whole frames; after the last one it is a torn tail.
        damaged, doubtful = list[str](), list[str]()
        finished, valid = False, 0
        for offset, end in _frames(fd, size) if start == MAGIC else ():
            try:
                content = _content(fd, offset, end)
                if header is not None and END not in content:
                    trajectories = _trajectories(content)
                    group = _entry(content, trajectories, offset, end)
                    groups[group.task_index] = group
                    if on_group is not None:
                        on_group(group, trajectories)
            except FormatError as error:
                doubtful.append(f"the group at byte {offset} {error}")
                continue
            if header is None:
                header = _header(content, offset)
            finished = finished or END in content
            damaged += doubtful
            doubtful.clear()
            valid = end
        # No header: the writer was killed, or lost power, before it was durable.
        return RankFile(
            path, header or {}, tuple(groups.values()), valid, size - valid, finished, tuple(damaged)
        )


def read_trajectories(path: Path, group: GroupEntry) -> list[Trajectory]:
    """The trajectories of one group. Raises StoreError, FormatError (damaged)."""
    with opened(path) as fd:
        return _trajectories(_content(fd, group.offset, group.end))


def _frames(fd: int, size: int) -> Iterator[tuple[int, int]]:
    """Begin and end of each frame whose HEAD is valid, and that ends within the file."""
    offset = len(MAGIC)
    while offset + HEAD.size <= size:
        data = read_at(fd, offset, HEAD.size)
        if len(data) < HEAD.size or zlib.crc32(data[:8]) != HEAD.unpack(data)[2]:
            return
        length = HEAD.unpack(data)[0]
        end = offset + HEAD.size + length
        if end > size or length > PIECE_BYTES:
            return
        yield offset, end
        offset = end


def _content(fd: int, offset: int, end: int) -> JsonObject:
    """The content of a frame. Raises FormatError, OSError."""
    data = read_at(fd, offset, HEAD.size)
    begin, checksum = offset + HEAD.size, 0
    # Verify the checksum in pieces first, so that a wrong size in a damaged file allocates no memory.
    for start in range(begin, end, CHUNK):
        checksum = zlib.crc32(read_at(fd, start, min(CHUNK, end - start)), checksum)
    if len(data) < HEAD.size or checksum != HEAD.unpack(data)[1]:
        raise FormatError("is damaged (checksum)")
    content = unpack(read_at(fd, begin, end - begin))
    if not isinstance(content, dict):
        raise FormatError("is malformed")
    return content


def _header(content: JsonObject, offset: int) -> JsonObject:
    header = content.get("header")
    if offset != len(MAGIC) or not isinstance(header, dict):
        raise FormatError("its header is damaged")
    return header


def _trajectories(content: JsonObject) -> list[Trajectory]:
    trajectories = content.get("trajectories")
    if not isinstance(trajectories, list) or not all(
        isinstance(trajectory, dict) for trajectory in trajectories
    ):
        raise FormatError("is malformed")
    return trajectories


def _entry(content: JsonObject, trajectories: list[Trajectory], offset: int, end: int) -> GroupEntry:
    try:
        return GroupEntry(int(content["task_index"]), GroupStats.of(trajectories), offset, end)
    except (LookupError, TypeError, ValueError, ArithmeticError):
        raise FormatError("is malformed") from None
