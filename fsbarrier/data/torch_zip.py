"""Reads and writes the zip container of torch files, without torch: append-only writing, defensive reading.

Every entry is stored uncompressed, with its size and CRC-32 in the header before the data, so a truncated file can be read up
to its last complete entry; the central directory comes last. Data is aligned to 64 bytes. Sizes, offsets and counts that
exceed the classic fields use zip64 fields.
"""

from __future__ import annotations

import errno
import functools
import os
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from fsbarrier.data.torch_pickle import ALIGNMENT, FormatError
from fsbarrier.reading import PIECE_BYTES
from fsbarrier.retry import FAILING, retry

ROOT = "archive/"
#: maximum size of our headers, in bytes
HEADER_MAX = 1024

_FULL32, _FULL16 = 0xFFFFFFFF, 0xFFFF
# Tests lower these to see the zip64 fields in small files.
ZIP64_SIZE_FROM = _FULL32
ZIP64_COUNT_FROM = _FULL16

_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR64 = struct.Struct("<4sIQI")
# 1980-01-01, so that the output is deterministic.
_DOS_DATE = (1 << 5) | 1
# The padding field that torch uses too.
_PADDING_ID = struct.unpack("<H", b"FB")[0]


class Entry(NamedTuple):
    """One stored file inside the zip; offsets and sizes in bytes."""

    name: str
    #: of its local header
    offset: int
    header_size: int
    size: int
    crc: int

    @property
    def data_offset(self) -> int:
        return self.offset + self.header_size

    @property
    def end(self) -> int:
        return self.offset + self.header_size + self.size


def make_entry(name: str, size: int, crc: int, offset: int, *, align_end: bool = False) -> Entry:
    """Lay out an entry with its header at `offset`, so that its data (or its end) is aligned to 64 bytes."""
    header_size = _LOCAL.size + len(name.encode()) + (20 if size >= ZIP64_SIZE_FROM else 0) + 4
    header_size += -(offset + header_size + (size if align_end else 0)) % ALIGNMENT
    return Entry(name, offset, header_size, size, crc)


def header_bytes(entry: Entry) -> bytes:
    """The local header of `entry`, exactly `entry.header_size` bytes."""
    name = entry.name.encode()
    large = entry.size >= ZIP64_SIZE_FROM
    extra = struct.pack("<2H2Q", 1, 16, entry.size, entry.size) if large else b""
    padding = entry.header_size - _LOCAL.size - len(name) - len(extra) - 4
    extra += struct.pack("<2H", _PADDING_ID, padding) + bytes(padding)
    size = _FULL32 if large else entry.size
    head = (b"PK\3\4", 45 if large else 20, 0, 0, 0, _DOS_DATE, entry.crc, size, size, len(name), len(extra))
    return _LOCAL.pack(*head) + name + extra


def parse_header(data: bytes, offset: int) -> Entry:
    """Parse the local header at the start of `data`. Raises FormatError if it was not written by `header_bytes`."""
    if len(data) < _LOCAL.size:
        raise FormatError(f"no complete entry header at byte {offset}")
    magic, _version, flags, method, _time, _date, crc, packed, size, name_size, extra_size = (
        _LOCAL.unpack_from(data)
    )
    end = _LOCAL.size + name_size + extra_size
    if magic != b"PK\3\4" or flags or method or packed != size or end > min(len(data), HEADER_MAX):
        raise FormatError(f"no entry header at byte {offset}")
    name, extra = data[_LOCAL.size : _LOCAL.size + name_size], data[_LOCAL.size + name_size : end]
    if size == _FULL32:
        if len(extra) < 20 or struct.unpack_from("<2H", extra) != (1, 16):
            raise FormatError(f"no size in the entry header at byte {offset}")
        (size,) = struct.unpack_from("<Q", extra, 4)
    return Entry(_ascii_name(name), offset, end, size, crc)


def _ascii_name(raw: bytes) -> str:
    try:
        return raw.decode("ascii")
    except UnicodeDecodeError:
        raise FormatError("an entry's name is not ASCII") from None


def first_entries(contents: Mapping[str, bytes]) -> tuple[list[Entry], bytes]:
    """The initial entries of a file, and their bytes, padded to 64 bytes."""
    entries, data = [], b""
    for name, content in contents.items():
        entry = make_entry(name, len(content), zlib.crc32(content), len(data), align_end=True)
        data += header_bytes(entry) + content
        entries.append(entry)
    return entries, data


