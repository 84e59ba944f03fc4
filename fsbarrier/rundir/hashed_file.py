"""A file that is hashed while it is written, so that it need not be read again for the manifest."""

from __future__ import annotations

import hashlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from fsbarrier.store import files, reading


@dataclass(frozen=True, slots=True)
class FileDigest:
    """A file's length and the SHA-256 of its content, in hexadecimal."""

    size: int
    sha256: str


class HashedFile:
    """`with HashedFile(path) as file: file.write(...)`; afterwards the content is flushed, and `file.digest` is known."""

    def __init__(self, path: Path) -> None:
        """Create the file. Raises OSError, also if `path` exists."""
        self.path = path
        self._fd = files.open_new(path)
        self._sha256, self._size = hashlib.sha256(), 0

    def write(self, data: bytes | memoryview) -> None:
        """Append data, and add it to the digest. Raises OSError."""
        view = memoryview(data).cast("B")
        self._sha256.update(view)
        self._size += len(view)
        files.write_all(self._fd, view)

    @property
    def digest(self) -> FileDigest:
        return FileDigest(self._size, self._sha256.hexdigest())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                os.fsync(self._fd)
        finally:
            os.close(self._fd)


def write_hashed(path: Path, data: bytes) -> FileDigest:
    """Write a new file; returns its digest. Raises OSError."""
    with HashedFile(path) as file:
        file.write(data)
    return file.digest


def copy_hashed(source: Path, target: Path, root: Path | None = None) -> FileDigest:
    """Copy a file to a new name; returns its digest. `root`: no link is followed below it. Raises OSError."""
    fd = reading.open_plain(source, links=True) if root is None else reading.open_below(root, source)
    with os.fdopen(fd, "rb") as stream, HashedFile(target) as copy:
        shutil.copyfileobj(stream, copy, files.READ_BYTES)
    return copy.digest


def digest_of(path: Path) -> FileDigest:
    """Flush and read a file that another program has written. Raises OSError."""
    with reading.open_stream(path) as stream:
        os.fsync(stream.fileno())
        return FileDigest(os.fstat(stream.fileno()).st_size, files.sha256_open(stream.fileno()))
