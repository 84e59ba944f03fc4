"""Reads groups that an earlier attempt rolled out but could not score, so that only their rewards are computed again."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from fsbarrier.data.trajectory import Trajectory
from fsbarrier.data.trajectory_reader import read_trajectories
from fsbarrier.data.trajectory_scan import GroupEntry, opened, scan_shard
from fsbarrier.errors import FsbarrierError
from fsbarrier.protocol.facts import Payload


class EarlierGroups:
    """Finds such groups in their part files. `parts` have `path`, `valid_bytes` and `tasks`, as in a decision."""

    def __init__(self, parts: Sequence[Payload]) -> None:
        self._parts = {task: part for part in parts for task in part["tasks"]}
        self._entries: dict[str, dict[int, GroupEntry]] = {}

    def __contains__(self, task: int) -> bool:
        """Whether such a group of this task exists."""
        return task in self._parts

    def trajectories_of(self, task: int) -> list[Trajectory] | None:
        """The group of a task. None if it must be rolled out again, because it is unreadable, or the agent or engine had failed."""
        part = self._parts[task]
        path = Path(part["path"])
        try:
            group = self._groups(path, part["valid_bytes"])[task]
            with opened(path) as fd:
                found = read_trajectories(fd, group)
        except (FsbarrierError, KeyError) as error:
            print(f"task {task} is rolled out again: cannot read {path}: {error}", file=sys.stderr)
            return None
        whole = all(item["finish_reason"] != "error" for item in found)
        return found if whole else None

    def _groups(self, path: Path, valid_bytes: int) -> dict[int, GroupEntry]:
        groups = self._entries.get(str(path))
        if groups is None:
            scan = scan_shard(path, valid_bytes, verify=False)
            groups = self._entries[str(path)] = {group.task_index: group for group in scan.groups}
        return groups
