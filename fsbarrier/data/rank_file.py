"""The file to which one rank appends its finished groups: framed msgpack. Reading it needs no torch and executes nothing.

    MAGIC | header frame | group frame | group frame | ... | end frame

    frame = HEAD | summary | body

HEAD has the sizes of summary and body, the CRC-32 of each, and its own CRC-32 (five little-endian numbers of 32 bits). Summaries and bodies
are msgpack. The header's summary says whose file this is. A group's summary has its task and statistics, and its body the trajectories. The
end frame is there once the rank has nothing more to add.

A group is committed by its whole frame. What follows the last whole frame is a torn tail, which nobody ever relied on. A damaged frame
before it costs only its own group, unless its HEAD is damaged: then what follows cannot be found, and counts as torn.
"""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgpack

from fsbarrier.data.group_stats import GroupStats, mean_reward
from fsbarrier.data.trajectory import Trajectory
from fsbarrier.errors import StoreError, UsageError
from fsbarrier.protocol.facts import JsonObject
from fsbarrier.store.reading import PIECE_BYTES, open_plain
from fsbarrier.store.retry import patiently

MAGIC = b"fsbgrp1\n"
HEAD = struct.Struct("<5I")
#: array types, which are those that torch has too; their codes are also those of the msgpack extensions
TYPECODES = "ifBqd"
#: msgpack extension of integers beyond 64 bits
BIG_INT = 1
#: the largest integer; Python writes none of more than 4300 digits
INT_BITS = 4096
#: maximum nesting of containers in a value
MAX_DEPTH = 200
#: Limits of a file that may be somebody else's. The header's summary lists the rank's tasks; no rank has as many groups.
SUMMARY_BYTES, MOST_FRAMES = 16 << 20, 1 << 18
#: the key of the end frame's summary
END = "end"
#: bytes per read when computing a checksum
CHUNK = 1 << 20


class FormatError(UsageError):
    """Not a trajectory file, or damaged."""


class NotOurs(FormatError):
    """A file that was not written by fsbarrier."""


class GroupEntry(NamedTuple):
    """One committed group of a file; offsets and lengths in bytes."""

    task_index: int
    stats: GroupStats
    #: of its frame
    offset: int
    end: int
    body_offset: int
    body_crc: int


@dataclass(frozen=True)
class RankFile:
    """The contents of a rank's file. `valid_bytes` + `torn_bytes` = the file's size (or the given limit)."""

    path: Path
    header: JsonObject
    groups: tuple[GroupEntry, ...]
    valid_bytes: int
    torn_bytes: int
    finished: bool
    #: what was found damaged before the last whole frame
    damaged: tuple[str, ...] = ()

    @property
    def trajectories(self) -> int:
        return sum(group.stats.trajectories for group in self.groups)

    @property
    def reward_mean(self) -> float | None:
        return mean_reward(group.stats for group in self.groups)


# --- frames -------------------------------------------------------------------------------------------------------------


def frame(summary: JsonObject, body: bytes = b"") -> bytes:
    """The bytes of a frame. Raises UsageError if it would be too large."""
    packed = pack(summary)
    if len(packed) > SUMMARY_BYTES:
        raise UsageError(f"a summary of {len(packed)} bytes, and {SUMMARY_BYTES} are allowed")
    if len(body) > PIECE_BYTES:
        raise UsageError(f"a group of {len(body)} bytes, and {PIECE_BYTES} are allowed; make groups smaller")
    numbers = struct.pack("<4I", len(packed), len(body), zlib.crc32(packed), zlib.crc32(body))
    return numbers + struct.pack("<I", zlib.crc32(numbers)) + packed + body


def pack(value: object) -> bytes:
    """`value` as msgpack. It must have passed `check_plain`."""
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


