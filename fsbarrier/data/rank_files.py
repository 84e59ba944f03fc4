"""Finds the ranks' trajectory files of one iteration and determines the state of each."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import accumulate
from pathlib import Path

from fsbarrier.data.merge_plan import Part
from fsbarrier.data.trajectory_scan import NotOurs, ShardScan, scan_shard
from fsbarrier.errors import FsbarrierError, UsageError
from fsbarrier.protocol.facts import JsonObject
from fsbarrier.rundir import runrecord
from fsbarrier.rundir.names import parse_trajectories
from fsbarrier.rundir.paths import RunPaths


class FileState(Enum):
    """The state of a trajectory file, as shown by `fsbarrier aggregate`."""

    FINISHED = "finished"
    #: valid, but not finished by its writer
    GROWING = "growing"
    #: valid up to some byte; the incomplete rest is dropped
    TORN = "torn"
    #: another file contains the same groups or more
    COPY = "copy"
    OTHER_RUN = "other run"
    #: rolled out by a different policy than the newest generation's, possibly of the same version
    OTHER_POLICY = "other policy"
    #: not written by fsbarrier
    FOREIGN = "foreign"
    UNREADABLE = "unreadable"
    #: merged, but without some tasks
    INCOMPLETE = "incomplete"
    #: merged, but with a checksum mismatch
    DAMAGED = "damaged"
    #: temporary file of a killed program
    TEMPORARY = "temporary"

    @property
    def in_the_way(self) -> bool:
        """Whether `fsbarrier recover` quarantines such a file, because it is unusable."""
        return self in (
            FileState.OTHER_RUN,
            FileState.FOREIGN,
            FileState.UNREADABLE,
            FileState.DAMAGED,
            FileState.TEMPORARY,
        )


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A trajectory file of one node rank, or (`node_rank=None`) a merged file."""

    path: Path
    split: str
    node_rank: int | None
    state: FileState
    note: str = ""
    scan: ShardScan | None = field(default=None, repr=False)
    #: groups whose task is already in an earlier file
    duplicates: int = 0

    @property
    def header(self) -> dict[str, object]:
        return self.scan.header if self.scan else {}

    @property
    def generation(self) -> int:
        """-1: unknown."""
        value = self.header.get("generation")
        return value if isinstance(value, int) else -1

    @property
    def mergeable(self) -> bool:
        """Whether a merge uses its groups."""
        return self.state in (FileState.FINISHED, FileState.GROWING, FileState.TORN)

    def counts(self) -> dict[str, int]:
        """Counts of valid groups and trajectories, and of torn bytes."""
        scan = self.scan
        return {
            "groups": len(scan.groups) if scan else 0,
            "trajectories": scan.trajectories if scan else 0,
            "valid_bytes": scan.valid_bytes if scan else 0,
            "torn_bytes": scan.torn_bytes if scan else 0,
        }


def find(log_path: Path, split: str, iteration: int) -> list[FoundFile]:
    """The files of all ranks in merge order: the newest generation first, then by rank.

    Raises UsageError if they belong to several runs and it is unclear which one is meant.
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
            # A finished checkpoint is a hard link to its last part.
            if (there.st_dev, there.st_ino) not in seen:
                seen.add((there.st_dev, there.st_ino))
                found.append(_look_at(path, split, name.rank))
    found = _mark_other_policies(_mark_fallbacks(_mark_copies(_mark_other_runs(found, log_path))))
    found.sort(key=lambda item: (not item.mergeable, -item.generation, item.node_rank or 0, item.path.name))
    return list(_count_duplicates(found))


def _look_at(path: Path, split: str, rank: int) -> FoundFile:
    try:
        scan = scan_shard(path, verify=False)
        if not scan.finished:
            # Only the checksums show where a torn tail begins.
            scan = scan_shard(path)
    except FsbarrierError as error:
        state = FileState.FOREIGN if isinstance(error, NotOurs) else FileState.UNREADABLE
        return FoundFile(path, split, rank, state, str(error).removeprefix(f"{path}: "))
    if scan.merged:
        note = "a merged file with a rank's name"
        return FoundFile(path, split, rank, FileState.UNREADABLE, note)
    state = FileState.TORN if scan.torn_bytes else FileState.GROWING
    note = f"{len(scan.damaged)} damaged" if scan.damaged else ""
    return FoundFile(path, split, rank, FileState.FINISHED if scan.finished else state, note, scan)


def _mark_other_runs(found: list[FoundFile], log_path: Path) -> list[FoundFile]:
    ids = {str(item.header["run_id"]) for item in found if "run_id" in item.header}
    if runrecord.exists(log_path):
        run_id = runrecord.load(log_path).run_id
    elif len(ids) > 1:
        raise UsageError(
            f"{log_path}: the files of this iteration belong to several runs ({', '.join(sorted(ids))}); move those of other runs away"
        )
    else:
        return found
    return [
        replace(item, state=FileState.OTHER_RUN, note=f"belongs to run {item.header['run_id']}")
        if item.header.get("run_id", run_id) != run_id
        else item
        for item in found
    ]


def _mark_copies(found: list[FoundFile]) -> list[FoundFile]:
    """Without hard links a finished checkpoint is a copy of its part: of files with the same prefix, use the one with the most groups."""
    best: dict[str, FoundFile] = {}
    for item in found:
        if item.mergeable and item.scan and item.scan.prefix:
            other = best.setdefault(item.scan.prefix, item)
            if other.scan is not None and _completeness(item.scan) > _completeness(other.scan):
                best[item.scan.prefix] = item
    marked = []
    for item in found:
        twin = best.get(item.scan.prefix, item) if item.mergeable and item.scan else item
        copy = twin is not item
        marked.append(replace(item, state=FileState.COPY, note=f"of {twin.path.name}") if copy else item)
    return marked


def _completeness(scan: ShardScan) -> tuple[bool, int]:
    return scan.finished, scan.valid_bytes


def _mark_fallbacks(found: list[FoundFile]) -> list[FoundFile]:
    """The original tool leaves `…_rank_0` beside `…_rank_0.checkpoint`, which contains more."""
    checkpoints = {item.node_rank: item.path.name for item in found if item.path.name.endswith(".checkpoint")}
    return [
        replace(item, state=FileState.COPY, note=f"{checkpoints[item.node_rank]} is used instead")
        if item.path.name.endswith(f"_rank_{item.node_rank}") and item.node_rank in checkpoints
        else item
        for item in found
    ]


def _mark_other_policies(found: list[FoundFile]) -> list[FoundFile]:
    """Mark the files that were rolled out by a different policy than the newest generation's."""
    known = [item for item in found if item.mergeable and "policy" in item.header]
    if not known:
        return found
    newest = max(known, key=lambda item: item.generation).header["policy"]
    return [
        replace(
            item, state=FileState.OTHER_POLICY, note=f"rolled out by {item.header['policy']}, not {newest}"
        )
        if item in known and item.header["policy"] != newest
        else item
        for item in found
    ]


