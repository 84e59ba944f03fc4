"""Copies pieces of one file into another with large reads, verifying each piece's CRC-32; multi-threaded, with bounded memory."""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from fsbarrier.data.merge_plan import GroupPlace
from fsbarrier.data.torch_pickle import FormatError
from fsbarrier.data.torch_zip import read_at, write_at
from fsbarrier.data.trajectory_scan import opened
from fsbarrier.retry import FAILING, retry

#: Buffer size: large enough for a disk, small enough for a processor cache.
BUFFER = 512 << 10
#: bytes of work per thread
BATCH = 8 << 20
#: gaps up to this size are read instead of skipped
GAP = 4096
#: buffers per write; Linux allows 1024
IOV_MAX = 512


class Piece(NamedTuple):
    """`size` bytes at `source`, to be written at `target` after `header`; they belong to `group`."""

    source: int
    size: int
    crc: int
    target: int
    header: bytes
    group: GroupPlace


def workers() -> int:
    """The number of copy threads."""
    return min(4, max(2, len(os.sched_getaffinity(0))))


def copy_pieces(
    path: Path, target_fd: int, pieces: list[Piece], bad: set[GroupPlace]
) -> Iterator[list[Piece]]:
    """Copy `pieces` of the file `path` into `target_fd`, yielding the finished ones; adds damaged groups to `bad`.

    After the first damage it only verifies the rest. Raises StoreError, FormatError, OSError.
    """
    with opened(path) as fd:
        local = threading.local()

        def work(batch: list[Piece]) -> list[Piece]:
            if not hasattr(local, "buffer"):
                local.buffer = memoryview(bytearray(BUFFER))
            for run in _runs(batch):
                _copy_run(fd, target_fd, run, local.buffer, bad)
            return batch

        with ThreadPoolExecutor(workers(), thread_name_prefix="merge") as pool:
            waiting: list[Future[list[Piece]]] = []
            try:
                for batch in _batches(pieces):
                    waiting.append(pool.submit(work, batch))
                    if len(waiting) > 4 * workers():
                        yield waiting.pop(0).result()
                while waiting:
                    yield waiting.pop(0).result()
            finally:
                for future in waiting:
                    future.cancel()


def _batches(pieces: list[Piece]) -> Iterator[list[Piece]]:
    """The pieces in file order, in batches of about BATCH bytes. Each batch is the work of one thread."""
    batch: list[Piece] = []
    size = 0
    for piece in sorted(pieces):
        batch.append(piece)
        size += piece.size
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _runs(batch: list[Piece]) -> Iterator[list[Piece]]:
    """Groups of pieces to fetch with one read."""
    run: list[Piece] = []
    start = end = 0
    for piece in batch:
        if run and (piece.source > end + GAP or max(end, piece.source + piece.size) > start + BUFFER):
            yield run
            run = []
        if not run:
            start = piece.source
        run.append(piece)
        end = piece.source + piece.size
    if run:
        yield run


def _copy_run(fd: int, target_fd: int, run: list[Piece], buffer: memoryview, bad: set[GroupPlace]) -> None:
    start, end = run[0].source, run[-1].source + run[-1].size
    if end - start > len(buffer):
        _copy_large(fd, target_fd, run[0], buffer, bad)
        return
    view = buffer[: end - start]
    if not _fill(fd, start, view):
        bad.update(piece.group for piece in run)
        return
    vector: list[bytes | memoryview] = []
    first = after = 0
    for piece in run:
        data = view[piece.source - start : piece.source - start + piece.size]
        if zlib.crc32(data) != piece.crc:
            bad.add(piece.group)
        if bad:
            continue
        if piece.target != after or len(vector) >= IOV_MAX:
            _write_vector(target_fd, first, vector)
            vector, first = [], piece.target
        vector += (piece.header, data)
        after = piece.target + len(piece.header) + piece.size
    if not bad:
        _write_vector(target_fd, first, vector)


def _copy_large(fd: int, target_fd: int, piece: Piece, buffer: memoryview, bad: set[GroupPlace]) -> None:
    """Copy a piece that is larger than the buffer, in chunks."""
    if not bad:
        write_at(target_fd, piece.target, piece.header)
    target, crc = piece.target + len(piece.header), 0
    for offset in range(0, piece.size, len(buffer)):
        view = buffer[: min(len(buffer), piece.size - offset)]
        if not _fill(fd, piece.source + offset, view):
            bad.add(piece.group)
            return
        crc = zlib.crc32(view, crc)
        if not bad:
            write_at(target_fd, target + offset, view)
    if crc != piece.crc:
        bad.add(piece.group)


def _fill(fd: int, offset: int, view: memoryview) -> bool:
    """Fill `view` completely; False if the file ends earlier."""
    got = retry(lambda: os.preadv(fd, [view], offset), errnos=FAILING)
    if got == len(view):
        return True
    try:
        view[got:] = read_at(fd, offset + got, len(view) - got)
    except FormatError:
        return False
    return True


def _write_vector(fd: int, offset: int, vector: list[bytes | memoryview]) -> None:
    if not vector:
        return
    written = os.pwritev(fd, vector, offset)
    # Handle a short write.
    for data in vector:
        if written < len(data):
            write_at(fd, offset + written, memoryview(data)[written:])
            offset, written = offset + len(data), 0
        else:
            offset, written = offset + len(data), written - len(data)