def unpack(data: bytes, what: str) -> Any:
    """Raises FormatError."""
    try:
        return msgpack.unpackb(data, ext_hook=_from_extension, unicode_errors="surrogatepass")
    except (msgpack.UnpackException, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise FormatError(f"{what} cannot be decoded: {error}") from None


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


# --- reading ------------------------------------------------------------------------------------------------------------


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


def scan_rank_file(path: Path, limit_bytes: int | None = None, *, verify: bool = True) -> RankFile:
    """List the committed groups of a rank's file, finished or not.

    `limit_bytes`: consider only this many bytes, for example those that were acknowledged. `verify`: check the trajectories' checksums too,
    which reads the whole file; otherwise whoever reads them must (`read_trajectories` does).
    Raises StoreError (unreadable), NotOurs, FormatError (the header is damaged).
    """
    with opened(path) as fd:
        size = patiently(lambda: os.fstat(fd)).st_size
        size = size if limit_bytes is None else min(size, limit_bytes)
        start = read_at(fd, 0, min(len(MAGIC), size))
        if start != MAGIC and any(start) and not MAGIC.startswith(start):
            raise NotOurs("it was not written by fsbarrier")
        whole: list[tuple[_Head, Any]] = []
        damaged: list[tuple[int, str]] = []
        for head in _heads(fd, size) if start == MAGIC else ():
            try:
                summary = head.summary(fd, verify)
                # Of a group only its entry is kept: a summary may be large in memory.
                whole.append((head, _entry(head, summary) if whole else summary))
            except FormatError as error:
                damaged.append((head.offset, str(error)))
        if not whole:
            # Killed, or powered off, before the header was durable.
            return RankFile(path, {}, (), 0, size, finished=False)
        return _described(path, size, whole, damaged)


def _described(
    path: Path, size: int, whole: list[tuple[_Head, Any]], damaged: list[tuple[int, str]]
) -> RankFile:
    first, header = whole[0]
    if (
        first.offset != len(MAGIC)
        or not isinstance(header, dict)
        or not isinstance(header.get("header"), dict)
    ):
        raise FormatError("its header is damaged")
    groups: list[GroupEntry] = []
    finished = False
    for head, entry in whole[1:]:
        if isinstance(entry, GroupEntry):
            groups.append(entry)
        elif entry == END:
            finished = True
        else:
            damaged.append((head.offset, f"the summary at byte {head.offset} is malformed"))
    valid = whole[-1][0].end
    return RankFile(
        path,
        header["header"],
        tuple(groups),
        valid,
        size - valid,
        finished,
        # Damage is only between whole frames; after the last one it is a torn tail.
        tuple(what for offset, what in sorted(damaged) if offset < valid),
    )


def _entry(head: _Head, summary: Any) -> GroupEntry | str | None:
    """The group, END, or None if the summary is malformed."""
    try:
        if END in summary:
            return END
        stats = GroupStats.from_json(summary["stats"])
        body = (head.offset, head.end, head.end - head.body_bytes, head.body_crc)
        return GroupEntry(int(summary["task_index"]), stats, *body)
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
        return None


class _Head(NamedTuple):
    """A frame whose HEAD is valid, and that ends within the file."""

    offset: int
    summary_bytes: int
    body_bytes: int
    summary_crc: int
    body_crc: int

    @property
    def end(self) -> int:
        return self.offset + HEAD.size + self.summary_bytes + self.body_bytes

    def summary(self, fd: int, verify: bool) -> Any:
        """Raises FormatError on a checksum mismatch, OSError."""
        what = f"the frame at byte {self.offset}"
        packed = read_at(fd, self.offset + HEAD.size, self.summary_bytes)
        if zlib.crc32(packed) != self.summary_crc:
            raise FormatError(f"{what} is damaged (checksum)")
        summary = unpack(packed, what)
        if verify:
            found, start = 0, self.end - self.body_bytes
            for offset in range(start, self.end, CHUNK):
                found = zlib.crc32(read_at(fd, offset, min(CHUNK, self.end - offset)), found)
            if found != self.body_crc:
                task = summary.get("task_index") if isinstance(summary, dict) else "?"
                raise FormatError(f"the group of task {task} is damaged (checksum)")
        return summary


def _heads(fd: int, size: int) -> Iterator[_Head]:
    offset, found = len(MAGIC), 0
    while offset + HEAD.size <= size:
        data = read_at(fd, offset, HEAD.size)
        if len(data) < HEAD.size or zlib.crc32(data[:-4]) != int.from_bytes(data[-4:], "little"):
            return
        head = _Head(offset, *HEAD.unpack(data)[:-1])
        if head.end > size or head.summary_bytes > SUMMARY_BYTES or head.body_bytes > PIECE_BYTES:
            return
        found += 1
        if found > MOST_FRAMES:
            raise FormatError(f"it has more than {MOST_FRAMES} groups")
        yield head
        offset = head.end


def read_trajectories(fd: int, group: GroupEntry) -> list[Trajectory]:
    """The trajectories of one group. Raises FormatError (damaged), OSError."""
    what = f"the group of task {group.task_index}"
    body = read_at(fd, group.body_offset, group.end - group.body_offset)
    if len(body) != group.end - group.body_offset or zlib.crc32(body) != group.body_crc:
        raise FormatError(f"{what} is damaged (checksum)")
    found = unpack(body, what)
    if not isinstance(found, list) or len(found) != group.stats.trajectories:
        raise FormatError(f"{what} does not match its description")
    if not all(isinstance(item, dict) for item in found):
        raise FormatError(f"{what} does not match its description")
    return found
