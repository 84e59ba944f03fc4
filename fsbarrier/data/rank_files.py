"""Finds the ranks' trajectory files of one iteration, determines the state of each, and merges them at a user's request.

In a run the leader knows the parts and builds the request of the merge itself. Here it is derived from the files.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from functools import partial
from itertools import accumulate
from pathlib import Path

from fsbarrier.data import merged_file
from fsbarrier.data.merge import MergeRequest, Part, check_nothing_is_missing, collect, publish
from fsbarrier.data.rank_file import FormatError, GroupEntry, NotOurs, RankFile, scan_rank_file
from fsbarrier.data.trajectory import Trajectory
from fsbarrier.errors import FsbarrierError, UsageError
from fsbarrier.protocol.facts import JsonObject
from fsbarrier.rundir import runrecord
from fsbarrier.rundir.names import MERGED, parse_trajectories
from fsbarrier.rundir.paths import RunPaths


class FileState(Enum):
    """The state of a trajectory file, as `fsbarrier recover` and `fsbarrier aggregate` show it."""

    COMPLETE = "complete"
    #: valid, but not finished by its writer, or merged without some tasks
    PARTIAL = "partial"
    #: valid up to some byte; the incomplete rest is dropped
    TORN = "torn"
    #: of another run, or not written by fsbarrier
    FOREIGN = "foreign"
    #: rolled out by a different policy than the newest generation's, possibly of the same version
    OTHER_POLICY = "other policy"
    #: cannot be read
    DAMAGED = "damaged"
    #: not there, although a trajectory names it: an image
    MISSING = "missing"
    #: temporary file of a killed program
    TEMPORARY = "temporary"

    @property
    def in_the_way(self) -> bool:
        """Whether `fsbarrier recover` quarantines such a file, because it is unusable."""
        return self in (FileState.FOREIGN, FileState.DAMAGED, FileState.TEMPORARY)


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A trajectory file of one node rank, or (`node_rank=None`) a merged file."""

    path: Path
    split: str
    node_rank: int | None
    state: FileState
    note: str = ""
    #: the contents of a rank's file
    file: RankFile | None = field(default=None, repr=False)
    #: the metadata of a merged file
    metadata: JsonObject = field(default_factory=dict, repr=False)

    @property
    def header(self) -> JsonObject:
        return self.file.header if self.file else {}

    @property
    def generation(self) -> int:
        """The generation that wrote the file; -1: unknown."""
        value = self.header.get("generation")
        return value if isinstance(value, int) else -1

    @property
    def tasks(self) -> list[int]:
        """The tasks of a rank's file."""
        return [group.task_index for group in self.file.groups] if self.file else []

    @property
    def mergeable(self) -> bool:
        """Whether a merge uses its groups."""
        return self.state in (FileState.COMPLETE, FileState.PARTIAL, FileState.TORN)

    def counts(self) -> dict[str, int]:
        """Counts of valid groups and trajectories, and of torn bytes."""
        if self.file is None or self.state is FileState.FOREIGN:
            known = {name: self.metadata.get(name, 0) for name in ("groups", "trajectories")}
            return {**known, "valid_bytes": 0, "torn_bytes": 0}
        scanned = self.file
        return {
            "groups": len(scanned.groups),
            "trajectories": scanned.stats.trajectories,
            "valid_bytes": scanned.valid_bytes,
            "torn_bytes": scanned.torn_bytes,
        }


#: receives each group of a file while the file is examined
OnFoundGroup = Callable[[Path, GroupEntry, list[Trajectory]], None]


def find(log_path: Path, split: str, iteration: int, on_group: OnFoundGroup | None = None) -> list[FoundFile]:
    """The files of all ranks in merge order: the newest generation first, then by rank.

    `on_group` receives also the groups of files that no merge uses. Raises UsageError if the files belong to several runs and it is
    unclear which one is meant.
    """
    folder = RunPaths(log_path).trajectories(split)
    if not folder.is_dir():
        return []
    rank_files, seen = [], set()
    # A long run has thousands of files here, and most names are of other iterations.
    begins = MERGED.build(split, iteration)
    for path in sorted(path for path in folder.iterdir() if path.name.startswith(begins)):
        name = parse_trajectories(path.name)
        if name is None or name.rank is None or (name.split, name.iteration) != (split, iteration):
            continue
        if path.is_file():
            there = path.stat()
            # A finished checkpoint is a hard link to its last part. If it is a copy, all its groups are duplicates.
            if (there.st_dev, there.st_ino) not in seen:
                seen.add((there.st_dev, there.st_ino))
                rank_files.append(_look_at(path, split, name.rank, on_group))
    rank_files = _mark_other_policies(_mark_other_runs(rank_files, log_path))
    rank_files.sort(
        key=lambda item: (not item.mergeable, -item.generation, item.node_rank or 0, item.path.name)
    )
    return rank_files


