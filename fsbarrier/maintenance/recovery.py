"""After a disaster: what each rank left of an iteration, and how to make the directory fit to go on.

Nothing is deleted: what cannot be used is moved to <log-path>/quarantine/. The normal command needs no recovery in order to go
on; this is for people who want to see, to merge by hand, or to get foreign and damaged files out of the way.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from fsbarrier import files, reading
from fsbarrier.data import rankfiles
from fsbarrier.data.rankfiles import FileState, FoundFile
from fsbarrier.data.shardscan import scan_shard
from fsbarrier.errors import FsbarrierError, UsageError
from fsbarrier.protocol.facts import Fact
from fsbarrier.rundir import runrecord
from fsbarrier.rundir.journal import read_events
from fsbarrier.rundir.names import FACT, GENERATION_FOLDER, PHASE_FOLDER, SPLITS, parse_trajectories
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.record_store import LenientStore

#: What `fsbarrier recover` calls a state that `fsbarrier aggregate` calls otherwise.
_SHOWN = {
    FileState.FINISHED: "complete",
    FileState.GROWING: "partial",
    FileState.INCOMPLETE: "partial",
    FileState.OTHER_RUN: "foreign",
}


def shown_state(item: FoundFile) -> str:
    """A file's state as `fsbarrier recover` shows it."""
    return _SHOWN.get(item.state, item.state.value)


def inspect(log_path: Path, iteration: int) -> list[FoundFile]:
    """What is there of `iteration`, in the order in which a merge takes from it. Raises UsageError where there is no run."""
    run_id = runrecord.load(log_path).run_id
    found: list[FoundFile] = []
    for split in SPLITS:
        merged = RunPaths(log_path).merged(split, iteration)
        found += [_described(item) for item in rankfiles.find(log_path, split, iteration)]
        # What was being written to the merged file, or to a rank's. What follows the number tells iteration 1 from 12.
        unfinished = (f".{merged.name}.", f".{merged.name}_rank_")
        for path in sorted(merged.parent.iterdir()) if merged.parent.is_dir() else ():
            name = parse_trajectories(path.name)
            if name is not None and name.rank is None and (name.split, name.iteration) == (split, iteration):
                found.append(_merged(path, split, run_id))
            elif path.name.startswith(unfinished):
                note = "left by a program that was killed"
                found.append(FoundFile(path, split, None, FileState.TEMPORARY, note))
    return found


def _described(item: FoundFile) -> FoundFile:
    """A rank's file with a note on what of it is lost."""
    scan = item.scan
    if scan is None or item.state is FileState.OTHER_RUN:
        # Another run's groups do not count here.
        return replace(item, scan=None)
    if not scan.header and scan.torn_bytes:
        return replace(item, state=FileState.UNREADABLE, note="nothing in it can be read", scan=None)
    dropped = f"{scan.torn_bytes} bytes at its end are dropped" if scan.torn_bytes else ""
    return replace(item, note="; ".join(filter(None, (item.note, dropped))))


def _merged(path: Path, split: str, run_id: str) -> FoundFile:
    try:
        scan = scan_shard(path)
    except (FsbarrierError, OSError) as error:
        note = str(error).removeprefix(f"{path}: ")
        return FoundFile(path, split, None, FileState.DAMAGED, note)
    absent = tuple(scan.header.get("missing") or ())
    if scan.header.get("run_id", run_id) != run_id:
        state, note = FileState.OTHER_RUN, f"made by run {scan.header['run_id']}"
    elif scan.damaged or scan.torn_bytes or not scan.finished:
        state, note = FileState.DAMAGED, "; ".join(scan.damaged) or "cut off"
    elif absent:
        state, note = FileState.INCOMPLETE, f"merged without {len(absent)} tasks"
    else:
        state, note = FileState.FINISHED, ""
    return FoundFile(path, split, None, state, note, scan)


def gone(log_path: Path, split: str, iteration: int, found: Iterable[FoundFile]) -> list[Path]:
    """The merged files of a split that the run's own decisions name and that are not there, or not whole."""
    paths = RunPaths(log_path)
    whole = {item.path.name for item in found if item.node_rank is None and not item.state.in_the_way}
    ours = {name for name in _decided(paths, iteration) if name.startswith(f"{split}_")}
    return [paths.trajectories(split) / name for name in sorted(ours - whole)]


def _decided(paths: RunPaths, iteration: int) -> Iterator[str]:
    """The names of the merged files that the run's decisions about an iteration name.

    The facts of old iterations are removed, so the journals are asked too. The facts outlive a loss of power, and the journals may not.
    """
    events = [event for event in read_events(paths.root) if event.iteration == iteration]
    values: list[object] = [event.fields for event in events if event.name in ("rolled_out", "evaluated")]
    # Journals of earlier versions have it there.
    values += [event.fields.get("value") for event in events if event.name == "decision"]
    values += [fact.value for fact in _facts(paths, iteration)]
    for value in values:
        merged = value.get("merged") if isinstance(value, Mapping) else None
        if isinstance(merged, str):
            yield Path(merged).name


def _facts(paths: RunPaths, iteration: int) -> Iterator[Fact]:
    """What is left of the facts about an iteration."""
    store = LenientStore()
    for generation in sorted(GENERATION_FOLDER.parse_all(store.names(paths.coordination))):
        for row in PHASE_FOLDER.parse_all(sorted(store.names(paths.facts_of(generation)))):
            phase = paths.phase(generation, row.index, row.name)
            for name in sorted(store.names(phase)):
                said = FACT.parse(name)
                if said is not None and (said.iteration, said.status) == (iteration, "done"):
                    fact = store.read(phase / name, Fact)
                    if fact is not None:
                        yield fact


def restore(merged: Path, names: Iterable[Path]) -> list[Path]:
    """Give a merged file the names that decisions know it by, so that the run goes on from it. Raises OSError."""
    chosen = [name for name in names if not name.exists()]
    for name in chosen:
        files.link_or_copy(merged, name)
    return chosen


def quarantine(log_path: Path, items: Iterable[FoundFile]) -> Path | None:
    """Move files out of the way, with their other names, keeping the names; gives the folder. Raises OSError, UsageError."""
    chosen = [name for item in items for name in _all_names(item.path)]
    if not chosen:
        return None
    folder = log_path / "quarantine" / datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    files.make_dirs_below(log_path, folder)
    with reading.folder_below(log_path, folder) as to:
        for path in dict.fromkeys(chosen):
            target = folder / path.name
            if os.path.lexists(target):
                raise UsageError(f"{target} is there already; nothing was moved over it")
            with reading.folder_below(log_path, path.parent) as here:
                os.rename(path.name, path.name, src_dir_fd=here, dst_dir_fd=to)
            files.fsync_dir(path.parent)
    files.fsync_dir(folder)
    return folder


def _all_names(path: Path) -> list[Path]:
    """A file's names in its folder: a finished part has that of the rank's checkpoint too."""
    inode = path.lstat().st_ino
    return [other for other in sorted(path.parent.iterdir()) if other.lstat().st_ino == inode]
