"""The shared directory as the protocol sees it: a few verbs for records and their names, one implementation for the real thing.

The simulator has a twin with the same verbs (fsbarrier/sim/), which need not make a record's bytes. Nothing here looks up a name
that does not exist yet (invariant I11): `names` lists a directory that this node made itself, `read` opens what a listing named.
"""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import Protocol

from fsbarrier import files
from fsbarrier.protocol.codec import CorruptRecord, Fault, decode, encode
from fsbarrier.protocol.facts import R, Record
from fsbarrier.reading import NotPlain

#: errors of one record: its writer is replacing the file, or is another user; every other error is the mount's, and is raised
OF_ONE_RECORD = frozenset({errno.ENOENT, errno.ESTALE, errno.EACCES, errno.EPERM})


class Store(Protocol):
    """What the core needs of a shared directory. Every verb may raise OSError."""

    def make_dir(self, path: Path, *, durable: bool = False) -> None:
        """Make a directory; one that exists is fine. `durable`: it also survives a power loss.

        FileNotFoundError: another node made it, and this mount does not show it yet.
        """

    def names(self, directory: Path) -> list[str]:
        """The names in a directory, freshly listed, without temporary ones; empty if it is not there.

        A failure raises and never gives an empty list: a node that resumes a run would take "cannot be listed" for "nothing there".
        """

    def read(self, path: Path, cls: type[R]) -> R | None:
        """The record in a file, freshly opened; None while there is no whole one of this kind under this name.

        None never means that there is no record: the name was listed, so it is there. `fault` says why it cannot be read.
        """

    def fault(self, path: Path, cls: type[R]) -> Fault:
        """Why a record cannot be read."""

    def put(self, path: Path, record: Record, *, durable: bool = False) -> None:
        """Create or replace a file of one's own, as a whole. `durable`: a power loss leaves it whole too."""

    def mark(self, path: Path, record: Record) -> None:
        """Create a file of one's own whose name tells all. Nobody reads it, so that it need not be whole at once: this is one
        operation, `put` is two."""

    def create(self, path: Path, record: Record) -> bool:
        """Create a file exclusively and durably; False where somebody else's is there."""

    def rename(self, path: Path, new: Path) -> bool:
        """Give a file of one's own another name in the same directory; False where it is not there."""

    def remove(self, path: Path) -> None:
        """Remove a file of one's own; one that is gone is fine."""

    def remove_dir(self, path: Path) -> None:
        """Remove a directory and what lies in it; one that is gone is fine."""

    def is_there_now(self, directory: Path) -> bool:
        """Whether a directory is there, as the server says, and not as this client remembers it."""


class PosixStore:
    """The store on a mounted filesystem."""

    def make_dir(self, path: Path, *, durable: bool = False) -> None:
        files.try_to_make_dirs(path)
        if durable:
            files.fsync_dir(path.parent)

    def names(self, directory: Path) -> list[str]:
        try:
            # A fresh opendir is what makes an NFS client look again.
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
            return decode(files.read_created(path), cls)
        except NotPlain as error:
            raise CorruptRecord(Fault(str(error.strerror))) from None

    def fault(self, path: Path, cls: type[R]) -> Fault:
        try:
            self._read(path, cls)
        except CorruptRecord as error:
            return error.fault
        except PermissionError as error:
            return Fault(
                f"{error.strerror}: another user wrote it; start all nodes as one user, or with --shared-group"
            )
        except OSError as error:
            return Fault(f"{error.strerror or error}, although it is listed")
        return Fault("it does not fit its name, or this run's program")

    def put(self, path: Path, record: Record, *, durable: bool = False) -> None:
        files.write_atomic(path, encode(record), durable=durable)

    def mark(self, path: Path, record: Record) -> None:
        files.write_in_place(path, encode(record))

    def create(self, path: Path, record: Record) -> bool:
        return files.create_exclusive(path, encode(record), never_torn=True)

    def rename(self, path: Path, new: Path) -> bool:
        try:
            os.rename(path, new)
        except FileNotFoundError:
            return False
        return True

    def remove(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
        except OSError:
            # Without hard links it may be a folder (`files.create_exclusive`).
            if not path.is_dir():
                raise
            files.remove_tree(path)

    def remove_dir(self, path: Path) -> None:
        try:
            os.rmdir(path)
        except FileNotFoundError:
            return
        except OSError:
            # The folder is not empty: a process that was killed left a temporary file in it.
            files.remove_tree(path)

    def is_there_now(self, directory: Path) -> bool:
        # Only the server can create a file, so unlike a look this is never answered from a cache.
        probe = files.temporary_beside(directory / "is-there")
        try:
            os.close(files.open_new(probe))
        except FileNotFoundError:
            return False
        with contextlib.suppress(OSError):
            os.unlink(probe)
        return True


class LenientStore(PosixStore):
    """For views: it skips what cannot be listed or read now, so that no decision may rest on what it shows."""

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
