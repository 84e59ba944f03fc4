"""The pool's directory, and its log on disk.

```
log/000001.json                                the log (queue.py): records that are created exclusively and never replaced
coordination/status                            what the pool's nodes say with their heartbeats, as in a run
logs/job-000001/node_2.log                     output of `fsbarrier run` for that node rank
runs/job-000001                                the run directory, unless the job sets --log-path
```
"""

from __future__ import annotations

import stat
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from fsbarrier.errors import StoreError, UsageError
from fsbarrier.pool.queue import Job, Queue, Record
from fsbarrier.rundir.heartbeats import live_nodes
from fsbarrier.rundir.names import Name
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.record_store import PosixStore
from fsbarrier.store import files, reading, trusted_folder
from fsbarrier.store.retry import HIDDEN_S, fails_or_hides, patiently

RECORD = Name("{:06d}.json", int)
LOG = Name("node_{:d}.log", int)
# A node of the pool beats twice a second.
WATCH_S = 3.0
FOLDERS = ("log", "logs", "runs", "coordination")


@dataclass
class Pool:
    """A pool, and what has been read of its log. All methods may raise OSError; an unreadable record raises StoreError."""

    root: Path
    queue: Queue = field(default_factory=Queue)

    @property
    def paths(self) -> RunPaths:
        return RunPaths(self.root)

    def make(self, *, shared_group: bool) -> None:
        """Create the directory. Raises UsageError if its permissions would let other users submit jobs."""
        files.set_shared_group(shared_group)
        trusted_folder.check(self.root, shared_group=shared_group, named="the pool", inside=FOLDERS)
        try:
            for folder in (*(self.root / name for name in FOLDERS), self.paths.status):
                files.make_dirs(folder)
        except OSError as error:
            raise UsageError(
                f"{self.root}: cannot create the pool directory: {error.strerror or error}"
            ) from None
        self.check_private(shared_group=shared_group)

    def check_private(self, *, shared_group: bool) -> None:
        """Raises UsageError if other users may write there, because the pool's nodes run jobs as this user."""
        self.check_no_links()
        trusted_folder.check(self.root, shared_group=shared_group, named="the pool", inside=FOLDERS)

    def check_no_links(self) -> None:
        """Raises UsageError if what is written into the pool would land elsewhere."""
        for folder in (self.root / name for name in FOLDERS):
            # Only the way to the pool may contain links.
            if not stat.S_ISDIR(folder.lstat().st_mode):
                raise UsageError(f"{folder}: is a symbolic link, which could lead out of the pool; remove it")

    def read(self) -> Queue:
        """The queue after all records that are there."""
        listed = patiently(lambda: PosixStore().names(self.root / "log"))
        return self._read_to(max(RECORD.parse_all(listed), default=0))

    def append(self, record: Record) -> int:
        """Append a record to the log, whatever others append, and return its number."""
        number = self.read().length + 1
        while not self._create(number, record):
            number += 1
        self._read_to(number)
        return number

    def submit(self, job: Job) -> int:
        """Queue a job and return its number."""
        self.append(job)
        return len(self.queue.jobs)

    def decide(self, record: Record) -> bool:
        """Append a record that follows from what has been read; False if somebody else appended another one first."""
        return self._create(self.queue.length + 1, record)

    def _create(self, number: int, record: Record) -> bool:
        path, data = self.root / "log" / RECORD.build(number), msgspec.json.encode(record) + b"\n"
        return patiently(lambda: files.create_exclusive(path, data), HIDDEN_S, passes=fails_or_hides)

    def _read_to(self, last: int) -> Queue:
        """Read all records up to number `last`. That one exists, so all before it do too."""
        while self.queue.length < last:
            path = self.root / "log" / RECORD.build(self.queue.length + 1)
            try:
                data = patiently(lambda path=path: reading.read_bytes(path, reading.RECORD_BYTES))  # type: ignore[misc]
                self.queue.apply(msgspec.json.decode(data, type=Record))
            except FileNotFoundError:
                raise StoreError(f"{path}: is missing, but records after it are there") from None
            except (ValueError, KeyError, RecursionError) as error:
                raise StoreError(f"{path}: not a record of this version of fsbarrier: {error}") from None
        return self.queue

    def living(self) -> list[int]:
        """The nodes whose heartbeat advances. Takes `WATCH_S` if one is silent."""
        return [beat.rank for beat in live_nodes(self.root, WATCH_S)]

    def run_of(self, number: int) -> Path:
        """The run directory of a job."""
        return Path(self.queue.jobs[number].job.log_path or self.root / "runs" / f"job-{number:06d}")

    def log(self, number: int, rank: int) -> Path:
        """The output of a node rank of a job."""
        return self.root / "logs" / f"job-{number:06d}" / LOG.build(rank)

    def logged(self, number: int) -> list[int]:
        """The node ranks of a job that have a log."""
        return sorted(LOG.parse_all(PosixStore().names(self.log(number, 0).parent)))


def existing(root: Path) -> Pool:
    """The existing pool at `root`, to look at. Raises UsageError if there is none."""
    if not (root / "log").is_dir():
        raise UsageError(f"{root}: not a pool; create one with `fsbarrier daemon {root}`")
    # Everyone who may use the pool must be able to read the records of this process.
    files.set_shared_group(bool((root / "log").stat().st_mode & stat.S_IWGRP))
    return Pool(root)
