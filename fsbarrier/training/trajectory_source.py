"""Reads the trajectories of a batch: merged files, also of other runs, and what a user made with torch.save."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from fsbarrier.data.trajectory import Trajectory
from fsbarrier.errors import UsageError
from fsbarrier.trajectories import load


def read_merged(path: Path) -> tuple[str | None, Iterator[list[Trajectory]]]:
    """The run that made a merged file (None: unknown), and its groups. The file may also be one that the user made with torch.save.

    Raises UsageError for other files, StoreError.
    """
    found = load(path)
    run_id, metadata = None, found["metadata"]
    if metadata.get("finished") is False:
        # A growing file of a rank contains only a part of the rollouts.
        raise UsageError(f"{path} is a rank's unfinished file; merge it first (fsbarrier aggregate)")
    if metadata.get("run_id") is not None:
        run_id = str(metadata["run_id"])
    if not all(isinstance(one, dict) for one in found["trajectories"]):
        raise UsageError(f"{path}: a trajectory is no dictionary")
    return run_id, _groups_of(found["trajectories"])


def _groups_of(trajectories: Iterable[Trajectory]) -> Iterator[list[Trajectory]]:
    """Group consecutive trajectories by task and policy version; in a merged file groups are contiguous."""
    group: list[Trajectory] = []
    for trajectory in trajectories:
        if group and _origin(trajectory) != _origin(group[0]):
            yield group
            group = []
        group.append(trajectory)
    if group:
        yield group


def _origin(trajectory: Trajectory) -> tuple[object, object]:
    return trajectory.get("task_index", trajectory.get("task_id")), trajectory.get("policy_version")
