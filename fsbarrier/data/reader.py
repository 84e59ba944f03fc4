"""Reads ranks' files and merged files alike. Only merged files need torch, which is then imported."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fsbarrier.data import merged_file
from fsbarrier.data.rank_file import FormatError, opened, read_at, read_trajectories, scan_rank_file
from fsbarrier.data.trajectory import Trajectory, TrajectoryFile
from fsbarrier.protocol.facts import JsonObject


def is_merged(path: Path) -> bool:
    """Whether the file is one of torch. Raises StoreError."""
    with opened(path) as fd:
        return read_at(fd, 0, len(merged_file.ZIP)) == merged_file.ZIP


def iter_trajectories(path: Path) -> Iterator[Trajectory]:
    """Iterate over the trajectories of a rank's file or a merged file; arrays are array.array.

    A rank's file that is still growing gives its whole groups, with one group in memory at a time. A merged file is loaded at once.
    Raises StoreError, FormatError (also for damage in a finished file).
    """
    if is_merged(path):
        yield from merged_file.load(path)["trajectories"]
        return
    found = scan_rank_file(path, verify=False)
    if found.finished and found.damaged:
        raise FormatError(f"{path}: {found.damaged[0]}")
    with opened(path) as fd:
        for group in found.groups:
            try:
                yield from read_trajectories(fd, group)
            except FormatError:
                if found.finished:
                    raise


def load(path: Path) -> TrajectoryFile:
    """`{"trajectories": [...], "metadata": {...}}` of either file, with array.array for tensors. Raises StoreError, FormatError."""
    if is_merged(path):
        return merged_file.load(path)
    found = scan_rank_file(path, verify=False)
    return {
        "trajectories": list(iter_trajectories(path)),
        "metadata": {**found.header, "finished": found.finished},
    }


def load_metadata(path: Path) -> JsonObject:
    """The metadata of a merged file, all of whose checksums are verified. Raises StoreError, NotOurs, FormatError."""
    if is_merged(path):
        metadata = merged_file.load_tensors(path).get("metadata")
        return metadata if isinstance(metadata, dict) else {}
    found = scan_rank_file(path)
    if found.damaged or found.torn_bytes or not found.finished:
        raise FormatError(f"{path}: {'; '.join(found.damaged) or 'it is cut off'}")
    return found.header
