"""Removes what old iterations left. Called once an update is published, when nobody needs them any more."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from fsbarrier import reading
from fsbarrier.rundir import names
from fsbarrier.rundir.paths import RunPaths


def remove_old(
    log_path: Path,
    trained_on: int,
    *,
    batches: int,
    trajectories: int,
    between: Callable[[], None] = lambda: None,
) -> list[int]:
    """Remove training batches and trajectories that are `batches` (`trajectories`) or more iterations behind `trained_on`.

    0: none is removed. Later iterations, which may have been rolled out already, are never touched. Gives the iterations whose
    trajectories were removed. A file that cannot be removed is left for the next time. `between` is called before each file, and
    may end it all by raising.
    """
    paths = RunPaths(log_path)
    if batches:
        for path in _listed(paths.batches):
            between()
            batch = names.BATCH.parse(path.name)
            if batch is not None and batch.number <= trained_on - batches:
                _remove(log_path, path)
    gone: set[int] = set()
    for split in names.SPLITS if trajectories else ():
        for path in _listed(paths.trajectories(split)):
            between()
            file = names.parse_trajectories(path.name)
            if file is None or file.split != split:
                continue
            if file.iteration <= trained_on - trajectories and _remove(log_path, path):
                gone.add(file.iteration)
    return sorted(gone)


def _listed(folder: Path) -> list[Path]:
    try:
        return [folder / name for name in sorted(os.listdir(folder))]
    except OSError:
        return []


def _remove(log_path: Path, path: Path) -> bool:
    """Whether it could be done. What lies behind a link is not this run's."""
    try:
        with reading.folder_below(log_path, path.parent) as folder:
            os.unlink(path.name, dir_fd=folder)
    except OSError:
        return False
    return True
