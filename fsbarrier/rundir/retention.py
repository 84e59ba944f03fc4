"""Removes the files of old iterations, after an update has been published."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from fsbarrier.errors import ProgramFailed
from fsbarrier.rundir import checkpoints, names
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.store import files


def remove_old(
    log_path: Path,
    trained_on: int,
    *,
    batches: int,
    trajectories: int,
    between: Callable[[], None] = lambda: None,
) -> list[int]:
    """Remove training batches and trajectories that are `batches` (`trajectories`) or more iterations behind `trained_on`.

    If a number is 0, none of its kind are removed. Iterations after `trained_on`, which may have been rolled out already, are never
    touched. Returns the iterations whose trajectories were removed. A file that cannot be removed stays until the next time. `between` is
    called before each file, and may raise.
    """
    paths = RunPaths(log_path)
    if batches:
        for path in _listed(paths.batches):
            between()
            batch = names.BATCH.parse(path.name)
            if batch is not None and batch.number <= trained_on - batches:
                _remove(log_path, path)
    removed: set[int] = set()
    for split in names.SPLITS if trajectories else ():
        for path in _listed(paths.trajectories(split)):
            between()
            file = names.parse_trajectories(path.name) or names.IMAGES_FOLDER.parse(path.name)
            if file is None or file.split != split:
                continue
            if file.iteration <= trained_on - trajectories and _remove(log_path, path):
                removed.add(file.iteration)
    return sorted(removed)


def _listed(folder: Path) -> list[Path]:
    try:
        return [folder / name for name in sorted(os.listdir(folder))]
    except OSError:
        return []


def _remove(log_path: Path, path: Path) -> bool:
    """Remove a file; False if that failed. Links are not followed, since their targets do not belong to this run."""
    try:
        files.remove(path, log_path)
    except OSError:
        return False
    return True


def remove_old_versions(
    log_path: Path,
    keep: int,
    current: Path,
    every: int = 0,
    best: str | None = None,
    between: Callable[[], None] = lambda: None,
) -> list[Path]:
    """Remove policy versions, except the newest `keep` (0: remove none), every `every`-th (0: no such exception) and the folder `best`.

    These always stay: `current`, the version before it, which a node may still be loading, the one that model.pt names, and those whose
    trainer state or weights a kept version needs. Returns the removed folders. While the mount fails, or a needed manifest cannot be
    read, all stay until the next time. `between` is called before each removal, and may raise.
    """
    if keep <= 0:
        return []
    try:
        folders = checkpoints.versions(log_path)
    except OSError:
        return []
    newest = [version for version, _ in folders if version <= _version(current)]
    spared = set(sorted(set(newest), reverse=True)[: max(keep, 2)])
    kept = {
        folder.name for version, folder in folders if version in spared or (every and version % every == 0)
    }
    try:
        served = checkpoints.served_policy(log_path)
        kept |= {names.POLICY_FOLDER.build(served.number, served.generation)} if served is not None else set()
        states = {_manifest(folder).state_in for version, folder in folders if version in spared}
        kept |= {name for name in (best, *states) if name}
        bases = [_manifest(folder).base for _, folder in folders if folder.name in kept]
        kept |= {base.folder for base in bases if base is not None}
    except (OSError, ProgramFailed):
        return []
    removed = []
    for version, folder in folders:
        if folder.name not in kept and version < _version(current):
            between()
            with contextlib.suppress(OSError):
                _remove_version(folder)
                removed.append(folder)
    return removed


def _remove_version(folder: Path) -> None:
    """Remove the folder of a policy version. Raises OSError, also if the folder is a link."""
    log_path = folder.parent.parent
    # Remove the manifest first, so that a half-removed folder does not look complete.
    files.remove(folder / checkpoints.MANIFEST, log_path)
    files.remove(folder, log_path)


def _manifest(folder: Path) -> checkpoints.Manifest:
    """The manifest of a version, which says what other versions it needs; an empty one of a version that is not complete. Raises OSError;
    ProgramFailed if it exists but is unreadable, since it may name any other version."""
    complete = checkpoints.MANIFEST in os.listdir(folder)
    return checkpoints.read_manifest(folder) if complete else checkpoints.Manifest(0, {})


def _version(folder: Path) -> int:
    made = names.POLICY_FOLDER.parse(folder.name)
    return made.number if made is not None else 0
