"""Merges the groups of ranks' files into one file, atomically: each expected task once, with all checksums verified.

merge_plan.py selects the groups from the files' summaries. `collect` reads them, and plans again without those that are damaged.
`publish` writes the result, which torch.load opens, with one rename. `aggregate.py` is the command.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsbarrier import __version__
from fsbarrier.data import merged_file
from fsbarrier.data.group_stats import mean_reward
from fsbarrier.data.merge_plan import GroupPlace, MergePlan, MergeRequest, make_plan, missing_text
from fsbarrier.data.rank_file import (
    FormatError,
    check_plain,
    opened,
    read_trajectories,
)
from fsbarrier.data.trajectory import Trajectory
from fsbarrier.errors import StoreError, UsageError
from fsbarrier.store.files import fsync_dir, make_dirs, open_new, rename
from fsbarrier.store.identity import host_name
from fsbarrier.store.retry import fails, patiently


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


#: called with the trajectories read so far, and all of them
OnProgress = Callable[[int, int], None]


def merge(request: MergeRequest, on_progress: OnProgress | None = None) -> AggregateReport:
    """Merge the groups of the parts into `request.out`, atomically (by rename).

    Raises UsageError (missing tasks, a part that is no rank's file), StoreError.
    """
    return publish(collect(request, on_progress))


# --- what is merged -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Collected:
    """The groups of a merge in memory."""

    request: MergeRequest
    plan: MergePlan
    #: by task index
    groups: dict[int, list[Trajectory]]
    damaged: tuple[str, ...]

    @property
    def trajectories(self) -> Iterator[Trajectory]:
        return (trajectory for task in sorted(self.groups) for trajectory in self.groups[task])


def collect(request: MergeRequest, on_progress: OnProgress | None = None) -> Collected:
    """Read the groups to merge. Raises UsageError (missing tasks), StoreError."""
    check_plain(request.metadata, "the metadata")
    excluded: set[GroupPlace] = set()
    damaged: list[str] = []
    # Only reading shows which groups are damaged; those are excluded from the next plan.
    while True:
        plan = make_plan(request, excluded)
        if plan.missing and not request.allow_partial:
            why = f"; damaged: {', '.join(damaged)}" if damaged else ""
            raise UsageError(
                f"{request.out.name}: {missing_text(plan.missing)}{why}. To merge without them: --allow-partial"
            )
        if not plan.taken:
            raise UsageError(f"{request.out.name}: the parts contain no groups to merge")
        groups, bad = _read(request, plan, on_progress or (lambda done, total: None))
        if not bad:
            return Collected(request, plan, groups, tuple(damaged))
        excluded |= set(bad)
        damaged += [
            f"task {task} of {request.parts[place[0]].path.name}" for place, task in sorted(bad.items())
        ]


def _read(
    request: MergeRequest, plan: MergePlan, on_progress: OnProgress
) -> tuple[dict[int, list[Trajectory]], dict[GroupPlace, int]]:
    """The planned groups by task, and the damaged ones with their task."""
    total = sum(group.stats.trajectories for group in plan.by_task)
    groups: dict[int, list[Trajectory]] = {}
    bad: dict[GroupPlace, int] = {}
    done = 0
    for position, part in enumerate(request.parts):
        chosen = [group for at, group in plan.taken.values() if at == position]
        if not chosen:
            continue
        with opened(part.path) as fd:
            for group in sorted(chosen, key=lambda one: one.offset):
                try:
                    groups[group.task_index] = read_trajectories(fd, group)
                except FormatError:
                    bad[position, group.offset] = group.task_index
                done += group.stats.trajectories
                on_progress(done, total)
    return groups, bad


# --- the merged file ----------------------------------------------------------------------------------------------------


def publish(collected: Collected) -> AggregateReport:
    """Write the merged file under a temporary name, and rename it. Raises StoreError."""
    request, plan = collected.request, collected.plan
    metadata = _metadata(collected)
    try:
        # The rename is the last step, so all of it can be retried. A temporary file with a random name exists only because this
        # process made it although its mount said otherwise.
        size = patiently(
            lambda: _write(collected, metadata),
            passes=lambda error: fails(error) or isinstance(error, FileExistsError),
        )
    except OSError as error:
        raise StoreError(f"{request.out}: cannot merge: {error.strerror or error}") from error
    stats = [group.stats for group in plan.by_task]
    return AggregateReport(
        out=str(request.out),
        trajectories=sum(one.trajectories for one in stats),
        groups=len(stats),
        missing=plan.missing,
        duplicates_dropped=plan.duplicates,
        bytes=size,
        reward_mean=mean_reward(stats),
        damaged=collected.damaged,
        unexpected=plan.unexpected,
        left_out=len(plan.without_signal) + len(plan.surplus),
        rolled_out_reward_mean=plan.rolled_out_reward_mean,
        unjudged=sum(one.unjudged for one in stats),
        figures=plan.figures,
    )


def _metadata(collected: Collected) -> dict[str, object]:
    """The metadata of the merged file: from the request, and the results of the merge."""
    request, plan = collected.request, collected.plan
    stats = [group.stats for group in plan.by_task]
    return {
        **request.metadata,
        "trajectories": sum(one.trajectories for one in stats),
        "groups": len(stats),
        "tasks": sorted(plan.taken),
        "reward_mean": mean_reward(stats),
        "unjudged": sum(one.unjudged for one in stats),
        "parts": [
            {"name": part.path.name, "bytes": there.valid_bytes, "groups": len(there.groups)}
            for part, there in zip(request.parts, plan.files, strict=True)
        ],
        "missing": list(plan.missing),
        "without_signal": list(plan.without_signal),
        "surplus": list(plan.surplus),
        "rolled_out": {"trajectories": plan.rolled_out, "reward_mean": plan.rolled_out_reward_mean},
        "damaged": list(collected.damaged),
        "created_by": f"fsbarrier {__version__}",
    }


def _write(collected: Collected, metadata: dict[str, object]) -> int:
    """The size of the file. Raises OSError."""
    out = collected.request.out
    make_dirs(out.parent)
    remove_leftovers(out)
    temporary = out.with_name(f"{_temporary_start(out)}{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        tensors: list[Any] = []
        for task in sorted(collected.groups):
            tensors += merged_file.as_tensors(collected.groups[task])
        fd = open_new(temporary)
        try:
            merged_file.save(fd, tensors, metadata)
            os.fsync(fd)
        finally:
            os.close(fd)
        size = temporary.stat().st_size
        rename(temporary, out)
        fsync_dir(out.parent)
        return size
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def remove_leftovers(out: Path) -> None:
    """Remove the temporary files of merges into `out` that were killed on this machine."""
    start = _temporary_start(out)
    for name in os.listdir(out.parent):
        match = re.fullmatch(re.escape(start) + r"(\d+)\.[0-9a-f]{8}\.tmp", name)
        if match and int(match[1]) != os.getpid() and not Path("/proc", match[1]).exists():
            with contextlib.suppress(OSError):
                os.unlink(out.parent / name)


def _temporary_start(out: Path) -> str:
    return f".{out.name}.{re.sub('[^A-Za-z0-9-]', '-', host_name())}."
