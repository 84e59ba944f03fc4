"""Each host's mount of the simulated Disk: a MountClient with that host's caches and troubles.

It has the methods of rundir.record_store.Store and behaves like PosixStore on a bad mount: listings and contents may be stale, absences
may be cached, and an operation may succeed and raise an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from fsbarrier.protocol.codec import CorruptRecord, decode
from fsbarrier.protocol.facts import R, Record
from fsbarrier.rundir.record_store import OF_ONE_RECORD, UnreadableRecord
from sim.disk import Content, Directory, Disk, File, SimPath, as_record

# the result of a garbled read, which races with a replacement
MIXED = b"half of a record, and another one"


@dataclass(frozen=True, slots=True)
class Habits:
    """How stale a client's answers may be, in seconds.

    `listing_frees`: a fresh listing drops the cached absences (as on NFS).
    """

    listing_s: float = 0.0
    content_s: float = 0.0
    absence_s: float = 0.0
    listing_frees: bool = True

    @property
    def oldest_s(self) -> float:
        return self.listing_s + self.content_s


#: what needs room: names can still be changed and removed
MAKING = frozenset({"make_dir", "put", "mark", "create", "append"})
WRITING = MAKING | {"rename", "remove", "remove_dir"}


@dataclass(frozen=True, slots=True)
class Outage:
    """Operations of a host that fail with `code`: `verbs` (empty: all), at paths that contain `inside`."""

    code: int
    verbs: frozenset[str] = frozenset()
    inside: str = ""

    def strikes(self, verb: str, path: str) -> bool:
        # To wait for the end of cancelled work is no operation of the mount.
        return verb != "cancel" and (not self.verbs or verb in self.verbs) and self.inside in path


#: Called after an operation that was carried out: it raises the error by which that one seems to have failed.
After = Callable[[], None]
#: (verb, path) -> what to call after the operation. It may also raise, or block.
Trouble = Callable[[str, str], After]


def nothing() -> None:
    """The operation has not failed."""


#: for how long a file cannot be read whose handle is stale
HIDES_S = (0.3, 1.0, 3.0, 8.0, 8.0, 40.0)


class ReadFaults:
    """Reads that go wrong. A garbled read races with a replacement, so the host's next read of that file is whole again. A file whose
    handle is stale cannot be read on one host for a while, even if this host has read it before.
    """

    def __init__(self, rng: Random, garbled: float, handles: float) -> None:
        self._rng, self._garbled, self._handles = rng, garbled, handles
        #: what has struck
        self.struck: set[str] = set()
        self._until: dict[tuple[str, str], float] = {}
        #: how long a file may stay unreadable
        self.longest_s = HIDES_S[-1] if handles else 0.0

    def of(self, host: str, path: str, now: float) -> str:
        """What happens to this read: garbled, handles or "" (nothing)."""
        until = self._until.pop((host, path), None)
        if until is not None and until > now:
            self._until[host, path] = until
            return "handles"
        how, dice = "", self._rng.random()
        if until is None and dice < self._garbled:
            how, self._until[host, path] = "garbled", 0.0
        elif self._garbled <= dice < self._garbled + self._handles:
            how, self._until[host, path] = "handles", now + self._rng.choice(HIDES_S)
        if how:
            self.struck.add(how)
        return how

    def end(self) -> None:
        self._garbled = self._handles = 0.0
        self._until.clear()


class MountClient:
    """One host's mount of the Disk. Like a kernel's caches, it outlives the host's processes."""

    def __init__(self, disk: Disk, host: str, habits: Habits, reads: ReadFaults | None = None) -> None:
        self.disk, self.host, self.habits = disk, host, habits
        # decides the outcome of each operation
        self.trouble: Trouble = lambda verb, path: nothing
        # what fails; None: nothing
        self.outage: Outage | None = None
        # The longest time that an operation takes which changes something, in seconds.
        self.slow_s = 0.0
        # the directory whose files this host cannot read; "": none
        self.cannot_read = ""
        # when a record that could not be read held a node up
        self.held_up: list[float] = []
        self._reads = reads
        # reads of names that did not exist (invariant I11)
        self.misses: dict[str, int] = {}
        self._caching = habits != Habits() or bool(disk.coarse_s)
        # names, modification time, until when they are cached
        self._lists: dict[Directory, tuple[list[str], float, float]] = {}
        self._contents: dict[str, tuple[Content, float]] = {}
        self._absent: dict[str, float] = {}

    # --- the verbs of Store ---

    def make_dir(self, path: SimPath) -> None:
        after = self.trouble("make_dir", path)
        if path not in self.disk.dirs:
            directory = self.disk.make_dir(path)
            if self._caching:
                self._absent.pop(path, None)
                while directory := directory and directory.parent:
                    self._lists.pop(directory, None)
        after()

    def names(self, directory: SimPath) -> list[str]:
        self.trouble("names", directory)()
        folder = self.disk.dirs.get(directory)
        if folder is None:
            return self._names_of_missing(directory)
        now = self.disk.now
        if not self._caching:
            folder.seen[self.host] = now
            return folder.listing if folder.listing is not None else self.disk.listing(folder)
        cached = self._lists.get(folder)
        if cached is not None:
            if now < cached[2]:
                return cached[0]
            # The directory looks unchanged, perhaps only because its modification time is coarse.
            if cached[1] == folder.stamp:
                folder.seen[self.host] = now
                self._lists[folder] = cached[0], cached[1], now + self.habits.listing_s
                return cached[0]
        elif self._absent.get(directory, 0.0) > now:
            return []
        return self._fresh_names(directory, folder)

    def _names_of_missing(self, path: SimPath) -> list[str]:
        if self._caching and self._absent.get(path, 0.0) <= self.disk.now:
            self._absent[path] = self.disk.now + self.habits.absence_s
        return []

    def _fresh_names(self, path: SimPath, directory: Directory) -> list[str]:
        """The names in a directory from the server, which are cached."""
        now = directory.seen[self.host] = self.disk.now
        if self._absent and self.habits.listing_frees:
            for absent in [absent for absent in self._absent if absent.startswith(path)]:
                del self._absent[absent]
        listing = self.disk.listing(directory)
        self._lists[directory] = listing, directory.stamp, now + self.habits.listing_s
        return listing

    def read(self, path: SimPath, cls: type[R]) -> R | None:
        try:
            after = self.trouble("read", path)
        except OSError as error:
            if error.errno in OF_ONE_RECORD:
                return None
            raise
        after()
        file = self.disk.files.get(path)
        if file is None:
            if path in self.disk.removed:
                self.disk.watch_missed(path, self.host)
            else:
                self.misses[path] = self.misses.get(path, 0) + 1
        elif self.disk.spoilt and path in self.disk.spoilt:
            return as_record(self.disk.spoilt[path], cls)
        elif self.cannot_read and path.startswith(self.cannot_read):
            return as_record(MIXED, cls)
        elif self._reads is not None and (how := self._reads.of(self.host, path, self.disk.now)):
            return as_record(MIXED, cls) if how == "garbled" else None
        content = self._remembered(path, file) if file is None or self._caching else file.content
        return content if content is None or isinstance(content, cls) else as_record(content, cls)

    def must_read(self, path: SimPath, cls: type[R]) -> R:
        if (record := self.read(path, cls)) is not None:
            return record
        self.held_up.append(self.disk.now)
        try:
            decode(self.disk.spoilt.get(path, MIXED), cls)
            why = "it cannot be opened"
        except CorruptRecord as error:
            why = str(error)
        raise UnreadableRecord(Path(path), why)

    def _remembered(self, path: SimPath, file: File | None) -> Content | None:
        """The content of a file as this mount shows it."""
        now = self.disk.now
        if self._absent and self._absent.get(path, 0.0) > now:
            return None
        known = self._contents.get(path)
        if known is not None and now < known[1]:
            return known[0]
        if file is None:
            self._absent[path] = now + self.habits.absence_s
            return None
        if self.habits.content_s:
            self._contents[path] = file.content, now + self.habits.content_s
        return file.content

    def put(self, path: SimPath, record: Record, *, durable: bool = False) -> None:
        after = self.trouble("put", path)
        self._replace(path, record, durable)
        after()

    def mark(self, path: SimPath, record: Record) -> None:
        after = self.trouble("mark", path)
        self._replace(path, record)
        after()

    def append(self) -> None:
        """Write a line of a journal, which the simulated directory does not hold. An error means that it was not written."""
        self.trouble("append", "")()

    def _replace(self, path: SimPath, record: Record, durable: bool = False) -> None:
        file = self.disk.write(path, record, self.host, durable)
        if self._caching:
            self._forget(path, file)
        self.disk.watch(path, record, file)

    def create(self, path: SimPath, record: Record) -> bool:
        after = self.trouble("create", path)
        file = self.disk.files.get(path)
        was_free = file is None
        if file is None:
            file = self.disk.write(path, record, self.host, True)
            self.disk.watch(path, record, file)
        else:
            self.disk.touch(file.directory)
        if self._caching:
            self._forget(path, file)
        after()
        return was_free

    def rename(self, path: SimPath, new: SimPath) -> bool:
        after = self.trouble("rename", path)
        file = self.disk.rename(path, new)
        if self._caching and file is not None:
            self._forget(path, file)
            self._forget(new, file)
        if file is not None:
            self.disk.watch_rename(new)
        after()
        return file is not None

    def remove(self, path: SimPath) -> None:
        after = self.trouble("remove", path)
        file = self.disk.files.get(path)
        self.disk.remove(path)
        if self._caching and file is not None:
            self._forget(path, file)
        after()

    def remove_dir(self, path: SimPath) -> None:
        after = self.trouble("remove_dir", path)
        directory = self.disk.dirs.get(path)
        self.disk.remove_dir(path)
        if self._caching and directory is not None and directory.parent is not None:
            self._lists.pop(directory.parent, None)
        after()

    # --- caches ---

    def _forget(self, path: str, file: File) -> None:
        """Drop the cache of a file that this host changes, since a client sees its own changes."""
        self._lists.pop(file.directory, None)
        self._contents.pop(path, None)
        self._absent.pop(path, None)

    def shown(self, path: SimPath) -> list[str]:
        """This client's last listing of a directory."""
        directory = self.disk.dirs[path]
        known = self._lists.get(directory)
        return known[0] if known is not None else self.disk.listing(directory)

    def drop_caches(self) -> None:
        """The host has been restarted."""
        self._lists.clear()
        self._contents.clear()
        self._absent.clear()
