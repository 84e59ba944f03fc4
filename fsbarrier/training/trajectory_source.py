"""Where the trajectories of a batch come from: merged files of this run's iterations, of other runs, or made by torch.save."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from fsbarrier.data.trajectory import Trajectory
from fsbarrier.errors import UsageError
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.training.tensor_file import load_tensors
from fsbarrier.trajectories import NotOurs, iter_trajectories, scan_shard


def merged_files(named: Sequence[Path], iteration: int, iterations: int) -> list[Path]:
    """The files to read, newest first. A run directory stands for its own files of `iteration` and those before, `iterations` in all."""
    if len(named) != 1 or not named[0].is_dir():
        return list(named)
    numbers = range(iteration, max(0, iteration - iterations), -1)
    return [RunPaths(named[0]).merged("train", number) for number in numbers]


def run_of(path: Path) -> str | None:
    """The run that made a merged file; None where it does not say."""
    try:
        found = scan_shard(path, verify=False).header.get("run_id")
    except NotOurs:
        return None
    return str(found) if found is not None else None


def read_groups(path: Path) -> Iterator[list[Trajectory]]:
    """The groups of a merged file, one in memory at a time. Raises UsageError and ProgramFailed where it is none."""
    return _groups_of(_trajectories_in(path))


def _trajectories_in(path: Path) -> Iterator[Trajectory]:
    try:
        scan = scan_shard(path, verify=False)
    except NotOurs:
        # Made by torch.save, maybe of scripts of the user's own.
        found = load_tensors(path, "file of trajectories").get("trajectories")
        if not isinstance(found, list):
            raise UsageError(f"{path} is no file of trajectories: it has no list of that name") from None
        yield from found
        return
    # A file that is still growing holds a part of the rollouts, which would look like all of them.
    if not scan.finished:
        raise UsageError(f"{path} is not a whole file of trajectories; merge it again (fsbarrier.aggregate)")
    yield from iter_trajectories(path)


def _groups_of(trajectories: Iterable[Trajectory]) -> Iterator[list[Trajectory]]:
    """Consecutive trajectories of one task and policy version; a merged file holds each group together."""
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
