"""The shared directory in memory: one Disk, and for each host a Client with that host's caches and troubles.

A Client has the five verbs of fsbarrier.rundir.record_store.Store and answers like PosixStore on a mount that misbehaves: listings and
contents may be old, absences may be remembered, an error may be raised although the work was done. A record stays the object that
was written, for speed; it becomes bytes only where a loss of power tears it. (The file is longer than others: a Disk and its Clients
reach into each other.)
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from random import Random
from typing import Any, cast

from fsbarrier.protocol.codec import CorruptRecord, decode, encode
from fsbarrier.protocol.facts import R, Record
from fsbarrier.rundir.record_store import REPLACED


class SimPath(str):
    """A path as a plain string: what RunPaths needs of pathlib.Path, but several times as fast."""

    __slots__ = ()

    @lru_cache(maxsize=4096)  # noqa: B019
    def __truediv__(self, name: str) -> SimPath:
        return SimPath(name if name[:1] == "/" else f"{self}/{name}")

    @property
    def name(self) -> str:
        return self.rpartition("/")[2]

    @property
    def parent(self) -> SimPath:
        return SimPath(self.rpartition("/")[0])

    def with_name(self, name: str) -> SimPath:
        return SimPath(f"{self.rpartition('/')[0]}/{name}")


#: a record, or bytes that are none
Content = Record | bytes
# what a garbled read gives: it met the file in the moment of its replacement
MIXED = b"half of a record, and another one"


def as_bytes(content: Content) -> bytes:
    return content if isinstance(content, bytes) else encode(content)


def as_record(content: Content, cls: type[R]) -> R | None:
    """What PosixStore makes of a file that holds something else than a `cls`, or bytes."""
    found: R | None = _decoded(as_bytes(content), cast(Any, cls))
    return found


@lru_cache(maxsize=256)
def _decoded(data: bytes, cls: Any) -> Any:
    try:
        return decode(data, cls)
    except CorruptRecord:
        return None


@dataclass(slots=True, eq=False)
class Directory:
    """The names in one directory. `stamp` is its modification time as clients compare it, maybe coarse."""

    parent: Directory | None
    names: dict[str, None] = field(default_factory=dict)
    listing: list[str] | None = None
    stamp: float = 0.0
    # host -> when it last looked
    seen: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class File:
    """What the server holds under one name. `old`: the content that an un-flushed replacement may fall back to."""

    content: Content
    host: str
    time: float
    durable: bool
    directory: Directory
    old: Content | None = None


_ORDERS: tuple[Callable[[dict[str, None]], list[str]], ...] = (list, lambda names: [*reversed(names)], sorted)
Watcher = Callable[[SimPath, Record, File], None]


class Disk:
    """The server's truth. `coarse_s`: changes of a directory within one such span share a modification time.

    `order`: how a listing is ordered, 0 as created, 1 reversed, 2 by name. `exclusive` False: every create succeeds (the class of
    filesystems that must be refused).
    """

    def __init__(self, *, coarse_s: float = 0.0, order: int = 0, exclusive: bool = True) -> None:
        self.now = 0.0
        self.files: dict[str, File] = {}
        self.dirs: dict[str, Directory] = {}
        self.torn: set[str] = set()
        self.coarse_s, self.exclusive = coarse_s, exclusive
        self._ordered = _ORDERS[order]
        # called with each record that is written, except heartbeats
        self.watch: Watcher = lambda path, record, file: None
        self._changes = 0

    def make_dir(self, path: str) -> Directory | None:
        """Make a directory, and what it lies in; None for the top of all."""
        if not path:
            return None
        directory = self.dirs.get(path)
        if directory is None:
            parent, _, name = path.rpartition("/")
            directory = self.dirs[path] = Directory(self.make_dir(parent))
            if directory.parent is not None:
                self._added(directory.parent, name)
        return directory

    def write(self, path: SimPath, record: Record, host: str, durable: bool) -> File:
        """Put `record` under a name in one step. Raises FileNotFoundError where its directory is missing."""
        file = self.files.get(path)
        if file is None:
            file = self._create(path, record, host, durable)
        else:
            if file.durable or durable:
                file.old = file.content
            file.content, file.host, file.time, file.durable = record, host, self.now, durable
            self.touch(file.directory)
        return file

    def junk(self, directory: str, name: str, data: bytes) -> None:
        """Something that is not ours, as filesystems and editors leave it."""
        self.make_dir(directory)
        self._create(f"{directory}/{name}", data, "nobody", True)

    def _create(self, path: str, content: Content, host: str, durable: bool) -> File:
        parent, _, name = path.rpartition("/")
        directory = self.dirs.get(parent)
        if directory is None:
            raise FileNotFoundError(2, "no such directory", path)
        file = self.files[path] = File(content, host, self.now, durable, directory)
        self._added(directory, name)
        return file

    def _added(self, directory: Directory, name: str) -> None:
        directory.names[name] = None
        directory.listing = None
        self.touch(directory)

    def remove(self, path: str) -> None:
        """Remove a file, if it is there."""
        file = self.files.pop(path, None)
        if file is not None:
            self._dropped(file.directory, path)

    def remove_dir(self, path: str) -> None:
        """Remove a directory, if it is there. Raises OSError where it is not empty."""
        directory = self.dirs.get(path)
        if directory is None:
            return
        if directory.names:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        del self.dirs[path]
        if directory.parent is not None:
            self._dropped(directory.parent, path)

    def _dropped(self, directory: Directory, path: str) -> None:
        del directory.names[path.rpartition("/")[2]]
        directory.listing = None
        self.touch(directory)

    def touch(self, directory: Directory) -> None:
        """A directory was changed: set its modification time. Its names may be as before, if only a temporary file came and went."""
        self._changes += 1
        directory.stamp = self.now // self.coarse_s if self.coarse_s else self._changes

    def listing(self, directory: Directory) -> list[str]:
        """Its names as a client gets them; the same list until they change."""
        if directory.listing is None:
            directory.listing = self._ordered(directory.names)
        return directory.listing

    def lose_power(self, hosts: set[str], rng: Random, horizon_s: float) -> list[str]:
        """What `hosts` wrote in the last `horizon_s` without flushing may be lost or torn, unless another host saw it.

        Gives the names that suffered.
        """
        hurt = []
        for path, file in self.files.items():
            if file.durable or file.host not in hosts or self.now - file.time > horizon_s:
                continue
            if any(when >= file.time for host, when in file.directory.seen.items() if host not in hosts):
                continue
            fate = rng.random()
            if fate < 0.5:
                continue
            hurt.append(path)
            if fate < 0.75 and file.old is not None:
                file.content = file.old
            elif fate < 0.9:
                whole = as_bytes(file.content)
                file.content = bytes(len(whole)) if fate < 0.8 else whole[: int(rng.random() * len(whole))]
                self.torn.add(path)
            else:
                file.host = "gone"
        for path in [path for path in hurt if self.files[path].host == "gone"]:
            directory = self.files.pop(path).directory
            del directory.names[path.rpartition("/")[2]]
            directory.listing = None
            self.touch(directory)
        return hurt


@dataclass(frozen=True, slots=True)
class Habits:
    """How old a client's answers may be, in seconds.

    `listing_frees`: a fresh listing makes a client forget the absences that it remembers (NFS does, others do not).
    """

    listing_s: float = 0.0
    content_s: float = 0.0
    absence_s: float = 0.0
    listing_frees: bool = True

    @property
    def oldest_s(self) -> float:
        return self.listing_s + self.content_s


#: Makes an error. A ready one in a local variable would form a cycle with its frame, and keep all that the frame knows alive.
Failure = Callable[[], BaseException]
#: (verb, path) -> an error to raise after the work was done. It may raise instead, or take its time.
Alarm = Callable[[str, str], Failure | None]


class Client:
    """One host's mount of the Disk; it outlives the processes of that host, as a kernel's caches do."""

    def __init__(self, disk: Disk, host: str, habits: Habits) -> None:
        self.disk, self.host, self.habits = disk, host, habits
        # The operations of the look under way are counted. From number `alarm_at` on, `alarm` decides what becomes of each.
        self.done = 0
        self.alarm_at = sys.maxsize
        self.alarm: Alarm = lambda verb, path: None
        # on rows (invariant I12)
        self.ops = dict.fromkeys(("make_dir", "read", "put", "create"), 0)
        # whether the next read gives half of a file
        self.garbled: Callable[[str, str], bool] | None = None
        # reads of names that did not exist (invariant I11)
        self.misses: dict[str, int] = {}
        self._caching = habits != Habits() or bool(disk.coarse_s)
        # names, modification time, until when they are remembered
        self._lists: dict[Directory, tuple[list[str], float, float]] = {}
        self._contents: dict[str, tuple[Content, float]] = {}
        self._absent: dict[str, float] = {}

    def _trouble(self, verb: str, path: str) -> Failure | None:
        if "/iter-" in path:
            self.ops[verb] += 1
        self.done += 1
        return self.alarm(verb, path) if self.done >= self.alarm_at else None

    # --- the five verbs ---

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
            return self._no_names(directory)
        now = self.disk.now
        if not self._caching:
            found.seen[self.host] = now
            return found.listing if found.listing is not None else self.disk.listing(found)
        known = self._lists.get(found)
        if known is not None:
            if now < known[2]:
                return known[0]
            # The directory looks unchanged to this client, even if it is not: its modification time may be coarse.
            if known[1] == found.stamp:
                found.seen[self.host] = now
                self._lists[found] = known[0], known[1], now + self.habits.listing_s
                return known[0]
        elif self._absent.get(directory, 0.0) > now:
            return []
        return self._fresh_names(directory, found)

    def _no_names(self, path: SimPath) -> list[str]:
        if self._caching and self._absent.get(path, 0.0) <= self.disk.now:
            self._absent[path] = self.disk.now + self.habits.absence_s
        return []

    def _fresh_names(self, path: SimPath, directory: Directory) -> list[str]:
        """The names in a directory, to be remembered."""
        now = directory.seen[self.host] = self.disk.now
        if self._absent and self.habits.listing_frees:
            for absent in [absent for absent in self._absent if absent.startswith(path)]:
                del self._absent[absent]
        listing = self.disk.listing(directory)
        self._lists[directory] = listing, directory.stamp, now + self.habits.listing_s
        return listing

    def read(self, path: SimPath, cls: type[R]) -> R | None:
        if "/iter-" in path:
            self.ops["read"] += 1
        self.done += 1
        if self.done >= self.alarm_at:
            try:
                after = self.alarm("read", path)
            except OSError as error:
                if error.errno in REPLACED:
                    return None
                raise
            if after is GarbledRead:
                return as_record(MIXED, cls) if path in self.disk.files else None
            if after is not None:
                raise after()
        file = self.disk.files.get(path)
        if file is None:
            self.misses[path] = self.misses.get(path, 0) + 1
        elif self.garbled is not None and self.garbled(self.host, path):
            return as_record(MIXED, cls)
        content = self._remembered(path, file) if file is None or self._caching else file.content
        return content if content is None or isinstance(content, cls) else as_record(content, cls)

    def _remembered(self, path: SimPath, file: File | None) -> Content | None:
        """What this mount takes for the content of a file."""
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
            self._contents[path] = (file.content, now + self.habits.content_s)
        return file.content

    def put(self, path: SimPath, record: Record) -> None:
        after = self._trouble("put", path)
        self.disk.watch(path, record, self.replace(path, record))
        if after is not None:
            raise after()

    def replace(self, path: SimPath, record: Record) -> File:
        """As `put`, but without mishaps, and without a call of `Disk.watch`."""
        file = self.disk.write(path, record, self.host, False)
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

    def remove(self, path: SimPath) -> None:
        self.disk.remove(path)

    def remove_dir(self, path: SimPath) -> None:
        self.disk.remove_dir(path)

    # --- caches ---

    def _forget(self, path: SimPath, file: File) -> None:
        """Forget what this host remembers of a file that it changes itself: a client sees its own changes."""
        self._lists.pop(file.directory, None)
        self._contents.pop(path, None)
        self._absent.pop(path, None)

    def shown(self, path: SimPath) -> list[str]:
        """The names that this client was shown in a directory when it last looked."""
        directory = self.disk.dirs[path]
        known = self._lists.get(directory)
        return known[0] if known is not None else self.disk.listing(directory)

    def visible_at(self, directory: Directory) -> float:
        """When this client will ask the server for a directory again, and not answer from its cache."""
        known = self._lists.get(directory)
        return self.disk.now if known is None else max(self.disk.now, known[2])

    def fresh_at(self, path: str) -> float:
        """The same for a file's content."""
        known = self._contents.get(path)
        return self.disk.now if known is None else max(self.disk.now, known[1])

    def drop_caches(self) -> None:
        """The host was restarted."""
        self._lists.clear()
        self._contents.clear()
        self._absent.clear()


class GarbledRead(OSError):
    """A read that gives part of a new content and part of an old one (seen on sshfs). `read` returns that and never raises this."""
