"""Merges the groups of ranks' files into one file, atomically: each expected task once, with all checksums verified.

`collect` reads the files and chooses the groups. `publish` writes them as the file that torch.load opens, with one rename. aggregate.py
is the command.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsbarrier import __version__
from fsbarrier.data import merged_file
from fsbarrier.data.group_stats import GroupStats, metrics
from fsbarrier.data.rank_file import GroupEntry, OnGroup, RankFile, check_plain, scan_rank_file
from fsbarrier.data.trajectory import Trajectory
from fsbarrier.errors import StoreError, UsageError
from fsbarrier.protocol.facts import JsonObject
from fsbarrier.store.files import make_dirs, write_atomic
from fsbarrier.store.retry import patiently

#: missing tasks that a message names
MOST_NAMED = 12


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
    metadata: JsonObject
    #: The required task indices; groups of other tasks are dropped. None: unknown.
    expected: tuple[int, ...] | None = None
    #: Keep only this many groups: first those with differing rewards, in the order of `expected`, then others.
    keep: int | None = None
    #: If tasks are missing, merge without them and list them in the metadata.
    allow_partial: bool = False


@dataclass(frozen=True, slots=True)
class AggregateReport:
    """The result of a merge; `dataclasses.asdict` converts it to JSON."""

    out: str
    trajectories: int
    groups: int
    #: task indices
    missing: tuple[int, ...]
    duplicates_dropped: int
    #: size of the merged file
    bytes: int
    reward_mean: float | None
    already_done: bool = False
    #: groups dropped because of a checksum mismatch
    damaged: tuple[str, ...] = ()
    #: groups dropped because their task is not expected
    unexpected: int = 0
    #: groups dropped because enough others were kept: without signal, or surplus
    left_out: int = 0
    #: mean over all groups, including dropped ones
    rolled_out_reward_mean: float | None = None
    #: trajectories without a score, because the reward or the agent failed; the means ignore them
    unjudged: int = 0
    #: metrics over all groups, including dropped ones (data/group_stats.py)
    figures: dict[str, float] = field(default_factory=dict)


def merge(request: MergeRequest) -> AggregateReport:
    """Merge the groups of the parts into `request.out`, atomically (by rename).

    Raises UsageError (missing tasks, a part that is no rank's file), StoreError.
    """
    return publish(collect(request))


# --- the groups to merge -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Collected:
    """The groups of a merge in memory."""

    request: MergeRequest
    files: tuple[RankFile, ...]
    #: the groups to merge, by task index
    groups: dict[int, list[Trajectory]]
    #: statistics of all groups that were rolled out, including groups that are not merged
    stats: Mapping[int, GroupStats]
    #: groups dropped because an earlier part contains their task, and those whose task is not expected
    duplicates: int
    unexpected: int
    missing: tuple[int, ...]
    #: tasks dropped because their rewards are all equal and there are enough others
    without_signal: tuple[int, ...]
    #: tasks dropped because there are enough before them
    surplus: tuple[int, ...]

    @property
    def damaged(self) -> tuple[str, ...]:
        return tuple(f"{file.path.name}: {what}" for file in self.files for what in file.damaged)

    @property
    def trajectories(self) -> Iterator[Trajectory]:
        return (trajectory for task in sorted(self.groups) for trajectory in self.groups[task])


def collect(request: MergeRequest) -> Collected:
    """Read the groups to merge. Raises UsageError (a part that is no rank's file), StoreError."""
    expected = request.expected
    wanted = None if expected is None else frozenset(expected)
    groups: dict[int, list[Trajectory]] = {}
    stats: dict[int, GroupStats] = {}
    dropped = Counter[str]()

    def take_of(part: Part) -> OnGroup:
        # Of several groups of one task in a part, the last one counts, and each task is counted once.
        seen: set[int] = set()
        taken: set[int] = set()

        def take(group: GroupEntry, trajectories: list[Trajectory]) -> None:
            task = group.task_index
            if part.tasks is not None and task not in part.tasks:
                return
            again = task in seen
            seen.add(task)
            if wanted is not None and task not in wanted:
                dropped["unexpected"] += not again
            elif task in groups and task not in taken:
                dropped["duplicates"] += not again
            else:
                taken.add(task)
                groups[task], stats[task] = trajectories, group.stats

        return take

    files = [_read_part(part, take_of(part), must_be_whole=wanted is None) for part in request.parts]
    order = [task for task in dict.fromkeys(groups if expected is None else expected) if task in groups]
    keep = len(groups) if request.keep is None else request.keep
    # Groups with signal are kept first.
    surplus = [task for task in order if stats[task].signal][keep:]
    others = [task for task in order if not stats[task].signal]
    without_signal = others[max(0, keep - (len(order) - len(others))) :]
    for task in (*surplus, *without_signal):
        del groups[task]
    return Collected(
        request,
        tuple(files),
        groups,
        stats,
        dropped["duplicates"],
        dropped["unexpected"],
        () if wanted is None else tuple(sorted(wanted - stats.keys())),
        tuple(without_signal),
        tuple(surplus),
    )


def _read_part(part: Part, take: OnGroup, *, must_be_whole: bool) -> RankFile:
    scanned = scan_rank_file(part.path, part.valid_bytes, take)
    # If the expected tasks are known, a lost group is detected as a missing task. Otherwise compare the sizes.
    if must_be_whole and part.valid_bytes is not None and scanned.valid_bytes < part.valid_bytes:
        raise StoreError(
            f"{part.path}: only {scanned.valid_bytes} of {part.valid_bytes} acknowledged bytes are valid"
        )
    return scanned


# --- the merged file ----------------------------------------------------------------------------------------------------


def publish(collected: Collected) -> AggregateReport:
    """Write the merged file; its groups are then no longer in `collected`. Raises UsageError (missing tasks), StoreError."""
    request, out = collected.request, collected.request.out
    check_plain(request.metadata, "the metadata")
    check_nothing_is_missing(collected)
    if not collected.groups:
        raise UsageError(f"{out.name}: the parts contain no groups to merge")
    all_stats = [collected.stats[task] for task in sorted(collected.stats)]
    stats = GroupStats.total(collected.stats[task] for task in sorted(collected.groups))
    merged: dict[str, Any] = {
        "trajectories": stats.trajectories,
        "groups": len(collected.groups),
        "reward_mean": stats.reward_mean,
        "unjudged": stats.unjudged,
    }
    metadata = {**request.metadata, **merged, **_metadata(collected, all_stats)}
    # Remove each group from `collected`, so that it is not in memory twice.
    groups = (collected.groups.pop(task) for task in sorted(collected.groups))
    content = merged_file.encode(groups, metadata)
    try:
        make_dirs(out.parent)
        patiently(lambda: write_atomic(out, content, durable=True))
    except OSError as error:
        raise StoreError(f"{out}: cannot merge: {error.strerror or error}") from error
    return AggregateReport(
        out=str(out),
        **merged,
        missing=collected.missing,
        duplicates_dropped=collected.duplicates,
        bytes=len(content),
        damaged=collected.damaged,
        unexpected=collected.unexpected,
        left_out=len(collected.without_signal) + len(collected.surplus),
        rolled_out_reward_mean=GroupStats.total(all_stats).reward_mean,
        figures=metrics(all_stats),
    )


def check_nothing_is_missing(collected: Collected) -> None:
    """Raises UsageError that names the missing tasks, unless the user allows a merge without them."""
    if collected.missing and not collected.request.allow_partial:
        why = f"; damaged: {', '.join(collected.damaged)}" if collected.damaged else ""
        out = collected.request.out.name
        raise UsageError(
            f"{out}: {missing_text(collected.missing)}{why}. To merge without them: --allow-partial"
        )


def _metadata(collected: Collected, all_stats: Sequence[GroupStats]) -> dict[str, object]:
    """The metadata of the merged file, which describes how it was made."""
    rolled_out = GroupStats.total(all_stats)
    return {
        "tasks": sorted(collected.groups),
        "parts": [
            {"name": file.path.name, "bytes": file.valid_bytes, "groups": len(file.groups)}
            for file in collected.files
        ],
        "missing": list(collected.missing),
        "without_signal": list(collected.without_signal),
        "surplus": list(collected.surplus),
        "rolled_out": {"trajectories": rolled_out.trajectories, "reward_mean": rolled_out.reward_mean},
        "damaged": list(collected.damaged),
        "created_by": f"fsbarrier {__version__}",
    }


def missing_text(missing: Sequence[int]) -> str:
    """The number and the list of missing tasks, as text."""
    are = "s are" if len(missing) > 1 else " is"
    named = ", ".join(map(str, missing[:MOST_NAMED])) + (", …" if len(missing) > MOST_NAMED else "")
    return f"{len(missing)} task{are} missing ({named})"
