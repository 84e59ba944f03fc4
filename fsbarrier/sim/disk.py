"""The shared directory in memory, as the server has it: one Disk with its files and directories.

In most schedules a record stays the object that was written, for speed, and becomes bytes only where something damages it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from random import Random
from typing import Any, cast

from fsbarrier.protocol.codec import CorruptRecord, decode, encode
from fsbarrier.protocol.facts import R, Record

#: For so long a host may keep what it wrote without a flush before it is on the disk.
UNFLUSHED_S = 10.0


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

    `encode`: what is written in place of a record; None: the record itself, for speed.

    `order`: how a listing is ordered, 0 as created, 1 reversed, 2 by name. `exclusive` False: every create succeeds (the class of
    filesystems that must be refused). `links` False: an exclusive create takes three steps, as fsbarrier.files does it without hard links.
    """

    def __init__(
        self,
        *,
        coarse_s: float = 0.0,
        order: int = 0,
        exclusive: bool = True,
        links: bool = True,
        encode: Callable[[Record], bytes] | None = None,
    ) -> None:
        self.now = 0.0
        self.files: dict[str, File] = {}
        self.dirs: dict[str, Directory] = {}
        self.torn: set[str] = set()
        self.coarse_s, self.exclusive, self.links, self._encode = coarse_s, exclusive, links, encode
        # path -> what lies there in place of the record, until somebody restores it
        self.spoilt: dict[str, bytes] = {}
        self._ordered = _ORDERS[order]
        # called with each record that is written, except heartbeats
        self.watch: Watcher = lambda path, record, file: None
        # name -> when it was removed
        self.removed: dict[str, float] = {}
        # called with the name of each file that is removed
        self.watch_removal: Callable[[str], None] = lambda path: None
        # called when a host reads a file that was removed
        self.watch_missed: Callable[[str, str], None] = lambda path, host: None
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
        content = record if self._encode is None else self._encode(record)
        if file is None:
            file = self._create(path, content, host, durable)
        else:
            if file.durable or durable:
                file.old = file.content
            file.content, file.host, file.time, file.durable = content, host, self.now, durable
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

    def rename(self, path: str, new: str) -> File | None:
        """Give a file another name in its directory, if it is there."""
        file = self.files.pop(path, None)
        if file is not None:
            self.files[new] = file
            self._dropped(file.directory, path)
            self._added(file.directory, new.rpartition("/")[2])
        return file

    def remove(self, path: str) -> None:
        """Remove a file, if it is there."""
        file = self.files.pop(path, None)
        if file is not None:
            self.removed[path] = self.now
            self.watch_removal(path)
            self._dropped(file.directory, path)

    def remove_dir(self, path: str) -> None:
        """Remove a directory and all that is in it, if it is there."""
        directory = self.dirs.get(path)
        if directory is None:
            return
        for name in list(directory.names):
            inside = f"{path}/{name}"
            if inside in self.dirs:
                self.remove_dir(inside)
            else:
                self.remove(inside)
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

    def lose_power(self, hosts: set[str], rng: Random) -> list[str]:
        """What `hosts` wrote in the last `UNFLUSHED_S` without flushing may be lost or torn, unless another host saw it.

        Gives the names that suffered.
        """
        hurt = []
        for path, file in self.files.items():
            if file.durable or file.host not in hosts or self.now - file.time > UNFLUSHED_S:
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
            self._dropped(self.files.pop(path).directory, path)
        return hurt
