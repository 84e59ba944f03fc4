"""The sources of a batch's trajectories: merged files of this run or other runs, or files made with torch.save."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from fsbarrier.data.trajectory import Trajectory
from fsbarrier.errors import UsageError
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.training.tensor_file import load_tensors
from fsbarrier.trajectories import NotOurs, iter_trajectories, scan_shard


def merged_files(named: Sequence[Path], iteration: int, iterations: int) -> list[Path]:
    """The files to read, newest first. For a run directory: its last `iterations` files up to `iteration`."""
    if len(named) != 1 or not named[0].is_dir():
        return list(named)
    numbers = range(iteration, max(0, iteration - iterations), -1)
    return [RunPaths(named[0]).merged("train", number) for number in numbers]


def run_of(path: Path) -> str | None:
    """The run that made a merged file; None if unknown."""
    try:
        found = scan_shard(path, verify=False).header.get("run_id")
    except NotOurs:
        return None
    return str(found) if found is not None else None


def read_groups(path: Path) -> Iterator[list[Trajectory]]:
    """The groups of a merged file, with one in memory at a time. Raises UsageError and ProgramFailed for other files."""
    return _groups_of(_trajectories_in(path))


def _trajectories_in(path: Path) -> Iterator[Trajectory]:
    try:
        scan = scan_shard(path, verify=False)
    except NotOurs:
        # Made with torch.save, possibly by the user's own scripts.
        found = load_tensors(path, "file of trajectories").get("trajectories")
        if not isinstance(found, list):
            raise UsageError(f'{path} is not a trajectory file: it has no list "trajectories"') from None
        yield from found
        return
    # A growing file contains only a part of the rollouts.
    if not scan.finished:
        raise UsageError(f"{path} is an incomplete trajectory file; merge it again (fsbarrier aggregate)")
    yield from iter_trajectories(path)


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


def _origin(trajectory: Trajectory) -> tuple[int, int]:
    return trajectory["task_index"], trajectory["policy_version"]
