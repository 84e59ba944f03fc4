"""Reads ranks' files and merged files alike. Only merged files need torch, which is then imported."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fsbarrier.data import merged_file
from fsbarrier.data.rank_file import FormatError, RankFile, opened, read_at, read_trajectories, scan_rank_file
from fsbarrier.data.trajectory import Trajectory, TrajectoryFile


def is_merged(path: Path) -> bool:
    """Whether the file was written by torch.save. Raises StoreError."""
    with opened(path) as fd:
        return read_at(fd, 0, len(merged_file.ZIP)) == merged_file.ZIP


def iter_trajectories(path: Path) -> Iterator[Trajectory]:
    """Iterate over the trajectories of a rank's file or a merged file; arrays are array.array.

    From a rank's growing file, it yields the whole groups, with one group in memory at a time. A merged file is loaded at once.
    Raises StoreError, FormatError (also for damage in a finished file).
    """
    if is_merged(path):
        yield from merged_file.load(path)["trajectories"]
        return
    scanned = scan_rank_file(path)
    _check_whole(scanned)
    for group in scanned.groups:
        yield from read_trajectories(path, group)


def load(path: Path) -> TrajectoryFile:
    """`{"trajectories": [...], "metadata": {...}}` of either file, with array.array for tensors. Raises StoreError, FormatError."""
    if is_merged(path):
        return merged_file.load(path)
    groups: dict[int, list[Trajectory]] = {}
    scanned = scan_rank_file(path, on_group=lambda group, its_own: groups.update({group.task_index: its_own}))
    _check_whole(scanned)
    trajectories = [trajectory for its_own in groups.values() for trajectory in its_own]
    return {"trajectories": trajectories, "metadata": {**scanned.header, "finished": scanned.finished}}


def _check_whole(scanned: RankFile) -> None:
    """Raises FormatError for damage in a finished file; in a growing one, only whole groups count anyway."""
    if scanned.finished and scanned.damaged:
        raise FormatError(f"{scanned.path}: {scanned.damaged[0]}")
