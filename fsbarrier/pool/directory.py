"""A pool's directory: every record in it is created once and never replaced, save for the nodes' heartbeats.

```
jobs/job-000001.json                           a job, created exclusively by `fsbarrier submit`
decisions/000001.json                          the log of decisions (fsbarrier/pool/facts.py)
stops/job-000001.json                          a request to stop a job
ended/job-000001.rank-0002.by-000003.json      how the `fsbarrier run` ended that decision 3 asked for
coordination/joins, coordination/beats         the pool's nodes, as in a run
logs/job-000001/node_2.log                     what `fsbarrier run` of that node rank printed
runs/job-000001                                the run itself, where the job names no --log-path
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

from fsbarrier import files, reading
from fsbarrier.errors import StoreError, UsageError
from fsbarrier.pool.facts import Decision, Ended, Facts, Job, Placement
from fsbarrier.retry import FAILING, retry, until_seen
from fsbarrier.rundir.heartbeats import live_nodes
from fsbarrier.rundir.names import Name
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.record_store import PosixStore

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
    """Reads and writes the records; each is read once. Everything may raise OSError; what cannot be read raises StoreError."""

    root: Path
    _jobs: dict[int, Job] = field(default_factory=dict)
    _decisions: dict[int, Decision] = field(default_factory=dict)
    _ended: dict[Placement, int] = field(default_factory=dict)

    @property
    def paths(self) -> RunPaths:
        return RunPaths(self.root)

    def make(self, *, shared_group: bool) -> None:
        """Make the directory. Raises UsageError where others than those who are meant could submit jobs."""
        files.set_shared_group(shared_group)
        try:
            for name in FOLDERS:
                files.make_dirs(self.root / name)
        except OSError as error:
            raise UsageError(f"{self.root}: cannot be made: {error.strerror or error}") from None
        check_private(self.root, shared_group=shared_group)

    def read(self) -> Facts:
        """What lies there now."""
        return Facts(*retry(self._read, errnos=FAILING))

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
        # Without a gap: a later decision was made by somebody who knew those before it.
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
        """The nodes that are seen to beat; takes `WATCH_S` where one is silent."""
        return [beat.rank for beat in live_nodes(self.root, WATCH_S)]

    # --- writing ---

    def submit(self, job: Job) -> int:
        """Put a job into the queue; gives its number."""
        number = max(JOB.parse_all(self._names("jobs")), default=0) + 1
        while not _create(self.root / "jobs" / JOB.build(number), asdict(job)):
            number += 1
        return number

    def decide(self, facts: Facts, decision: Decision) -> bool:
        """Whether this became the next decision after those that `facts` has."""
        return _create(self.root / "decisions" / DECISION.build(len(facts.decisions) + 1), asdict(decision))

    def stop(self, job: int, who: str) -> None:
        _create(self.root / "stops" / JOB.build(job), {"who": who})

    def report(self, one: Placement, exit_code: int) -> None:
        path = self.root / "ended" / ENDED.build(one.job, one.rank, one.by)
        _create(path, {"exit_code": exit_code})

    def log(self, job: int, rank: int) -> Path:
        return self._logs(job) / LOG.build(rank)

    def logged(self, job: int) -> list[int]:
        """The node ranks of a job that have printed something."""
        for folder in (self._logs(job).parent, self._logs(job)):
            if folder.is_symlink():
                raise StoreError(f"{folder}: it is a link, and leads out of the pool")
        return sorted(LOG.parse_all(PosixStore().names(self._logs(job))))

    def _logs(self, job: int) -> Path:
        return self.root / "logs" / f"job-{job:06d}"


def existing(root: Path) -> PoolDirectory:
    """The pool at `root`. Raises UsageError where there is none, or not for this user."""
    if not (root / "jobs").is_dir():
        raise UsageError(f"{root}: no pool there (fsbarrier daemon {root} makes one)")
    # Whoever may use the pool must be able to read what this process writes there.
    files.set_shared_group(bool((root / "jobs").stat().st_mode & stat.S_IWGRP))
    return PoolDirectory(root)


def check_private(root: Path, *, shared_group: bool) -> None:
    """Raises UsageError where somebody else may write: a job is a command that the pool's nodes run as this user."""
    # The directory itself may be reached through a link of the user's own.
    for folder, found in ((root, root.stat()), *((root / name, (root / name).lstat()) for name in FOLDERS)):
        others = stat.S_IWOTH if shared_group else stat.S_IWGRP | stat.S_IWOTH
        if not stat.S_ISDIR(found.st_mode):
            raise UsageError(f"{folder}: it is a link, and leads out of the pool")
        if found.st_mode & others:
            who = "everybody" if found.st_mode & stat.S_IWOTH else "its group"
            raise UsageError(
                f"{folder}: {who} may write there, and could run anything as you; chmod go-w {folder}"
                f"{', or give --shared-group if that is meant' if who == 'its group' else ''}"
            )
        if found.st_uid not in (os.geteuid(), 0) and not shared_group:
            raise UsageError(f"{folder}: belongs to another user, who could run anything as you")


def _create(path: Path, body: Mapping[str, object]) -> bool:
    data = json.dumps(body).encode() + b"\n"
    return until_seen(lambda: files.create_exclusive(path, data, never_torn=True))


def _record(path: Path, cls: type[T]) -> T:
    """Raises StoreError where the file holds no such record, OSError."""
    from pydantic import TypeAdapter, ValidationError

    try:
        data = retry(lambda: files.read_created(path), errnos=FAILING)
        found = TypeAdapter(dict[str, Any]).validate_json(data)
        if unknown := found.keys() - {one.name for one in fields(cls)}:
            raise StoreError(f"{path}: not a record of this fsbarrier: it has {', '.join(sorted(unknown))}")
        return TypeAdapter(cls).validate_json(data, strict=True)
    except reading.NotPlain as error:
        raise StoreError(f"{path}: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise StoreError(
            f"{path}: not a record of this fsbarrier: {where}{': ' if where else ''}{first['msg']}"
        ) from None
