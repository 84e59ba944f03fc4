"""Inspects the files of an iteration after a disaster and repairs the run directory.

Deletes nothing: unusable files are moved to <log-path>/quarantine/. A normal start does not need this; it is for users who want to inspect
files, merge by hand, or move foreign and damaged files out of the way.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path

from fsbarrier.data import images, rank_files
from fsbarrier.data.rank_file import read_trajectories
from fsbarrier.data.rank_files import FileState, FoundFile
from fsbarrier.data.reader import iter_trajectories
from fsbarrier.data.trajectory import Trajectory
from fsbarrier.errors import ProgramFailed, UsageError
from fsbarrier.protocol.facts import Fact
from fsbarrier.rundir import runrecord
from fsbarrier.rundir.journal import read_events
from fsbarrier.rundir.names import FACT, GENERATION_FOLDER, PHASE_FOLDER, SPLITS, parse_trajectories
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.record_store import LenientStore
from fsbarrier.store import files, reading


def inspect(log_path: Path, iteration: int) -> list[FoundFile]:
    """The files of `iteration`, in merge order, and the images that its trajectories name and that are not whole. Raises UsageError if
    there is no run."""
    run_id = runrecord.load(log_path).run_id
    listed: list[FoundFile] = []
    for split in SPLITS:
        merged, begin = RunPaths(log_path).merged(split, iteration), len(listed)
        listed += rank_files.find(log_path, split, iteration)
        # Temporary files of the merged file or of a rank's file. The suffix after the number distinguishes iteration 1 from 12.
        unfinished = (f".{merged.name}.", f".{merged.name}_rank_")
        for path in sorted(merged.parent.iterdir()) if merged.parent.is_dir() else ():
            name = parse_trajectories(path.name)
            if name is not None and name.rank is None and (name.split, name.iteration) == (split, iteration):
                listed.append(rank_files.look_at_merged(path, split, run_id))
            elif path.name.startswith(unfinished):
                note = "temporary file of a killed program"
                listed.append(FoundFile(path, split, None, FileState.TEMPORARY, note))
        listed += _images_not_whole(RunPaths(log_path).images(split, iteration), split, listed[begin:])
    return listed


def _images_not_whole(folder: Path, split: str, listed: Iterable[FoundFile]) -> Iterator[FoundFile]:
    """The images that these files' trajectories name and that are missing or damaged. Raises StoreError."""
    task_of_image: dict[str, str] = {}
    for item in listed:
        for trajectory in _trajectories(item) if item.mergeable else ():
            for name in chain.from_iterable(trajectory.get("images", ())):
                task_of_image.setdefault(name, trajectory["task_id"])
    there = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    for name, task in sorted(task_of_image.items()):
        path = folder / Path(name).name
        if path.name not in there:
            yield FoundFile(path, split, None, FileState.MISSING, f"an image that task {task} needs")
            continue
        try:
            images.kept(path)
        except ProgramFailed as error:
            yield FoundFile(path, split, None, FileState.DAMAGED, str(error).removeprefix(f"{path}: "))


def _trajectories(item: FoundFile) -> Iterator[Trajectory]:
    """The readable trajectories of a rank's file, or those of a merged file."""
    if item.file is None:
        return iter_trajectories(item.path)
    return chain.from_iterable(read_trajectories(item.path, group) for group in item.file.groups)


def iterations(log_path: Path) -> list[int]:
    """The iterations that have trajectories on disk. Raises OSError."""
    folders = [RunPaths(log_path).trajectories(split) for split in SPLITS]
    names = [path.name for folder in folders if folder.is_dir() for path in folder.iterdir()]
    return sorted({parsed.iteration for name in names if (parsed := parse_trajectories(name)) is not None})


def gone(log_path: Path, split: str, iteration: int, rank_files: Iterable[FoundFile]) -> list[Path]:
    """The merged files of a split that the run's decisions refer to but that are missing or damaged."""
    paths = RunPaths(log_path)
    whole = {item.path.name for item in rank_files if item.node_rank is None and not item.state.in_the_way}
    ours = {name for name in _decided(paths, iteration) if name.startswith(f"{split}_")}
    return [paths.trajectories(split) / name for name in sorted(ours - whole)]


def _decided(paths: RunPaths, iteration: int) -> Iterator[str]:
    """The names of the merged files of an iteration that the run's decisions refer to.

    Reads both facts and journals: facts of old iterations are removed, and journals may not survive a power loss. It also reads those of
    the iteration before: if a session ended with it, its last row made this iteration's evaluation.
    """
    about = (iteration - 1, iteration)
    events = [event for event in read_events(paths.root) if event.iteration in about]
    values: list[object] = [event.fields for event in events if event.name in ("rolled_out", "evaluated")]
    values += [fact.value for number in about for fact in _facts(paths, number)]
    for value in values:
        merged = value.get("merged") if isinstance(value, Mapping) else None
        name = merged if isinstance(merged, str) else ""
        of = parse_trajectories(name)
        if of is not None and of.iteration == iteration:
            yield name


def _facts(paths: RunPaths, iteration: int) -> Iterator[Fact]:
    """The remaining facts about an iteration."""
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
    """Link a merged file to the names that decisions refer to, so that the run can continue from it. Raises OSError."""
    chosen = [name for name in names if not name.exists()]
    for name in chosen:
        files.link(merged, name)
    return chosen


def quarantine(log_path: Path, items: Iterable[FoundFile]) -> Path | None:
    """Move files, including their hard links, to a new folder and return it. Keeps the names. Raises OSError, UsageError."""
    chosen = [name for item in items for name in _all_names(item.path)]
    if not chosen:
        return None
    folder = log_path / "quarantine" / datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    files.make_dirs_below(log_path, folder)
    with reading.folder_below(log_path, folder) as target_fd:
        for path in dict.fromkeys(chosen):
            target = folder / path.name
            if os.path.lexists(target):
                raise UsageError(f"{target} already exists; not overwriting it. Move it away and try again")
            with reading.folder_below(log_path, path.parent) as source_fd:
                os.rename(path.name, path.name, src_dir_fd=source_fd, dst_dir_fd=target_fd)
            files.fsync_dir(path.parent)
    files.fsync_dir(folder)
    return folder


def _all_names(path: Path) -> list[Path]:
    """All hard links to a file in its folder: a finished part is also linked as the rank's checkpoint."""
    inode = path.lstat().st_ino
    return [other for other in sorted(path.parent.iterdir()) if other.lstat().st_ino == inode]