def write_directory(fd: int, entries: Iterable[Entry], offset: int) -> int:
    """Write the central directory as the end of a file, in pieces of bounded size; the offset after it. Raises OSError."""
    pending, at = bytearray(), offset
    for piece in directory_bytes(entries, offset):
        pending += piece
        if len(pending) > 1 << 20:
            at = write_at(fd, at, pending)
            pending.clear()
    return write_at(fd, at, pending)


def directory_bytes(entries: Iterable[Entry], offset: int) -> Iterator[bytes]:
    """The central directory for `entries`, to be written at `offset` as the end of the file, in pieces."""
    count = size = 0
    for entry in entries:
        name = entry.name.encode()
        large, far = entry.size >= ZIP64_SIZE_FROM, entry.offset >= ZIP64_SIZE_FROM
        wide = struct.pack("<2Q", entry.size, entry.size) if large else b""
        wide += struct.pack("<Q", entry.offset) if far else b""
        extra = struct.pack("<2H", 1, len(wide)) + wide if wide else b""
        short, place = (_FULL32 if large else entry.size), (_FULL32 if far else entry.offset)
        version = 45 if extra else 20
        head = (
            b"PK\1\2",
            version,
            version,
            0,
            0,
            0,
            _DOS_DATE,
            entry.crc,
            short,
            short,
            len(name),
            len(extra),
        )
        piece = _CENTRAL.pack(*head, 0, 0, 0, 0, place) + name + extra
        count += 1
        size += len(piece)
        yield piece
    if count >= ZIP64_COUNT_FROM or offset >= ZIP64_SIZE_FROM or size >= ZIP64_SIZE_FROM:
        yield _END64.pack(b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, offset)
        yield _LOCATOR64.pack(b"PK\6\7", 0, offset + size, 1)
    short_count = _FULL16 if count >= ZIP64_COUNT_FROM else count
    short_size = _FULL32 if size >= ZIP64_SIZE_FROM else size
    short_offset = _FULL32 if offset >= ZIP64_SIZE_FROM else offset
    yield _END.pack(b"PK\5\6", 0, 0, short_count, short_count, short_size, short_offset, 0)


def read_directory(fd: int, size: int) -> list[Entry]:
    """The entries of the finished file of `size` bytes, in the order of their offsets.

    Reads what torch.save writes as well. Entries that overlap, are compressed or reach outside the file are refused: nothing
    that is built from them can be larger than the file. Raises FormatError, OSError.
    """
    # zipfile searches the last 64 KB for the end record. In a growing file the text of a trajectory may look like one, so
    # require it at the very end.
    end = read_at(fd, size - _END.size, _END.size) if size >= _END.size else b""
    if not (end.startswith(b"PK\5\6") and end.endswith(b"\0\0")):
        raise FormatError("it has no central directory at its end")
    _check_directory_size(fd, size, end)
    infos, directory = retry(lambda: _list_archive(fd), errnos=FAILING)
    entries = sorted((_checked_entry(fd, info) for info in infos), key=lambda entry: entry.offset)
    last = 0
    for entry in entries:
        if entry.offset < last or entry.end > directory:
            raise FormatError("its entries overlap")
        last = entry.end
    return entries


def _list_archive(fd: int) -> tuple[list[zipfile.ZipInfo], int]:
    """The entries of the directory, and where it begins. Raises FormatError, OSError."""
    try:
        with os.fdopen(os.dup(fd), "rb") as stream, zipfile.ZipFile(stream) as archive:
            return archive.infolist(), archive.start_dir
    except zipfile.BadZipFile as error:
        # zipfile turns read errors into bad-file errors; undo that. Only EINVAL really means a bad file: a seek before its start.
        if isinstance(error.__context__, OSError) and error.__context__.errno != errno.EINVAL:
            raise error.__context__ from None
        raise FormatError(f"its directory is damaged: {error}") from None
    except (NotImplementedError, ValueError, OverflowError, LookupError, struct.error) as error:
        raise FormatError(f"its directory is damaged: {error}") from None


