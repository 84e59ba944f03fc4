"""What the ranks left of one iteration: finds their trajectory files and says in what state each is."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import accumulate
from pathlib import Path

from fsbarrier.data.mergeplan import Part
from fsbarrier.data.shardscan import NotOurs, ShardScan, scan_shard
from fsbarrier.errors import FsbarrierError, UsageError
from fsbarrier.protocol.facts import JsonObject
from fsbarrier.rundir import runrecord
from fsbarrier.rundir.names import parse_trajectories
from fsbarrier.rundir.paths import RunPaths


class FileState(Enum):
    """In what state a trajectory file is. The values are what `fsbarrier aggregate` shows."""

    FINISHED = "finished"
    #: whole so far, but its writer did not finish it
    GROWING = "growing"
    #: whole up to some byte; what follows was being written when its writer ended, and is dropped
    TORN = "torn"
    #: another file holds the same, or more
    COPY = "copy"
    OTHER_RUN = "other run"
    #: rolled out by another policy than the newest generation's, maybe of the same version
    OTHER_POLICY = "other policy"
    #: not written by fsbarrier
    FOREIGN = "foreign"
    UNREADABLE = "unreadable"
    #: merged, without some of the tasks
    INCOMPLETE = "incomplete"
    #: merged, but its bytes do not match their checksums
    DAMAGED = "damaged"
    #: left by a program that was killed while it wrote
    TEMPORARY = "temporary"

    @property
    def in_the_way(self) -> bool:
        """Whether `fsbarrier recover` puts such a file aside, because nothing can use it."""
        return self in (
            FileState.OTHER_RUN,
            FileState.FOREIGN,
            FileState.UNREADABLE,
            FileState.DAMAGED,
            FileState.TEMPORARY,
        )


@dataclass(frozen=True, slots=True)
class FoundFile:
    """One trajectory file: of one node rank, or (`node_rank` None) merged from those of all."""

    path: Path
    split: str
    node_rank: int | None
    state: FileState
    note: str = ""
    scan: ShardScan | None = field(default=None, repr=False)
    #: groups whose task an earlier file has already
    duplicates: int = 0

    @property
    def header(self) -> dict[str, object]:
        return self.scan.header if self.scan else {}

    @property
    def generation(self) -> int:
        """-1: not known."""
        value = self.header.get("generation")
        return value if isinstance(value, int) else -1

    @property
    def mergeable(self) -> bool:
        """Whether a merge takes groups from it."""
        return self.state in (FileState.FINISHED, FileState.GROWING, FileState.TORN)

    def counts(self) -> dict[str, int]:
        """How much of it is valid, and how many bytes at its end are not."""
        scan = self.scan
        return {
            "groups": len(scan.groups) if scan else 0,
            "trajectories": scan.trajectories if scan else 0,
            "valid_bytes": scan.valid_bytes if scan else 0,
            "torn_bytes": scan.torn_bytes if scan else 0,
        }


def find(log_path: Path, split: str, iteration: int) -> list[FoundFile]:
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
            # A finished checkpoint is a link to its last part.
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
            # Only its checksums tell where a torn tail begins.
            scan = scan_shard(path)
    except FsbarrierError as error:
        state = FileState.FOREIGN if isinstance(error, NotOurs) else FileState.UNREADABLE
        return FoundFile(path, split, rank, state, str(error).removeprefix(f"{path}: "))
    if scan.merged:
        note = "a merged file under a rank's name"
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
            f"{log_path}: the files of this iteration belong to several runs ({', '.join(sorted(ids))})"
        )
    else:
        return found
    return [
        replace(item, state=FileState.OTHER_RUN, note=f"made by run {item.header['run_id']}")
        if item.header.get("run_id", run_id) != run_id
        else item
        for item in found
    ]


def _mark_copies(found: list[FoundFile]) -> list[FoundFile]:
    """Without hard links a finished checkpoint is a copy of its part: of files with one prefix, use the one that holds most."""
    best: dict[str, FoundFile] = {}
    for item in found:
        if item.mergeable and item.scan and item.scan.prefix:
            other = best.setdefault(item.scan.prefix, item)
            if other.scan is not None and _worth(item.scan) > _worth(other.scan):
                best[item.scan.prefix] = item
    marked = []
    for item in found:
        twin = best.get(item.scan.prefix, item) if item.mergeable and item.scan else item
        copy = twin is not item
        marked.append(replace(item, state=FileState.COPY, note=f"of {twin.path.name}") if copy else item)
    return marked


def _worth(scan: ShardScan) -> tuple[bool, int]:
    return scan.finished, scan.valid_bytes


def _mark_fallbacks(found: list[FoundFile]) -> list[FoundFile]:
    """The original leaves `…_rank_0` beside `…_rank_0.checkpoint`, which holds more."""
    checkpoints = {item.node_rank: item.path.name for item in found if item.path.name.endswith(".checkpoint")}
    return [
        replace(item, state=FileState.COPY, note=f"{checkpoints[item.node_rank]} is taken")
        if item.path.name.endswith(f"_rank_{item.node_rank}") and item.node_rank in checkpoints
        else item
        for item in found
    ]


def _mark_other_policies(found: list[FoundFile]) -> list[FoundFile]:
    """This iteration is about the policy that the newest generation rolled out. Mark the files of any other policy."""
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


# --- what a merge by hand takes from their headers --------------------------------------------------------------------


def parts(found: Iterable[FoundFile]) -> tuple[Part, ...]:
    """What to merge from, in order."""
    return tuple(Part(item.path, item.scan.valid_bytes) for item in found if item.mergeable and item.scan)


def expected_tasks(found: Iterable[FoundFile]) -> tuple[int, ...] | None:
    """The tasks that the writers of the files say there should be, in their order; None where none of them says."""
    usable = [item for item in found if item.mergeable]
    there = {group.task_index for item in usable if item.scan for group in item.scan.groups}
    in_rounds = any("rounds" in item.header for item in usable)
    # The tasks that one node was assigned are those of all rounds, begun or not.
    names = ("expected",) if in_rounds else ("expected", "assigned")
    lists = [_of_rounds_begun(item.header, name, there) for name in names for item in usable]
    known = [tasks for tasks in lists if isinstance(tasks, list)]
    if not known:
        return None
    return tuple(dict.fromkeys(task for tasks in known for task in tasks if isinstance(task, int)))


def _of_rounds_begun(header: JsonObject, name: str, there: Collection[int]) -> object:
    """The tasks that a header names; where they come in rounds, those up to the last round of which there is a group."""
    tasks, counts = header.get(name), header.get("rounds")
    if not isinstance(tasks, list) or not isinstance(counts, list):
        return tasks
    ends = [*accumulate(count for count in counts if isinstance(count, int))]
    last = max((at for at, task in enumerate(tasks) if task in there), default=0)
    return tasks[: next((end for end in ends if end > last), None)]


def groups_to_keep(found: Iterable[FoundFile]) -> int | None:
    """How many groups the merge keeps where more were rolled out than are wanted; None: all."""
    counts = (item.header.get("keep") for item in found if item.mergeable)
    return next((count for count in counts if isinstance(count, int) and count > 0), None)


def common_metadata(found: Sequence[FoundFile], split: str, iteration: int) -> dict[str, object]:
    """What the files agree on: run_id, policy, an original's metadata; and the newest generation."""
    headers = [item.header for item in found if item.mergeable]
    metadata: dict[str, object] = {"split": split, "iteration": iteration, "by_hand": True}
    for name in ("run_id", "policy_version", "policy", "original_metadata"):
        values = {repr(header[name]): header[name] for header in headers if name in header}
        if len(values) == 1:
            metadata[name] = next(iter(values.values()))
    generation = max((item.generation for item in found if item.mergeable), default=-1)
    return metadata | ({"generation": generation} if generation >= 0 else {})