def _look_at(path: Path, split: str, rank: int, on_group: OnFoundGroup | None) -> FoundFile:
    try:
        scanned = scan_rank_file(path, on_group=None if on_group is None else partial(on_group, path))
    except FsbarrierError as error:
        state = FileState.FOREIGN if isinstance(error, NotOurs) else FileState.DAMAGED
        return FoundFile(path, split, rank, state, str(error).removeprefix(f"{path}: "))
    if not scanned.valid_bytes and scanned.torn_bytes:
        return FoundFile(path, split, rank, FileState.DAMAGED, "completely unreadable")
    state = FileState.COMPLETE if scanned.finished else FileState.PARTIAL
    notes = list(scanned.damaged)
    if scanned.torn_bytes:
        state = FileState.TORN
        notes.append(f"the last {scanned.torn_bytes} bytes are torn and were dropped")
    return FoundFile(path, split, rank, state, "; ".join(notes), scanned)


def merged_metadata(path: Path) -> JsonObject:
    """The metadata of a merged file, all of whose checksums are verified. Raises StoreError, NotOurs, FormatError."""
    metadata = merged_file.load_tensors(path).get("metadata")
    return metadata if isinstance(metadata, dict) else {}


def look_at_merged(path: Path, split: str, run_id: str) -> FoundFile:
    """A merged file, all of whose checksums are verified. Raises OSError."""
    try:
        metadata = merged_metadata(path)
    except FsbarrierError as error:
        return FoundFile(path, split, None, FileState.DAMAGED, str(error).removeprefix(f"{path}: "))
    absent, made_by = metadata.get("missing") or (), metadata.get("run_id", run_id)
    if made_by != run_id:
        return FoundFile(path, split, None, FileState.FOREIGN, f"belongs to run {made_by}")
    if absent:
        note = f"merged without {len(absent)} tasks"
        return FoundFile(path, split, None, FileState.PARTIAL, note, metadata=metadata)
    return FoundFile(path, split, None, FileState.COMPLETE, metadata=metadata)


def _mark_other_runs(rank_files: list[FoundFile], log_path: Path) -> list[FoundFile]:
    ids = {str(item.header["run_id"]) for item in rank_files if "run_id" in item.header}
    if runrecord.exists(log_path):
        run_id = runrecord.load(log_path).run_id
    elif len(ids) > 1:
        raise UsageError(
            f"{log_path}: the files of this iteration belong to several runs ({', '.join(sorted(ids))}); move those of other runs away"
        )
    else:
        return rank_files
    return [
        replace(item, state=FileState.FOREIGN, note=f"belongs to run {item.header['run_id']}")
        if item.header.get("run_id", run_id) != run_id
        else item
        for item in rank_files
    ]


def _mark_other_policies(rank_files: list[FoundFile]) -> list[FoundFile]:
    """Mark the files that were rolled out by a different policy than the newest generation's."""
    known = [item for item in rank_files if item.mergeable and "policy" in item.header]
    if not known:
        return rank_files
    newest = max(known, key=lambda item: item.generation).header["policy"]
    return [
        replace(
            item, state=FileState.OTHER_POLICY, note=f"rolled out by {item.header['policy']}, not {newest}"
        )
        if item in known and item.header["policy"] != newest
        else item
        for item in rank_files
    ]


# --- a merge by hand ----------------------------------------------------------------------------------------------------