def _check_directory_size(fd: int, size: int, end: bytes) -> None:
    """Check the directory's size, because zipfile reads it in one piece. Raises FormatError, OSError."""
    (length,) = struct.unpack_from("<I", end, 12)
    at = size - _END.size - _LOCATOR64.size
    if at >= 0 and (locator := read_at(fd, at, _LOCATOR64.size)).startswith(b"PK\6\7"):
        (place,) = struct.unpack_from("<Q", locator, 8)
        (length,) = struct.unpack_from("<Q", read_at(fd, place, _END64.size), 40)
    if length > PIECE_BYTES:
        raise FormatError(f"a directory of {length} bytes, and {PIECE_BYTES} are allowed")


def _checked_entry(fd: int, info: zipfile.ZipInfo) -> Entry:
    if (
        info.compress_type != zipfile.ZIP_STORED
        or info.flag_bits & 0x41
        or info.compress_size != info.file_size
    ):
        raise FormatError("an entry is compressed or encrypted")
    # The length of the local header is only stored in the header itself.
    header = read_at(fd, info.header_offset, _LOCAL.size)
    if header[:4] != b"PK\3\4":
        raise FormatError(f"no entry header at byte {info.header_offset}")
    header_size = _LOCAL.size + sum(struct.unpack_from("<2H", header, 26))
    name = _ascii_name(info.orig_filename.encode())
    return Entry(name, info.header_offset, header_size, info.file_size, info.CRC)


def pread(fd: int, count: int, offset: int) -> bytes:
    """Like `os.pread`, with retries on transient filesystem errors. Raises OSError."""
    try:
        return os.pread(fd, count, offset)
    except OSError:
        return retry(lambda: os.pread(fd, count, offset), errnos=FAILING)


def read_at(fd: int, offset: int, count: int) -> bytes:
    """Exactly `count` bytes from `offset`. Raises FormatError if the file ends earlier, OSError."""
    if offset < 0 or offset > 2**62:
        raise FormatError(f"it points to byte {offset}")
    if count > PIECE_BYTES:
        raise FormatError(f"a piece of {count} bytes, and {PIECE_BYTES} are allowed")
    data = pread(fd, count, offset)
    if len(data) == count:
        return data
    pieces = [data]
    missing = count - len(data)
    while missing and pieces[-1]:
        pieces.append(pread(fd, missing, offset + count - missing))
        missing -= len(pieces[-1])
    if missing:
        raise FormatError(f"it ends before byte {offset + count}")
    return b"".join(pieces)


def write_at(fd: int, offset: int, data: bytes | bytearray | memoryview) -> int:
    """Write all of `data` at `offset`; returns the offset after it. Raises OSError."""
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written
    return offset


def crc32_combine(first: int, second: int, second_size: int) -> int:
    """The CRC-32 of two byte strings joined, from the CRC-32 of each and the size of the second (as zlib's)."""
    position = 0
    while second_size:
        if digit := second_size & 0xFF:
            first = _multiply(_power(digit, position), first)
        second_size >>= 8
        position += 1
    return first ^ second


@functools.cache
def _power(digit: int, position: int) -> int:
    """x^(8 * digit * 256^position) modulo the CRC-32 polynomial, coefficients reflected."""
    result, square = 1 << 31, _SQUARES[(3 + 8 * position) & 31]
    while digit:
        if digit & 1:
            result = _multiply(square, result)
        square = _multiply(square, square)
        digit >>= 1
    return result


def _multiply(a: int, b: int) -> int:
    """a * b modulo the CRC-32 polynomial, coefficients reflected (bit 31 is x^0); four bits of `a` at a time."""
    b1 = (b >> 1) ^ _REDUCED[(b & 1) << 3]
    b2 = (b >> 2) ^ _REDUCED[(b & 3) << 2]
    b3 = (b >> 3) ^ _REDUCED[(b & 7) << 1]
    low, high = (0, b3, b2, b2 ^ b3), (0, b1, b, b ^ b1)
    product = 0
    for shift in range(0, 32, 4):
        four = a >> shift
        product = (product >> 4) ^ _REDUCED[product & 15] ^ low[four & 3] ^ high[(four >> 2) & 3]
    return product


def _reduced(bits: int) -> int:
    for _ in range(4):
        bits = (bits >> 1) ^ (0xEDB88320 if bits & 1 else 0)
    return bits


# The bits that a shift by x^4 pushes out, folded back.
_REDUCED = [_reduced(bits) for bits in range(16)]
# x^(2^n); it repeats after 32.
_SQUARES = [1 << 30]
for _ in range(31):
    _SQUARES.append(_multiply(_SQUARES[-1], _SQUARES[-1]))
