"""The protocol's interface to the shared directory, and its implementation on a mounted filesystem.

The simulator implements the same interface (sim/store.py). Nobody looks up a name that does not exist yet (invariant I11), since clients
cache absences: `names` lists directories that this node has made itself, and `read` opens listed names.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Protocol

from fsbarrier.protocol.codec import CorruptRecord, decode, encode
from fsbarrier.protocol.facts import R, Record
from fsbarrier.store import files, owned, reading

#: errors of one record, whose writer is replacing it, or is another user; all other errors are the mount's, and are raised
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

        None never means that the record does not exist: its name was listed. `fault` tells why it is unreadable.
        """

    def fault(self, path: Path, cls: type[R]) -> str:
        """Why a record is unreadable."""

    def put(self, path: Path, record: Record, *, durable: bool = False) -> None:
        """Create or replace a file of this node atomically. `durable`: also with respect to power failures."""

    def mark(self, path: Path, record: Record) -> None:
        """Create a file of this node of which only the name matters. Nobody reads it, so it need not be atomic: this is one operation,
        and `put` is two."""

    def create(self, path: Path, record: Record) -> bool:
        """Create a file exclusively and durably; False if it exists already."""

    def rename(self, path: Path, new: Path) -> bool:
        """Rename a file of this node in its directory; False if it is not there."""

    def remove(self, path: Path) -> None:
        """Remove a file of this node, if it is there."""

    def remove_dir(self, path: Path) -> None:
        """Remove a directory and its content, if it is there."""


def must_read(store: Store, path: Path, cls: type[R]) -> R:
    """A record that is known to be there. Raises OSError while it cannot be read: treating it as absent would lose it."""
    record = store.read(path, cls)
    if record is None:
        raise unreadable(store, path, cls)
    return record


def unreadable(store: Store, path: Path, cls: type[R]) -> OSError:
    """The error of a record that cannot be read: as of a failing mount (EIO), which is tried again and then given up."""
    why = f"this record cannot be read: {store.fault(path, cls)}; if other nodes can read it, look at this host's mount; "
    why += "else restore the file, or begin another run with this one's policy (init_from=THIS_LOG_PATH)"
    return OSError(errno.EIO, why, str(path))


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
            return self._read(path, cls)
        except CorruptRecord:
            return None
        except OSError as error:
            if error.errno in OF_ONE_RECORD:
                return None
            raise

    def _read(self, path: Path, cls: type[R]) -> R:
        try:
            return decode(reading.read_bytes(path, reading.RECORD_BYTES), cls)
        except (reading.NotPlain, IsADirectoryError) as error:
            raise CorruptRecord(str(error.strerror)) from None

    def fault(self, path: Path, cls: type[R]) -> str:
        try:
            self._read(path, cls)
        except CorruptRecord as error:
            return str(error)
        except PermissionError as error:
            return f"{error.strerror}: another user wrote it; start all nodes as one user, or with --shared-group"
        except OSError as error:
            return f"{error.strerror or error}, although it is listed"
        return "it does not fit its name, or this run's program"

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
            owned.remove(path)


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
