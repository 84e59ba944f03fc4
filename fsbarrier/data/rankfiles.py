"""What the ranks left of one iteration: finds their trajectory files and says what is in each, for a merge by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fsbarrier.data.mergeplan import Part
from fsbarrier.data.shardscan import NotOurs, ShardScan, scan_shard
from fsbarrier.errors import FsbarrierError, UsageError
from fsbarrier.rundir import runrecord
from fsbarrier.rundir.names import parse_trajectories
from fsbarrier.rundir.paths import RunPaths

USABLE = ("finished", "growing", "torn")


@dataclass(frozen=True)
class RankFile:
    """One file of one node rank. `state`: finished, growing (whole so far), torn (its tail is dropped), copy (of another one
    here), other run, foreign (not written by fsbarrier), unreadable."""

    path: Path
    node_rank: int
    state: str
    note: str = ""
    scan: ShardScan | None = field(default=None, repr=False)
    duplicates: int = 0  # groups whose task an earlier file has already

    @property
    def generation(self) -> int:
        value = self.scan.header.get("generation") if self.scan else None
        return value if isinstance(value, int) else -1

    @property
    def usable(self) -> bool:
        return self.state in USABLE

    def as_json(self) -> dict[str, Any]:
        """What the table shows, as plain values."""
        scan = self.scan
        return {
            "path": str(self.path),
            "node_rank": self.node_rank,
            "state": self.state,
            "note": self.note,
            "groups": len(scan.groups) if scan else 0,
            "trajectories": scan.trajectories if scan else 0,
            "reward_mean": scan.reward_mean if scan else None,
            "valid_bytes": scan.valid_bytes if scan else 0,
            "torn_bytes": scan.torn_bytes if scan else 0,
            "damaged": list(scan.damaged) if scan else [],
            "duplicates": self.duplicates,
        }


def find(log_path: Path, split: str, iteration: int) -> list[RankFile]:
    """The files of all ranks, in the order in which a merge takes from them: the newest generation first, then by rank.

    Raises UsageError where they belong to several runs and nothing says which one is meant.
    """
    folder = RunPaths(log_path).trajectories(split)
    if not folder.is_dir():
        return []
    found, seen = [], set()
    for path in sorted(folder.iterdir()):
        name = parse_trajectories(path.name)
        if name is None or name.rank is None or (name.split, name.iteration) != (split, iteration):
            continue
        if path.is_file():
            there = path.stat()
            if (there.st_dev, there.st_ino) not in seen:  # a finished checkpoint is a link to its last part
                seen.add((there.st_dev, there.st_ino))
                found.append(_look_at(path, name.rank))
    found = _mark_fallbacks(_mark_copies(_mark_other_runs(found, log_path)))
    found.sort(key=lambda item: (not item.usable, -item.generation, item.node_rank, item.path.name))
    return _count_duplicates(found)


def _look_at(path: Path, rank: int) -> RankFile:
    try:
        scan = scan_shard(path, verify=False)
        if not scan.finished:
            scan = scan_shard(path)  # only its checksums tell where a torn tail begins
    except NotOurs as error:
        return RankFile(path, rank, "foreign", _reason(error, path))
    except FsbarrierError as error:
        return RankFile(path, rank, "unreadable", _reason(error, path))
    if scan.merged:
        return RankFile(path, rank, "unreadable", "a merged file under a rank's name")
    state = "finished" if scan.finished else "torn" if scan.torn_bytes else "growing"
    return RankFile(path, rank, state, f"{len(scan.damaged)} damaged" if scan.damaged else "", scan)


def _reason(error: Exception, path: Path) -> str:
    return str(error).removeprefix(f"{path}: ")


def _mark_other_runs(found: list[RankFile], log_path: Path) -> list[RankFile]:
    ids = {str(item.scan.header["run_id"]) for item in found if item.scan and "run_id" in item.scan.header}
    if runrecord.exists(log_path):
        run_id = runrecord.load(log_path).run_id
    elif len(ids) > 1:
        raise UsageError(
            f"{log_path}: the files of this iteration belong to several runs ({', '.join(sorted(ids))})"
        )
    else:
        return found
    return [
        replace(item, state="other run", note=f"made by run {item.scan.header['run_id']}")
        if item.scan and item.scan.header.get("run_id", run_id) != run_id
        else item
        for item in found
    ]


def _mark_copies(found: list[RankFile]) -> list[RankFile]:
    """Where the filesystem has no links, a finished checkpoint is a copy of its part: take the one that holds most."""
    best: dict[str, RankFile] = {}
    for item in found:
        if item.usable and item.scan and item.scan.prefix:
            other = best.get(item.scan.prefix)
            if other is None or other.scan is None or _worth(item.scan) > _worth(other.scan):
                best[item.scan.prefix] = item
    marked = []
    for item in found:
        twin = best.get(item.scan.prefix) if item.usable and item.scan else None
        marked.append(
            replace(item, state="copy", note=f"of {twin.path.name}")
            if twin is not None and twin is not item
            else item
        )
    return marked


def _mark_fallbacks(found: list[RankFile]) -> list[RankFile]:
    """The original leaves `…_rank_0` beside `…_rank_0.checkpoint`, which holds more."""
    checkpoints = {item.node_rank: item.path.name for item in found if item.path.name.endswith(".checkpoint")}
    return [
        replace(item, state="copy", note=f"{checkpoints[item.node_rank]} is taken")
        if item.path.name.endswith(f"_rank_{item.node_rank}") and item.node_rank in checkpoints
        else item
        for item in found
    ]


def _worth(scan: ShardScan) -> tuple[bool, int]:
    return scan.finished, scan.valid_bytes


def _count_duplicates(found: list[RankFile]) -> list[RankFile]:
    seen: set[int] = set()
    counted = []
    for item in found:
        tasks = {group.task_index for group in item.scan.groups} if item.usable and item.scan else set()
        counted.append(replace(item, duplicates=len(tasks & seen)))
        seen |= tasks
    return counted


def parts(found: Sequence[RankFile]) -> list[Part]:
    """What to merge from, in order."""
    return [Part(item.path, item.scan.valid_bytes) for item in found if item.usable and item.scan]


def expected_tasks(found: Sequence[RankFile]) -> tuple[int, ...] | None:
    """The tasks that the writers of the files say there should be, in their order; None where none of them says."""
    tasks: dict[int, None] = {}
    known = False
    for name in ("expected", "assigned"):
        for item in found:
            header = item.scan.header if item.usable and item.scan else {}
            if isinstance(header.get(name), list):
                known = True
                tasks.update((task, None) for task in header[name] if isinstance(task, int))
    return tuple(tasks) if known else None


def groups_to_keep(found: Sequence[RankFile]) -> int | None:
    """How many groups the merge keeps where more were rolled out than are wanted; None: all."""
    counts = {item.scan.header.get("keep") for item in found if item.usable and item.scan}
    return next((count for count in counts if isinstance(count, int) and count > 0), None)


def common_metadata(found: Sequence[RankFile], split: str, iteration: int) -> dict[str, Any]:
    """What the files agree on: run_id, policy_version, an original's metadata; and the newest generation."""
    headers = [item.scan.header for item in found if item.usable and item.scan]
    metadata: dict[str, Any] = {"split": split, "iteration": iteration, "by_hand": True}
    for name in ("run_id", "policy_version", "original_metadata"):
        values = {repr(header[name]): header[name] for header in headers if name in header}
        if len(values) == 1:
            metadata[name] = next(iter(values.values()))
    generation = max((item.generation for item in found if item.usable), default=-1)
    return metadata | ({"generation": generation} if generation >= 0 else {})
