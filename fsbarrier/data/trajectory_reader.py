"""Reads growing, finished or merged trajectory files without torch. Arrays are array.array."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import cast

from fsbarrier.data.torch_pickle import FormatError
from fsbarrier.data.torch_unpickle import FetchStorage, Unpickler
from fsbarrier.data.torch_zip import Entry, read_directory
from fsbarrier.data.trajectory import Trajectory, TrajectoryFile
from fsbarrier.data.trajectory_scan import DATA, GroupEntry, opened, read_checked, scan_shard
from fsbarrier.retry import FAILING, retry


def read_trajectories(fd: int, group: GroupEntry) -> list[Trajectory]:
    """Read the trajectories of one group, verifying checksums. Raises FormatError, OSError."""
    what = f"the group of task {group.task_index}"
    body = read_checked(fd, group.body_offset, group.body_length, group.body_crc, what)
    trajectories = Unpickler(body, _fetch(fd, group.storages, DATA)).load_body()
    if len(trajectories) != group.trajectories or not all(isinstance(item, dict) for item in trajectories):
        raise FormatError(f"{what} does not match its description")
    return trajectories


def iter_trajectories(path: Path) -> Iterator[Trajectory]:
    """Iterate over the trajectories of a growing, finished or merged file, with one group in memory at a time; arrays are array.array.

    For a growing file: only valid groups. Raises StoreError, FormatError (also for damage in a finished file).
    """
    scan = scan_shard(path, verify=False)
    with opened(path) as fd:
        for group in scan.groups:
            try:
                yield from read_trajectories(fd, group)
            except FormatError:
                if scan.finished:
                    raise


def load(path: Path) -> TrajectoryFile:
    """`{"trajectories": [...], "metadata": {...}}` of a growing, finished or merged file, as from torch.load, but with
    array.array instead of tensors. Also reads other torch files that contain only plain values and flat tensors.

    Raises StoreError, FormatError (ForeignObject if the file contains Python objects).
    """
    with opened(path) as fd:
        try:
            entries = read_directory(fd, retry(lambda: os.fstat(fd), errnos=FAILING).st_size)
        except FormatError:
            entries = []
        if entries:
            return _load_finished(fd, entries)
    scan = scan_shard(path, verify=False)
    return {
        "trajectories": list(iter_trajectories(path)),
        "metadata": {**scan.header, "finished": False},
    }


def _load_finished(fd: int, entries: list[Entry]) -> TrajectoryFile:
    # torch.save names the folder in the zip after the file.
    root = entries[0].name.partition("/")[0] + "/"
    index = next((entry for entry in entries if entry.name == root + "data.pkl"), None)
    if index is None:
        raise FormatError("contains no data.pkl, so it is not a torch file")
    data = read_checked(fd, index.data_offset, index.size, index.crc, "data.pkl")
    value = Unpickler(data, _fetch(fd, entries, root + "data/")).load()
    if not isinstance(value, dict) or not isinstance(value.get("trajectories"), list):
        raise FormatError('expected {"trajectories": [...], "metadata": {...}}')
    return cast(TrajectoryFile, value)


def _fetch(fd: int, entries: Iterable[Entry], folder: str) -> FetchStorage:
    """A function that returns the bytes of a storage by key, from the `entries` in `folder` of the zip."""
    storages = {entry.name: entry for entry in entries}

    def fetch(key: str) -> bytes:
        entry = storages.get(folder + key)
        if entry is None:
            raise FormatError(f"storage {key} is missing")
        return read_checked(fd, entry.data_offset, entry.size, entry.crc, f"storage {key}")

    return fetch
