"""The shared directory in memory, as on the server: one Disk with its files and directories.

For speed, a record usually stays the object that was written, and becomes bytes only when something damages it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from random import Random
from typing import Any, cast

from fsbarrier.protocol.codec import CorruptRecord, decode, encode
from fsbarrier.protocol.facts import R, Record

#: how long an unflushed write may stay in a host's memory before it is on the disk
UNFLUSHED_S = 10.0


class SimPath(str):
    """A path as a plain string, with the methods of pathlib.Path that RunPaths needs, but several times as fast."""

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


#: a record, or damaged bytes
Content = Record | bytes


def as_bytes(content: Content) -> bytes:
    return content if isinstance(content, bytes) else encode(content)


def as_record(content: Content, cls: type[R]) -> R | None:
    """The record as PosixStore would read it; None if the content is not a `cls`."""
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
    """The names in one directory. `stamp`: its modification time as clients see it, perhaps coarse."""

    parent: Directory | None
    names: dict[str, None] = field(default_factory=dict)
    listing: list[str] | None = None
    stamp: float = 0.0
    # host -> when it last looked
    seen: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class File:
    """One file on the server. `old`: the content to which an unflushed replacement may revert."""

    content: Content
    host: str
    time: float
    durable: bool
    directory: Directory
    old: Content | None = None


_ORDERS: tuple[Callable[[dict[str, None]], list[str]], ...] = (list, lambda names: [*reversed(names)], sorted)
Watcher = Callable[[SimPath, Record, File], None]


class Disk:
    """The server. `coarse_s`: changes of a directory within this time share a modification time.

    `encode`: writes a record as bytes; None: the record itself is stored, for speed.

    `order` of listings: 0 as created, 1 reversed, 2 by name.
    """

    def __init__(
        self,
        *,
        coarse_s: float = 0.0,
        order: int = 0,
        encode: Callable[[Record], bytes] | None = None,
    ) -> None:
        self.now = 0.0
        self.files: dict[str, File] = {}
        self.dirs: dict[str, Directory] = {}
        self.coarse_s, self._encode = coarse_s, encode
        # path -> the damaged content, until an operator restores the record
        self.spoilt: dict[str, bytes] = {}
        self._ordered = _ORDERS[order]
        # called with each written record, and with the new name of each renamed file
        self.watch: Watcher = lambda path, record, file: None
        self.watch_rename: Callable[[SimPath], None] = lambda path: None
        # name -> when it was removed
        self.removed: dict[str, float] = {}
        # called with the name of each removed file
        self.watch_removal: Callable[[str], None] = lambda path: None
        # called when a host reads a removed file
        self.watch_missed: Callable[[str, str], None] = lambda path, host: None
        self._changes = 0

    def make_dir(self, path: str) -> Directory | None:
        """Make a directory and its parents; None for the root."""
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
        """Store `record` atomically. Raises FileNotFoundError if the directory is missing."""
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
        """Create a foreign file, as filesystems and editors do."""
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
        """Remove a directory and its content, if it is there."""
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
        """Set a directory's modification time. Its names may be unchanged, if only a temporary file came and went."""
        self._changes += 1
        directory.stamp = self.now // self.coarse_s if self.coarse_s else self._changes

    def listing(self, directory: Directory) -> list[str]:
        """The names in a directory; the same list object until they change."""
        if directory.listing is None:
            directory.listing = self._ordered(directory.names)
        return directory.listing

    def lose_power(self, hosts: set[str], rng: Random) -> list[str]:
        """Lose or tear what `hosts` wrote in the last `UNFLUSHED_S` without a flush, unless another host has seen it.

        Returns the affected names.
        """
        affected = []
        for path, file in self.files.items():
            if file.durable or file.host not in hosts or self.now - file.time > UNFLUSHED_S:
                continue
            if any(when >= file.time for host, when in file.directory.seen.items() if host not in hosts):
                continue
            fate = rng.random()
            if fate < 0.5:
                continue
            affected.append(path)
            if fate < 0.75 and file.old is not None:
                file.content = file.old
            elif fate < 0.9:
                whole = as_bytes(file.content)
                file.content = bytes(len(whole)) if fate < 0.8 else whole[: int(rng.random() * len(whole))]
            else:
                file.host = "gone"
        for path in [path for path in affected if self.files[path].host == "gone"]:
            self._dropped(self.files.pop(path).directory, path)
        return affected
