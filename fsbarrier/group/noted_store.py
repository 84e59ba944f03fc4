"""The store of a group member. It remembers its operation, so that an error can name one that does not return."""

from __future__ import annotations

from pathlib import Path

from fsbarrier.protocol.facts import R, Record
from fsbarrier.rundir.record_store import PosixStore


class NotedStore(PosixStore):
    """`doing`: the current or last operation."""

    doing: tuple[str, Path] | None = None

    def make_dir(self, path: Path) -> None:
        self.doing = "making", path
        super().make_dir(path)

    def names(self, directory: Path) -> list[str]:
        self.doing = "listing", directory
        return super().names(directory)

    def read(self, path: Path, cls: type[R]) -> R | None:
        self.doing = "reading", path
        return super().read(path, cls)

    def put(self, path: Path, record: Record, *, durable: bool = False) -> None:
        self.doing = "writing", path
        super().put(path, record, durable=durable)

    def mark(self, path: Path, record: Record) -> None:
        self.doing = "writing", path
        super().mark(path, record)

    def create(self, path: Path, record: Record) -> bool:
        self.doing = "creating", path
        return super().create(path, record)

    def remove(self, path: Path) -> None:
        self.doing = "removing", path
        super().remove(path)

    def remove_dir(self, path: Path) -> None:
        self.doing = "removing", path
        super().remove_dir(path)
