"""The pool's directory. Records are created exclusively and never replaced, except for the nodes' heartbeats.

```
jobs/job-000001.json                           a job, created exclusively by `fsbarrier submit`
decisions/000001.json                          the decision log (fsbarrier/cli/pool/facts.py)
stops/job-000001.json                          a request to stop a job
ended/job-000001.rank-0002.by-000003.json      exit code of the `fsbarrier run` that decision 3 started
coordination/joins, coordination/beats         the pool's nodes, as in a run
logs/job-000001/node_2.log                     output of `fsbarrier run` for that node rank
runs/job-000001                                the run directory, unless the job sets --log-path
```
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from fsbarrier.cli.pool.facts import Decision, Ended, Facts, Job, Placement
from fsbarrier.errors import StoreError, UsageError
from fsbarrier.rundir.heartbeats import live_nodes
from fsbarrier.rundir.names import Name
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.record_store import PosixStore
from fsbarrier.store import files, reading, trusted_folder
from fsbarrier.store.retry import HIDDEN_S, fails_or_hides, patiently

JOB = Name("job-{:06d}.json", int)
DECISION = Name("{:06d}.json", int)
ENDED = Name("job-{:06d}.rank-{:04d}.by-{:06d}.json", lambda job, rank, by: (job, rank, by))
LOG = Name("node_{:d}.log", int)
# A node of the pool beats twice a second.
WATCH_S = 3.0
FOLDERS = ("jobs", "decisions", "stops", "ended", "logs", "runs", "coordination")

T = TypeVar("T", Job, Decision, Ended)


@dataclass
class PoolDirectory:
    """Reads and writes the records, and caches them. All methods may raise OSError; an unreadable record raises StoreError."""

    root: Path
    _jobs: dict[int, Job] = field(default_factory=dict)
    _decisions: dict[int, Decision] = field(default_factory=dict)
    _ended: dict[Placement, int] = field(default_factory=dict)
    #: a descriptor of the folder that was checked; -1: it was not
    _held: int = -1

    @property
    def paths(self) -> RunPaths:
        return RunPaths(self.root)

    def make(self, *, shared_group: bool) -> None:
        """Create the directory. Raises UsageError if its permissions would let other users submit jobs."""
        files.set_shared_group(shared_group)
        try:
            for name in FOLDERS:
                files.make_dirs(self.root / name)
        except OSError as error:
            raise UsageError(
                f"{self.root}: cannot create the pool directory: {error.strerror or error}"
            ) from None
        check_private(self.root, shared_group=shared_group)
        self._held = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def read(self) -> Facts:
        """The current contents of the directory."""
        if self._held >= 0 and not os.path.samestat(os.fstat(self._held), os.stat(self.root)):
            raise UsageError(f"{self.root}: somebody put another folder in the place of this pool")
        return Facts(*patiently(self._read))

    def _read(self) -> tuple[Any, ...]:
        self._read_new(JOB, self.root / "jobs", Job, self._jobs)
        self._read_new(DECISION, self.root / "decisions", Decision, self._decisions)
        stops = set(JOB.parse_all(self._names("stops")))
        for job, rank, by in ENDED.parse_all(self._names("ended")):
            decision = self._decisions.get(by)
            if decision is None or decision.job != job or job not in self._jobs:
                continue
            node = decision.ranks.get(str(rank))
            if node is not None and (one := Placement(job, rank, node, by)) not in self._ended:
                path = self.root / "ended" / ENDED.build(job, rank, by)
                self._ended[one] = _record(path, Ended).exit_code
        # Use decisions up to the first gap only: a later one depends on all before it.
        known: dict[int, Decision] = {}
        while len(known) + 1 in self._decisions:
            known[len(known) + 1] = self._decisions[len(known) + 1]
        return dict(self._jobs), known, stops, dict(self._ended)

    def _read_new(self, name: Name[int], folder: Path, cls: type[T], found: dict[int, T]) -> None:
        for number in name.parse_all(self._names(folder.name)):
            if number not in found:
                record = _record(folder / name.build(number), cls)
                if isinstance(record, Job) and not record.log_path:
                    record = replace(record, log_path=str(self.root / "runs" / f"job-{number:06d}"))
                found[number] = record

    def _names(self, folder: str) -> list[str]:
        return PosixStore().names(self.root / folder)

    def living(self) -> list[int]:
        """The nodes whose heartbeat advances. Takes `WATCH_S` if one is silent."""
        return [beat.rank for beat in live_nodes(self.root, WATCH_S)]

    # --- writing ---

    def submit(self, job: Job) -> int:
        """Queue a job and return its number."""
        number = max(JOB.parse_all(self._names("jobs")), default=0) + 1
        while not _create(self.root / "jobs" / JOB.build(number), asdict(job)):
            number += 1
        return number

    def decide(self, facts: Facts, decision: Decision) -> bool:
        """Try to append a decision to those in `facts`; False if another node was first."""
        return _create(self.root / "decisions" / DECISION.build(len(facts.decisions) + 1), asdict(decision))

    def stop(self, job: int, who: str) -> None:
        _create(self.root / "stops" / JOB.build(job), {"who": who})

    def report(self, one: Placement, exit_code: int) -> None:
        path = self.root / "ended" / ENDED.build(one.job, one.rank, one.by)
        _create(path, {"exit_code": exit_code})

    def log(self, job: int, rank: int) -> Path:
        return self._logs(job) / LOG.build(rank)

    def logged(self, job: int) -> list[int]:
        """The node ranks of a job that have a log."""
        for folder in (self._logs(job).parent, self._logs(job)):
            if folder.is_symlink():
                raise StoreError(f"{folder}: is a symbolic link, which could lead out of the pool; remove it")
        return sorted(LOG.parse_all(PosixStore().names(self._logs(job))))

    def _logs(self, job: int) -> Path:
        return self.root / "logs" / f"job-{job:06d}"


def existing(root: Path) -> PoolDirectory:
    """The existing pool at `root`, to look at. Raises UsageError if there is none."""
    if not (root / "jobs").is_dir():
        raise UsageError(f"{root}: not a pool; create one with `fsbarrier daemon {root}`")
    # Everyone who may use the pool must be able to read the records of this process.
    files.set_shared_group(bool((root / "jobs").stat().st_mode & stat.S_IWGRP))
    return PoolDirectory(root)


def check_private(root: Path, *, shared_group: bool) -> None:
    """Raises UsageError if other users may write there, because the pool's nodes run jobs as this user."""
    for folder in (root / name for name in FOLDERS):
        # Only the way to the pool may contain links.
        if not stat.S_ISDIR(folder.lstat().st_mode):
            raise UsageError(f"{folder}: is a symbolic link, which could lead out of the pool; remove it")
    trusted_folder.check(root, shared_group=shared_group, named="the pool", inside=FOLDERS)


def _create(path: Path, body: Mapping[str, object]) -> bool:
    data = json.dumps(body).encode() + b"\n"
    return patiently(
        lambda: files.create_exclusive(path, data, never_torn=True), HIDDEN_S, passes=fails_or_hides
    )


def _record(path: Path, cls: type[T]) -> T:
    """Read a record. Raises StoreError if it is malformed, OSError."""
    try:
        data = patiently(lambda: files.read_created(path))
        found = msgspec.json.decode(data, type=dict[str, Any])
        if unknown := found.keys() - {one.name for one in fields(cls)}:
            raise StoreError(
                f"{path}: not a record of this version of fsbarrier: unknown fields {', '.join(sorted(unknown))}"
            )
        return msgspec.convert(found, cls)
    except reading.NotPlain as error:
        raise StoreError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path}: not a record of this version of fsbarrier: {error}") from None
