"""Each host's mount of the simulated Disk: a MountClient with that host's caches and troubles.

It has the methods of rundir.record_store.Store and behaves like PosixStore on a bad mount: listings and contents may be stale, absences
may be cached, and an operation may succeed and raise an error.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

from fsbarrier.protocol.codec import CorruptRecord, Fault, decode
from fsbarrier.protocol.facts import R, Record
from fsbarrier.rundir.record_store import OF_ONE_RECORD
from fsbarrier.sim.disk import Content, Directory, Disk, File, SimPath, as_record

# in the paths of all facts
ROWS = "/coordination/gen-"
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


#: Makes an error. An exception in a local variable would form a cycle with its frame, and keep everything in the frame alive.
Failure = Callable[[], BaseException]
#: (verb, path) -> an error to raise after the operation. It may also raise, or block.
Alarm = Callable[[str, str], Failure | None]


class MountClient:
    """One host's mount of the Disk. Like a kernel's caches, it outlives the host's processes."""

    def __init__(self, disk: Disk, host: str, habits: Habits, beside: MountClient | None = None) -> None:
        """`beside`: another client of the same mount."""
        self.disk, self.host, self.habits = disk, host, habits
        # The operations of a look are counted. From number `alarm_at` on, `alarm` decides the outcome of each.
        self.done = 0
        self.alarm_at = sys.maxsize
        self.alarm: Alarm = lambda verb, path: None
        # on rows (invariant I12)
        verbs = "make_dir", "read", "put", "mark", "create", "remove", "remove_dir"
        self.ops = dict.fromkeys(verbs, 0)
        # the directory whose files this host cannot read; "": none
        self.cannot_read = ""
        # whether the next read is torn
        self.garbled: Callable[[str, str], bool] | None = None
        # whether a file is unreadable now
        self.stale_handle: Callable[[str, str, float], bool] | None = None
        # reads of names that did not exist (invariant I11)
        self.misses: dict[str, int] = {}
        self._caching = habits != Habits() or bool(disk.coarse_s)
        # Until then this mount shows nothing newer than what it has shown, or shows first.
        self.old_until = 0.0
        # names, modification time, until when they are cached
        self._lists: dict[Directory, tuple[list[str], float, float]] = beside._lists if beside else {}
        self._contents: dict[str, tuple[Content, float]] = beside._contents if beside else {}
        self._absent: dict[str, float] = beside._absent if beside else {}

    def _trouble(self, verb: str, path: str) -> Failure | None:
        if ROWS in path:
            self.ops[verb] += 1
        self.done += 1
        return self.alarm(verb, path) if self.done >= self.alarm_at else None

    # --- the verbs of Store ---

    def make_dir(self, path: SimPath) -> None:
        after = self._trouble("make_dir", path)
        if path not in self.disk.dirs:
            directory = self.disk.make_dir(path)
            if self._caching:
                self._absent.pop(path, None)
                while directory := directory and directory.parent:
                    self._lists.pop(directory, None)
        if after is not None:
            raise after()

    def names(self, directory: SimPath) -> list[str]:
        self.done += 1
        if self.done >= self.alarm_at and (after := self.alarm("names", directory)) is not None:
            raise after()
        found = self.disk.dirs.get(directory)
        if found is None:
            return self._names_of_missing(directory)
        now = self.disk.now
        if not self._caching:
            found.seen[self.host] = now
            return found.listing if found.listing is not None else self.disk.listing(found)
        known = self._lists.get(found)
        if known is not None:
            if now < known[2]:
                return known[0]
            # The directory looks unchanged, perhaps only because its modification time is coarse.
            if known[1] == found.stamp:
                found.seen[self.host] = now
                self._lists[found] = known[0], known[1], max(now + self.habits.listing_s, self.old_until)
                return known[0]
        elif self._absent.get(directory, 0.0) > now:
            return []
        return self._fresh_names(directory, found)

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
        self._lists[directory] = listing, directory.stamp, max(now + self.habits.listing_s, self.old_until)
        return listing

    def read(self, path: SimPath, cls: type[R]) -> R | None:
        if ROWS in path:
            self.ops["read"] += 1
        self.done += 1
        if self.done >= self.alarm_at:
            try:
                after = self.alarm("read", path)
            except OSError as error:
                if error.errno in OF_ONE_RECORD:
                    return None
                raise
            if after is GarbledRead:
                return as_record(MIXED, cls) if path in self.disk.files else None
            if after is not None:
                raise after()
        file = self.disk.files.get(path)
        if file is None:
            if path in self.disk.removed:
                self.disk.watch_missed(path, self.host)
            else:
                self.misses[path] = self.misses.get(path, 0) + 1
        elif self.disk.spoilt and path in self.disk.spoilt:
            return as_record(self.disk.spoilt[path], cls)
        elif (self.garbled is not None and self.garbled(self.host, path)) or (
            self.cannot_read and path.startswith(self.cannot_read)
        ):
            return as_record(MIXED, cls)
        elif self.stale_handle is not None and self.stale_handle(self.host, path, self.disk.now):
            return None
        content = self._remembered(path, file) if file is None or self._caching else file.content
        return content if content is None or isinstance(content, cls) else as_record(content, cls)

    def fault(self, path: SimPath, cls: type[R]) -> Fault:
        try:
            decode(self.disk.spoilt.get(path, MIXED), cls)
        except CorruptRecord as error:
            return error.fault
        return Fault("it does not fit its name")

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
        if self.habits.content_s or now < self.old_until:
            self._contents[path] = (file.content, max(now + self.habits.content_s, self.old_until))
        return file.content

    def put(self, path: SimPath, record: Record, *, durable: bool = False) -> None:
        after = self._trouble("put", path)
        self.disk.watch(path, record, self.replace(path, record, durable))
        if after is not None:
            raise after()

    def mark(self, path: SimPath, record: Record) -> None:
        after = self._trouble("mark", path)
        self.disk.watch(path, record, self.replace(path, record))
        if after is not None:
            raise after()

    def append(self) -> None:
        """Write a line of a journal, which the simulated directory does not hold. An error means that it was not written."""
        self.done += 1
        if self.done >= self.alarm_at and (after := self.alarm("append", "")) is not None:
            raise after()

    def replace(self, path: SimPath, record: Record, durable: bool = False) -> File:
        """As `put`, but without mishaps, and without a call of `Disk.watch`."""
        file = self.disk.write(path, record, self.host, durable)
        if self._caching:
            self._forget(path, file)
        return file

    def create(self, path: SimPath, record: Record) -> bool:
        after = self._trouble("create", path)
        file = self.disk.files.get(path)
        free = file is None or not self.disk.exclusive
        if file is None or free:
            file = self.disk.write(path, record, self.host, True)
            self.disk.watch(path, record, file)
        else:
            self.disk.touch(file.directory)
        if self._caching:
            self._forget(path, file)
        if after is not None:
            raise after()
        return free

    def rename(self, path: SimPath, new: SimPath) -> bool:
        after = self._trouble("rename", path)
        there = self.move(path, new) is not None
        if after is not None:
            raise after()
        return there

    def move(self, path: SimPath, new: SimPath) -> File | None:
        """As `rename`, but without mishaps."""
        file = self.disk.rename(path, new)
        if self._caching and file is not None:
            self._forget(path, file)
            self._forget(new, file)
        return file

    def remove(self, path: SimPath) -> None:
        after = self._trouble("remove", path)
        file = self.disk.files.get(path)
        self.disk.remove(path)
        if self._caching and file is not None:
            self._forget(path, file)
        if after is not None:
            raise after()

    def remove_dir(self, path: SimPath) -> None:
        after = self._trouble("remove_dir", path)
        directory = self.disk.dirs.get(path)
        self.disk.remove_dir(path)
        if self._caching and directory is not None and directory.parent is not None:
            self._lists.pop(directory.parent, None)
        if after is not None:
            raise after()

    # --- caches ---

    def _forget(self, path: SimPath, file: File) -> None:
        """Drop the cache of a file that this host changes, since a client sees its own changes; of an old listing only that name."""
        known = self._lists.pop(file.directory, None)
        if known is not None and self.disk.now < self.old_until:
            name = path.rpartition("/")[2]
            others = [other for other in known[0] if other != name]
            self._lists[file.directory] = [*others, name] if path in self.disk.files else others, *known[1:]
        self._contents.pop(path, None)
        self._absent.pop(path, None)

    def shown(self, path: SimPath) -> list[str]:
        """This client's last listing of a directory."""
        directory = self.disk.dirs[path]
        known = self._lists.get(directory)
        return known[0] if known is not None else self.disk.listing(directory)

    def visible_at(self, directory: Directory) -> float:
        """When this client's cached listing of a directory expires."""
        known = self._lists.get(directory)
        return self.disk.now if known is None else max(self.disk.now, known[2])

    def show_nothing_newer(self, until: float) -> None:
        """Answer from the cache until then, except for this host's own changes."""
        self._caching, self.old_until = True, until
        for directory, (names, stamp, end) in self._lists.items():
            self._lists[directory] = names, stamp, max(end, until)
        for path, (content, end) in self._contents.items():
            self._contents[path] = content, max(end, until)

    def show_all(self) -> None:
        if self.old_until:
            self.old_until = 0.0
            self.drop_caches()

    def drop_caches(self) -> None:
        """The host has been restarted."""
        self._lists.clear()
        self._contents.clear()
        self._absent.clear()


class GarbledRead(OSError):
    """A read returns a mix of new and old content (seen on sshfs). `read` returns that, and never raises this."""
