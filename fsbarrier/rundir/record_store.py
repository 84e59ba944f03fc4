"""The protocol's interface to the shared directory, and its implementation on a mounted filesystem.

The simulator implements the same interface. Nobody looks up a name that does not exist yet (invariant I11), since clients
cache absences: `names` lists directories that this node has made itself, and `read` opens listed names.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Protocol

from fsbarrier.protocol.codec import CorruptRecord, decode, encode
from fsbarrier.protocol.facts import R, Record
from fsbarrier.store import files, reading

#: errors that concern one record, because it is being replaced or belongs to another user; other errors concern the mount and are raised
OF_ONE_RECORD = frozenset({errno.ENOENT, errno.ESTALE, errno.EACCES, errno.EPERM})


class Store(Protocol):
    """The operations that the core needs. Each may raise OSError."""

    def make_dir(self, path: Path) -> None:
        """Make a directory, if it is not there.

        FileNotFoundError: another node has made it, and this mount does not show it yet.
        """

    def names(self, directory: Path) -> list[str]:
        """The names in a directory, freshly listed, without temporary ones; empty if it is not there.

        A failure raises and never returns an empty list: a node that resumes a run would mistake it for an empty directory.
        """

    def read(self, path: Path, cls: type[R]) -> R | None:
        """The record in a file, freshly opened; None while the file is not a whole record of this kind.

        None never means that the record does not exist: its name was listed.
        """

    def must_read(self, path: Path, cls: type[R]) -> R:
        """Read a record that is known to exist. Raises UnreadableRecord while it cannot be read, since treating it as absent would lose
        it."""

    def put(self, path: Path, record: Record, *, durable: bool = False) -> None:
        """Create or replace a file of this node atomically. `durable`: it survives a power failure."""

    def mark(self, path: Path, record: Record) -> None:
        """Create a file of this node whose name alone matters. Nobody reads it, so it need not be atomic: this takes one operation, and
        `put` takes two."""

    def create(self, path: Path, record: Record) -> bool:
        """Create a file exclusively and durably; False if it exists already."""

    def rename(self, path: Path, new: Path) -> bool:
        """Rename a file of this node in its directory; False if it is not there."""

    def remove(self, path: Path) -> None:
        """Remove a file of this node, if it is there."""

    def remove_dir(self, path: Path) -> None:
        """Remove a directory and its content, if it is there."""


class UnreadableRecord(OSError):
    """A record cannot be read. Its error number is EIO, so callers retry for a while and then give up, as on a failing mount."""

    def __init__(self, path: Path, why: str) -> None:
        advice = "if other nodes can read it, look at this host's mount; else restore the file, or begin another run with this one's "
        advice += "policy (init_from=THIS_LOG_PATH)"
        super().__init__(errno.EIO, f"this record cannot be read: {why}; {advice}", str(path))


class PosixStore:
    """The store on a mounted filesystem."""

    def make_dir(self, path: Path) -> None:
        files.try_to_make_dirs(path)

    def names(self, directory: Path) -> list[str]:
        try:
            # A fresh opendir makes an NFS client revalidate its cache.
            return [name for name in os.listdir(directory) if name[0] != "."]
        except FileNotFoundError:
            return []

    def read(self, path: Path, cls: type[R]) -> R | None:
        try:
            return self.must_read(path, cls)
        except UnreadableRecord:
            return None

    def must_read(self, path: Path, cls: type[R]) -> R:
        try:
            return decode(reading.read_bytes(path, reading.RECORD_BYTES), cls)
        except CorruptRecord as error:
            why = str(error)
        except (reading.NotPlain, IsADirectoryError) as error:
            why = str(error.strerror)
        except PermissionError as error:
            why = f"{error.strerror}: another user wrote it; start all nodes as one user, or with --shared-group"
        except OSError as error:
            if error.errno not in OF_ONE_RECORD:
                raise
            why = f"{error.strerror or error}, although it is listed"
        raise UnreadableRecord(path, why)

    def put(self, path: Path, record: Record, *, durable: bool = False) -> None:
        files.write_atomic(path, encode(record), durable=durable)

    def mark(self, path: Path, record: Record) -> None:
        files.write_in_place(path, encode(record))

    def create(self, path: Path, record: Record) -> bool:
        return files.create_exclusive(path, encode(record))

    def rename(self, path: Path, new: Path) -> bool:
        try:
            os.rename(path, new)
        except FileNotFoundError:
            return False
        return True

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def remove_dir(self, path: Path) -> None:
        try:
            os.rmdir(path)
        except FileNotFoundError:
            return
        except OSError:
            # The folder is not empty: a killed process has left a temporary file.
            files.remove(path)


class LenientStore(PosixStore):
    """For views: it skips what cannot be listed or read, so nothing may be decided from it."""

    def names(self, directory: Path) -> list[str]:
        try:
            return super().names(directory)
        except OSError:
            return []

    def read(self, path: Path, cls: type[R]) -> R | None:
        try:
            return super().read(path, cls)
        except OSError:
            return None
