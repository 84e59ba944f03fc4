"""After a disaster: what each rank left of an iteration, and how to make the directory fit to go on.

Nothing is deleted: what cannot be used is moved to <log-path>/quarantine/. The normal command needs no recovery in order to go
on; this is for people who want to see, to merge by hand, or to get foreign and damaged files out of the way.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from fsbarrier import files
from fsbarrier.data import rankfiles
from fsbarrier.data.rankfiles import RankFile
from fsbarrier.data.shardscan import scan_shard
from fsbarrier.errors import FsbarrierError, UsageError
from fsbarrier.protocol.facts import CorruptRecord, Fact, decode
from fsbarrier.rundir import runrecord
from fsbarrier.rundir.names import SPLITS, parse_trajectories
from fsbarrier.rundir.paths import RunPaths

#: of a file's state, whether it is moved out of the way
STATES = {
    "complete": False,
    "partial": False,
    "torn": False,
    "copy": False,
    "damaged": True,
    "foreign": True,
    "unreadable": True,
    "temporary": True,
}


@dataclass(frozen=True)
class Found:
    """One trajectory file of the iteration. `state`: one of STATES."""

    path: Path
    split: str
    node_rank: int | None  # None: a merged file
    state: str
    groups: int = 0
    trajectories: int = 0
    valid_bytes: int = 0
    torn_bytes: int = 0
    note: str = ""

    @property
    def usable(self) -> bool:
        return not STATES[self.state]


def inspect(log_path: Path, iteration: int) -> list[Found]:
    """What is there of `iteration`, in the order in which a merge takes from it. Raises UsageError where there is no run."""
    run_id = runrecord.load(log_path).run_id
    found: list[Found] = []
    for split in SPLITS:
        merged = RunPaths(log_path).merged(split, iteration)
        found += [_as_found(item, split) for item in rankfiles.find(log_path, split, iteration)]
        # What was being written to the merged file, or to a rank's. What follows the number tells iteration 1 from 12.
        unfinished = (f".{merged.name}.", f".{merged.name}_rank_")
        for path in sorted(merged.parent.iterdir()) if merged.parent.is_dir() else ():
            name = parse_trajectories(path.name)
            if name is not None and name.rank is None and (name.split, name.iteration) == (split, iteration):
                found.append(_merged(path, split, run_id))
            elif path.name.startswith(unfinished):
                found.append(Found(path, split, None, "temporary", note="left by a program that was killed"))
    return found


def _as_found(item: RankFile, split: str) -> Found:
    scan = item.scan
    if scan is None or item.state == "other run":
        state = "foreign" if item.state in ("foreign", "other run") else "unreadable"
        return Found(item.path, split, item.node_rank, state, note=item.note)
    if not scan.header and scan.torn_bytes:
        return Found(item.path, split, item.node_rank, "unreadable", note="nothing in it can be read")
    notes = [item.note] if item.note else []
    if scan.torn_bytes:
        notes.append(f"{scan.torn_bytes} bytes at its end are dropped")
    state = {"finished": "complete", "growing": "partial"}.get(item.state, item.state)
    sizes = len(scan.groups), scan.trajectories, scan.valid_bytes, scan.torn_bytes
    return Found(item.path, split, item.node_rank, state, *sizes, note="; ".join(notes))


def _merged(path: Path, split: str, run_id: str) -> Found:
    try:
        scan = scan_shard(path)
    except (FsbarrierError, OSError) as error:
        return Found(path, split, None, "damaged", note=str(error).removeprefix(f"{path}: "))
    absent = tuple(scan.header.get("missing") or ())
    sizes = len(scan.groups), scan.trajectories, scan.valid_bytes, scan.torn_bytes
    if scan.header.get("run_id", run_id) != run_id:
        return Found(path, split, None, "foreign", *sizes, note=f"made by run {scan.header['run_id']}")
    if scan.damaged or scan.torn_bytes or not scan.finished:
        return Found(path, split, None, "damaged", *sizes, note="; ".join(scan.damaged) or "cut off")
    note = f"merged without {len(absent)} tasks" if absent else ""
    return Found(path, split, None, "partial" if absent else "complete", *sizes, note)


def useless(found: Iterable[Found]) -> list[Found]:
    """The files that nothing may use."""
    return [item for item in found if not item.usable]


def gone(log_path: Path, split: str, iteration: int, found: Iterable[Found]) -> list[Path]:
    """The merged files of a split that the run's own decisions name and that are not there, or not whole."""
    paths = RunPaths(log_path)
    whole = {item.path.name for item in found if item.node_rank is None and item.usable}
    ours = {name for name in _decided(paths, iteration) if name.startswith(f"{split}_")}
    return [paths.trajectories(split) / name for name in sorted(ours - whole)]


def _decided(paths: RunPaths, iteration: int) -> Iterator[str]:
    """The names of the merged files in the facts of an iteration."""
    for path in sorted(paths.coordination.glob(f"gen-*/iter-{iteration:06d}/p*/node-*.done")):
        try:
            merged = decode(path.read_bytes(), Fact).value.get("merged")
        except (OSError, CorruptRecord):
            continue
        if isinstance(merged, str):
            yield Path(merged).name


def restore(merged: Path, names: Iterable[Path]) -> list[Path]:
    """Give a merged file the names that decisions know it by, so that the run goes on from it. Raises OSError."""
    chosen = [name for name in names if not name.exists()]
    for name in chosen:
        files.link_or_copy(merged, name)
    return chosen


def quarantine(log_path: Path, items: Iterable[Found]) -> Path | None:
    """Move files out of the way, with their other names, keeping the names; gives the folder. Raises OSError, UsageError."""
    chosen = [name for item in items for name in _all_names(item.path)]
    if not chosen:
        return None
    folder = log_path / "quarantine" / datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    files.make_dirs(folder)
    for path in dict.fromkeys(chosen):
        target = folder / path.name
        if target.exists():
            raise UsageError(f"{target} is there already; nothing was moved over it")
        os.rename(path, target)
        files.fsync_dir(path.parent)
    files.fsync_dir(folder)
    return folder


def _all_names(path: Path) -> list[Path]:
    """A file's names in its folder: a finished part has that of the rank's checkpoint too."""
    inode = path.lstat().st_ino
    return [other for other in sorted(path.parent.iterdir()) if other.lstat().st_ino == inode]