def _count_duplicates(found: list[FoundFile]) -> Iterator[FoundFile]:
    seen: set[int] = set()
    for item in found:
        tasks = {group.task_index for group in item.scan.groups} if item.mergeable and item.scan else set()
        yield replace(item, duplicates=len(tasks & seen))
        seen |= tasks


# --- data for a merge by hand, from the files' headers ------------------------------------------------------------------


def parts(found: Iterable[FoundFile]) -> tuple[Part, ...]:
    """The input parts, in order."""
    return tuple(Part(item.path, item.scan.valid_bytes) for item in found if item.mergeable and item.scan)


def expected_tasks(found: Iterable[FoundFile]) -> tuple[int, ...] | None:
    """The expected tasks according to the files' headers, in order; None if no header contains them."""
    usable = [item for item in found if item.mergeable]
    there = {group.task_index for item in usable if item.scan for group in item.scan.groups}
    in_rounds = any("rounds" in item.header for item in usable)
    # A node's assigned tasks include those of rounds that never started.
    names = ("expected",) if in_rounds else ("expected", "assigned")
    lists = [_tasks_of_begun_rounds(item.header, name, there) for name in names for item in usable]
    known = [tasks for tasks in lists if isinstance(tasks, list)]
    if not known:
        return None
    return tuple(dict.fromkeys(task for tasks in known for task in tasks if isinstance(task, int)))


def _tasks_of_begun_rounds(header: JsonObject, name: str, there: Collection[int]) -> object:
    """The tasks in a header; with rounds, only those up to the last round with a group."""
    tasks, counts = header.get(name), header.get("rounds")
    if not isinstance(tasks, list) or not isinstance(counts, list):
        return tasks
    ends = [*accumulate(count for count in counts if isinstance(count, int))]
    last = max((at for at, task in enumerate(tasks) if task in there), default=0)
    return tasks[: next((end for end in ends if end > last), None)]


def groups_to_keep(found: Iterable[FoundFile]) -> int | None:
    """How many groups the merge keeps if more were rolled out than needed; None: all."""
    counts = (item.header.get("keep") for item in found if item.mergeable)
    return next((count for count in counts if isinstance(count, int) and count > 0), None)


def common_metadata(found: Sequence[FoundFile], split: str, iteration: int) -> dict[str, object]:
    """The metadata common to all files (run_id, policy, an original's metadata), and the newest generation."""
    headers = [item.header for item in found if item.mergeable]
    metadata: dict[str, object] = {"split": split, "iteration": iteration, "by_hand": True}
    for name in ("run_id", "policy_version", "policy", "original_metadata"):
        values = {repr(header[name]): header[name] for header in headers if name in header}
        if len(values) == 1:
            metadata[name] = next(iter(values.values()))
    generation = max((item.generation for item in found if item.mergeable), default=-1)
    return metadata | ({"generation": generation} if generation >= 0 else {})