def merge_ranks(
    log_path: Path,
    split: str,
    iteration: int,
    rank_files: Sequence[FoundFile],
    *,
    allow_partial: bool = False,
    dry_run: bool = False,
) -> JsonObject:
    """Merge the files from `find`; the result as JSON. Raises UsageError (unusable files), StoreError.

    `expected`: the number of assigned tasks; None if no file records it. `report`: None for a dry run. `refused`: why nothing was merged.
    """
    for item in rank_files:
        if item.state is FileState.DAMAGED and not allow_partial:
            raise UsageError(
                f"{item.path.name}: {item.note}; move it away, or merge without it: --allow-partial"
            )
    out = RunPaths(log_path).merged(split, iteration)
    usable = [item for item in rank_files if item.mergeable and item.file]
    metadata = _common_metadata(usable) | {"split": split, "iteration": iteration, "by_hand": True}
    request = MergeRequest(
        tuple(Part(item.path, item.file.valid_bytes) for item in usable if item.file),
        out,
        metadata | {"allow_partial": allow_partial},
        _expected_tasks(usable),
        _groups_to_keep(usable),
        allow_partial,
    )
    collected = collect(request)
    expected = None if request.expected is None else len(request.expected)
    made: JsonObject = {"report": None, "expected": expected, "missing": list(collected.missing)}
    try:
        there = _there_already(out)
        if there and collected.groups.keys() <= set(there.get("tasks") or ()):
            return made | {"report": {**there, "out": str(out), "damaged": [], "already_done": True}}
        check_nothing_is_missing(collected)
    except UsageError as error:
        return made | {"refused": str(error)}
    if dry_run:
        return made | {"would_merge": {"out": str(out), "groups": len(collected.groups)}}
    return made | {"report": asdict(publish(collected))}


def _expected_tasks(rank_files: Iterable[FoundFile]) -> tuple[int, ...] | None:
    """The expected tasks according to the files' headers, in order; None if no header contains them."""
    usable = [item for item in rank_files if item.mergeable]
    there = {task for item in usable for task in item.tasks}
    lists = [_tasks_of_begun_rounds(item.header, there) for item in usable]
    known = [tasks for tasks in lists if isinstance(tasks, list)]
    if not known:
        return None
    return tuple(dict.fromkeys(task for tasks in known for task in tasks if isinstance(task, int)))


def _tasks_of_begun_rounds(header: JsonObject, there: Collection[int]) -> object:
    """The expected tasks in a header; with rounds, only those up to the last round with a group."""
    tasks, counts = header.get("expected"), header.get("rounds")
    if not isinstance(tasks, list) or not isinstance(counts, list):
        return tasks
    ends = [*accumulate(count for count in counts if isinstance(count, int))]
    last = max((at for at, task in enumerate(tasks) if task in there), default=0)
    return tasks[: next((end for end in ends if end > last), None)]


def _groups_to_keep(rank_files: Iterable[FoundFile]) -> int | None:
    """How many groups the merge keeps if more were rolled out than needed; None: all."""
    counts = (item.header.get("keep") for item in rank_files)
    return next((count for count in counts if isinstance(count, int) and count > 0), None)


def _common_metadata(rank_files: Sequence[FoundFile]) -> dict[str, object]:
    """The metadata common to all files (run_id, policy), and the newest generation."""
    metadata: dict[str, object] = {}
    for name in ("run_id", "policy_version", "policy"):
        values = {repr(item.header[name]): item.header[name] for item in rank_files if name in item.header}
        if len(values) == 1:
            metadata[name] = next(iter(values.values()))
    generation = max((item.generation for item in rank_files), default=-1)
    return metadata | ({"generation": generation} if generation >= 0 else {})


def _there_already(out: Path) -> JsonObject:
    """The metadata of an existing merged file; {} if there is none, or if it is damaged and may be replaced.

    Raises UsageError if fsbarrier did not write the file.
    """
    # List the folder first, because NFS may cache the absence of a name for 30 s.
    if out.name not in {path.name for path in out.parent.iterdir()}:
        return {}
    try:
        existing = merged_metadata(out)
    except NotOurs as error:
        raise UsageError(f"{error}; not overwriting it, move it away") from None
    except FormatError:
        return {}
    if not str(existing.get("created_by", "")).startswith("fsbarrier"):
        raise UsageError(f"{out}: it was not written by fsbarrier; not overwriting it, move it away")
    return existing
