"""After a disaster: what each rank left of an iteration, and how to make the directory fit to go on.

Nothing is deleted: what cannot be used is moved to <log-path>/quarantine/. The normal command needs no recovery in order to go
on; this is for people who want to see, to merge by hand, or to get foreign files out of the way.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from fsbarrier import files, trajectories
from fsbarrier.errors import FsbarrierError, UsageError
from fsbarrier.paths import SPLITS, RunPaths
from fsbarrier.start import runrecord

_FILE = re.compile(r"(train|test)_trajectories\.pt\.iteration(\d+)(?:_rank_(\d+)\.checkpoint(\..*\.part)?)?")


@dataclass(frozen=True)
class Found:
    """One trajectory file of the iteration. `state`: complete, partial, torn, foreign or unreadable; `missing`: task indices."""

    path: Path
    split: str
    node_rank: int | None  # None: a merged file
    state: str
    groups: int
    trajectories: int
    valid_bytes: int
    torn_bytes: int
    missing: tuple[int, ...]
    note: str

    @property
    def usable(self) -> bool:
        return self.state in ("complete", "partial", "torn") and self.groups > 0

    @property
    def is_part(self) -> bool:
        return self.path.name.endswith(".part")


def inspect(log_path: Path, iteration: int) -> list[Found]:
    """What is there of `iteration`, in the order of split, rank and age. Raises UsageError where there is no run."""
    record, paths = runrecord.load(log_path), RunPaths(log_path)
    found = []
    for split in SPLITS:
        folder = paths.trajectories(split)
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            match = _FILE.fullmatch(path.name)
            if match is None or int(match[2]) != iteration:
                continue
            found.append(_look_at(path, split, int(match[3]) if match[3] else None, record.run_id))
    return found


def _look_at(path: Path, split: str, rank: int | None, run_id: str) -> Found:
    try:
        scan = trajectories.scan_shard(path)
    except (FsbarrierError, OSError) as error:
        return Found(path, split, rank, "unreadable", 0, 0, 0, path.stat().st_size, (), str(error))
    count = sum(group.trajectories for group in scan.groups)
    there = {group.task_index for group in scan.groups}
    assigned = scan.header.get("assigned") or ()
    missing = tuple(task for task in assigned if task not in there)
    owner = scan.header.get("run_id", run_id)
    if owner != run_id:
        state, note = "foreign", f"made by run {owner}"
    elif scan.torn_bytes:
        state, note = "torn", f"{scan.torn_bytes} bytes at its end are dropped"
    elif missing or (rank is not None and not scan.finished):
        state, note = (
            "partial",
            f"{len(missing)} of {len(assigned)} tasks missing" if assigned else "unfinished",
        )
    else:
        state, note = "complete", ""
    return Found(
        path, split, rank, state, len(scan.groups), count, scan.valid_bytes, scan.torn_bytes, missing, note
    )


def useless(found: Iterable[Found]) -> list[Found]:
    """The files that no merge may use."""
    return [item for item in found if not item.usable]


def quarantine(log_path: Path, items: Iterable[Found]) -> Path | None:
    """Move files out of the way, keeping their names; gives the folder. Raises OSError, UsageError."""
    chosen = list(items)
    if not chosen:
        return None
    folder = log_path / "quarantine" / datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    files.make_dirs(folder)
    for item in chosen:
        target = folder / item.path.name
        if target.exists():
            raise UsageError(f"{target} is there already; nothing was moved over it")
        os.rename(item.path, target)
    return folder
