"""What differs between two files of weights of one layout, as a small file; standard library and numpy.

A file of weights is taken as numbers of 16 bits (little endian), its header included. A number's *rank* is its pattern as a signed integer,
with the lower 15 bits inverted if it is negative: in bfloat16 and float16, neighbouring ranks are neighbouring numbers, and the difference
of two ranks, a *step*, counts units in the last place. Steps are added in 16 bits, with overflow, so they can be undone exactly.

    fsbarrier delta 1\\n
    for every 4,194,304 numbers of the file: the length of what follows (4 bytes; 0: nothing differs), and compressed by zlib
        how many numbers differ (4 bytes), how many bytes of gaps there are (4 bytes)
        gaps    1 byte each: so many equal numbers before the next different one; 255: so many equal ones, and the gap continues
        steps   1 signed byte for each different number; -128: the step is in the list that follows
        steps   2 bytes each

All integers are little endian.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from fsbarrier.errors import ProgramFailed
from fsbarrier.rundir.hashed_file import FileDigest, HashedFile
from fsbarrier.store import reading
from fsbarrier.training.merge_adapters import import_numpy

if TYPE_CHECKING:
    from fsbarrier.training.merge_adapters import Array

MAGIC = b"fsbarrier delta 1\n"
#: how many numbers are compared at once
BLOCK = 1 << 22
GAP, WIDE = 255, -128
#: the least compression, which is the fastest: what is left to compress is nearly random
LEVEL = 1


@dataclass(frozen=True, slots=True)
class Source:
    """A file to begin with, and the deltas to undo and then to apply."""

    path: Path
    undo: Path | None = None
    apply: Path | None = None


@dataclass(frozen=True, slots=True)
class Encoded:
    """A delta that was written, the file that it makes, and the SHA-256 of the file that it changes."""

    delta: FileDigest
    made: FileDigest
    anchor: str


def rebuild(source: Source, target: Path, between_blocks: Callable[[], None]) -> tuple[FileDigest, str]:
    """Write the file that a source describes; returns its digest, and the SHA-256 of the file at `source.path`.

    Raises ProgramFailed if a delta is malformed, OSError.
    """
    begun = hashlib.sha256()
    with HashedFile(target) as out:
        for data, ranks in _changed(source, between_blocks):
            begun.update(data)
            out.write(_inverted(ranks).data)
    return out.digest, begun.hexdigest()


def encode(before: Source, after: Path, target: Path, most: int) -> Encoded | None:
    """Write the delta from the file that `before` describes to the file `after`; None if that is not worth it: it would have more than
    `most` bytes, or the files have different sizes. Raises ProgramFailed if a delta is malformed, OSError."""
    size = after.stat().st_size
    if before.path.stat().st_size != size or size % 2:
        return None
    anchor, made = hashlib.sha256(), hashlib.sha256()
    with reading.open_stream(after) as stream, HashedFile(target) as out:
        out.write(MAGIC)
        for _, ranks in _changed(before, lambda: None):
            anchor.update(_inverted(ranks).data)
            data = stream.read(2 * len(ranks))
            made.update(data)
            block = _encoded(_ranks(data) - ranks)
            if out.digest.size + len(block) > most:
                return None
            out.write(block)
    return Encoded(out.digest, FileDigest(size, made.hexdigest()), anchor.hexdigest())


def _changed(source: Source, between_blocks: Callable[[], None]) -> Iterator[tuple[bytes, Array]]:
    """The blocks of a file, and their ranks after its deltas were undone and applied."""
    with ExitStack() as stack:
        deltas = [
            (sign, _blocks(stack.enter_context(reading.open_stream(path)), path))
            for sign, path in ((-1, source.undo), (1, source.apply))
            if path is not None
        ]
        stream = stack.enter_context(reading.open_stream(source.path, links=True))
        while data := stream.read(2 * BLOCK):
            between_blocks()
            if len(data) % 2:
                raise ProgramFailed(
                    f"{source.path} has an odd number of bytes, and cannot be changed by a delta"
                )
            ranks = _ranks(data)
            for sign, blocks in deltas:
                positions, steps = next(blocks)
                if len(positions) and int(positions[-1]) >= len(ranks):
                    raise ProgramFailed(f"{source.path} is shorter than the file that a delta was made for")
                ranks[positions] += steps if sign > 0 else -steps
            yield data, ranks


def _blocks(stream: BinaryIO, path: Path) -> Iterator[tuple[Array, Array]]:
    """The positions and the steps of each block of a delta. Raises ProgramFailed if the file is not one, or ends too early."""
    np = import_numpy()
    none = np.zeros(0, "<i8"), np.zeros(0, "<i2")
    if stream.read(len(MAGIC)) != MAGIC:
        raise ProgramFailed(f"{path} is no delta of weights: the file is damaged")
    while True:
        try:
            (length,) = struct.unpack("<I", stream.read(4))
            yield _decoded(stream.read(length)) if length else none
        except (struct.error, zlib.error, ValueError) as error:
            raise ProgramFailed(f"{path} is no delta of weights: {error}; the file is damaged") from None


def _encoded(steps: Array) -> bytes:
    """A block with the steps of all its numbers."""
    np = import_numpy()
    positions = np.flatnonzero(steps)
    if not len(positions):
        return struct.pack("<I", 0)
    equal = np.diff(positions, prepend=-1) - 1
    ends = np.cumsum(equal // GAP + 1)
    gaps = np.full(int(ends[-1]), GAP, "u1")
    gaps[ends - 1] = equal % GAP
    different = steps[positions]
    is_wide = (different <= WIDE) | (different > 127)
    narrow = np.where(is_wide, WIDE, different).astype("i1")
    parts = (struct.pack("<II", len(positions), len(gaps)), gaps, narrow, different[is_wide].astype("<i2"))
    data = zlib.compress(b"".join(bytes(part) for part in parts), LEVEL)
    return struct.pack("<I", len(data)) + data


def _decoded(data: bytes) -> tuple[Array, Array]:
    """The positions and the steps in an encoded block. Raises zlib.error, struct.error, ValueError."""
    np = import_numpy()
    # Nothing longer is ever written, so a damaged file cannot fill the memory.
    plain = zlib.decompressobj().decompress(data, 8 + 4 * BLOCK)
    count, gap_bytes = struct.unpack_from("<II", plain)
    gaps = np.frombuffer(plain, "u1", gap_bytes, 8)
    steps = np.frombuffer(plain, "i1", count, 8 + gap_bytes).astype("<i2")
    is_wide = steps == WIDE
    steps[is_wide] = np.frombuffer(plain, "<i2", int(is_wide.sum()), 8 + gap_bytes + count)
    ends = np.flatnonzero(gaps != GAP)
    if len(ends) != count:
        raise ValueError(f"{len(ends)} gaps and {count} steps")
    return np.cumsum(np.where(gaps == GAP, GAP, gaps.astype("<i8") + 1))[ends] - 1, steps


def _ranks(data: bytes) -> Array:
    return _inverted(import_numpy().frombuffer(data, "<i2"))


def _inverted(numbers: Array) -> Array:
    """Turn patterns into ranks, or ranks into patterns."""
    inverted: Array = numbers ^ ((numbers >> 15) & 0x7FFF)
    return inverted
