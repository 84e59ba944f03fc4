"""Plans a merge: selects the groups and their files from the files' summaries, before anything is written."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fsbarrier.data.group_stats import mean_reward, metrics
from fsbarrier.data.rank_file import GroupEntry, RankFile, scan_rank_file
from fsbarrier.errors import StoreError
from fsbarrier.protocol.facts import JsonObject


@dataclass(frozen=True, slots=True)
class Part:
    """An input file."""

    path: Path
    #: use only groups within the first bytes of the file; None: all complete groups
    valid_bytes: int | None = None
    #: use only these task indices; None: all
    tasks: frozenset[int] | None = None


@dataclass(frozen=True, slots=True)
class MergeRequest:
    """The inputs and output of a merge.

    If several parts contain a task, the first one is used, or the next one if its bytes are damaged.
    """

    parts: tuple[Part, ...]
    out: Path
    metadata: dict[str, object]
    #: The required task indices; groups of other tasks are dropped. None: unknown.
    expected: tuple[int, ...] | None = None
    #: Keep only this many groups: first those with differing rewards, in the order of `expected`, then others.
    keep: int | None = None
    #: If tasks are missing, merge without them and list them in the metadata.
    allow_partial: bool = False

    @classmethod
    def from_spec(cls, spec: JsonObject) -> MergeRequest:
        """The request in a worker's spec."""
        parts = [
            Part(
                Path(record["path"]),
                record["valid_bytes"],
                None if record["tasks"] is None else frozenset(record["tasks"]),
            )
            for record in spec["parts"]
        ]
        expected = None if spec["expected"] is None else tuple(spec["expected"])
        more = {name: spec[name] for name in ("keep", "allow_partial") if name in spec}
        return cls(tuple(parts), Path(spec["out"]), spec["metadata"], expected, **more)


#: A group: the part's position in the request, and the offset of its frame.
GroupPlace = tuple[int, int]


@dataclass(frozen=True)
class MergePlan:
    """The selected groups and their parts."""

    files: tuple[RankFile, ...]
    #: task index -> (position of the part, group)
    taken: dict[int, tuple[int, GroupEntry]]
    #: groups dropped because an earlier part contains their task
    duplicates: int
    #: groups dropped because their task is not expected
    unexpected: int
    missing: tuple[int, ...]
    #: tasks dropped because their rewards are all equal and there are enough others
    without_signal: tuple[int, ...]
    #: tasks dropped because there are enough before them
    surplus: tuple[int, ...]
    #: trajectories of all groups, including `without_signal` and `surplus`, and their mean reward
    rolled_out: int
    rolled_out_reward_mean: float | None
    #: their other metrics
    figures: dict[str, float]

    @property
    def by_task(self) -> list[GroupEntry]:
        return [self.taken[task][1] for task in sorted(self.taken)]


def make_plan(request: MergeRequest, excluded: Collection[GroupPlace] = ()) -> MergePlan:
    """Choose the groups to merge, reading only summaries; `excluded` groups are known to be damaged. Raises UsageError, StoreError."""
    expected = request.expected
    wanted = None if expected is None else frozenset(expected)
    found: list[RankFile] = []
    taken: dict[int, tuple[int, GroupEntry]] = {}
    duplicates = unexpected = 0
    for position, part in enumerate(request.parts):
        there = _scan_part(part, must_be_whole=wanted is None)
        found.append(there)
        for group in there.groups:
            if (position, group.offset) in excluded:
                continue
            if part.tasks is not None and group.task_index not in part.tasks:
                continue
            if wanted is not None and group.task_index not in wanted:
                unexpected += 1
            elif group.task_index in taken:
                duplicates += 1
            else:
                taken[group.task_index] = (position, group)
    order = dict.fromkeys(taken if expected is None else expected)
    surplus, without_signal = _left_out(
        [taken[task][1] for task in order if task in taken],
        len(taken) if request.keep is None else request.keep,
    )
    stats = [taken[task][1].stats for task in sorted(taken)]
    return MergePlan(
        files=tuple(found),
        taken={task: chosen for task, chosen in taken.items() if task not in {*surplus, *without_signal}},
        duplicates=duplicates,
        unexpected=unexpected,
        missing=() if wanted is None else tuple(sorted(wanted - taken.keys())),
        without_signal=without_signal,
        surplus=surplus,
        rolled_out=sum(one.trajectories for one in stats),
        rolled_out_reward_mean=mean_reward(stats),
        figures=metrics(stats),
    )


def _scan_part(part: Part, *, must_be_whole: bool) -> RankFile:
    found = scan_rank_file(part.path, part.valid_bytes, verify=False)
    # If the expected tasks are known, a lost group is detected as a missing task. Otherwise compare the sizes.
    if must_be_whole and part.valid_bytes is not None and found.valid_bytes < part.valid_bytes:
        raise StoreError(
            f"{part.path}: only {found.valid_bytes} of {part.valid_bytes} acknowledged bytes are valid"
        )
    return found


def _left_out(groups: Sequence[GroupEntry], keep: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tasks to drop so that `keep` groups remain, as (with signal, without): groups with signal are kept first."""
    useful = [group.task_index for group in groups if group.stats.signal]
    others = [group.task_index for group in groups if not group.stats.signal]
    return tuple(useful[keep:]), tuple(others[max(0, keep - len(useful)) :])


def missing_text(missing: tuple[int, ...]) -> str:
    """The number and the list of missing tasks, as text."""
    are = "s are" if len(missing) > 1 else " is"
    return f"{len(missing)} task{are} missing ({', '.join(ranges(missing))})"


def ranges(numbers: Sequence[int], most: int = 12) -> Iterator[str]:
    """Sorted numbers as ranges: 1-4, 7, 9; at most `most` items."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    for first, last in runs[:most]:
        yield str(first) if first == last else f"{first}-{last}"
    if len(runs) > most:
        yield "…"
