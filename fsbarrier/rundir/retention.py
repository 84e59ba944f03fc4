"""Removes what old iterations left, at the one place where nothing of them is needed any more: once their update is published."""

from __future__ import annotations

import re
from pathlib import Path

from fsbarrier.rundir.paths import SPLITS, RunPaths

_BATCH = re.compile(r"batch-(\d{6,})\.g\d{4,}\.pt")


def remove_old(log_path: Path, trained_on: int, *, batches: int, trajectories: int) -> list[int]:
    """Remove training batches and trajectories that are `batches` (`trajectories`) or more iterations behind `trained_on`.

    0: none is removed. Later iterations, which may have been rolled out already, are never touched. Gives the iterations whose
    trajectories were removed. A file that cannot be removed is left for the next time.
    """
    paths = RunPaths(log_path)
    if batches:
        folder = paths.batch(0, 0).parent
        for path in _listed(folder):
            match = _BATCH.fullmatch(path.name)
            if match and int(match[1]) <= trained_on - batches:
                _remove(path)
    gone: set[int] = set()
    for split in SPLITS if trajectories else ():
        first = paths.merged(split, 0)
        name = re.compile(re.escape(first.name.removesuffix("0")) + r"(\d+)(\.g\d{4,}|_rank_\d+.*)?")
        for path in _listed(first.parent):
            match = name.fullmatch(path.name)
            if match and int(match[1]) <= trained_on - trajectories and _remove(path):
                gone.add(int(match[1]))
    return sorted(gone)


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _remove(path: Path) -> bool:
    try:
        path.unlink()
    except OSError:
        return False
    return True
