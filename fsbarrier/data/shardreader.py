"""Reads the trajectories of a file that is growing, finished or merged; without torch. The arrays are array.array."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import cast

from fsbarrier.data.shardscan import DATA, GroupEntry, opened, read_checked, scan_shard
from fsbarrier.data.torchpickle import FormatError
from fsbarrier.data.torchunpickle import FetchStorage, Unpickler
from fsbarrier.data.torchzip import Entry, read_directory
from fsbarrier.data.trajectory import Trajectory, TrajectoryFile
from fsbarrier.retry import FAILING, retry


def read_trajectories(fd: int, group: GroupEntry) -> list[Trajectory]:
    """The trajectories of one group of an open file, checksums verified. Raises FormatError, OSError."""
    what = f"the group of task {group.task_index}"
    body = read_checked(fd, group.body_offset, group.body_length, group.body_crc, what)
    trajectories = Unpickler(body, _fetch(fd, group.storages, DATA)).load_body()
    if len(trajectories) != group.trajectories or not all(isinstance(item, dict) for item in trajectories):
        raise FormatError(f"{what} is not the trajectories that it says")
    return trajectories


def iter_trajectories(path: Path) -> Iterator[Trajectory]:
    """The trajectories of a growing, finished or merged file, one group in memory at a time; arrays are array.array.

    Of a growing file: those of its valid groups. Raises StoreError, FormatError (damage in a finished file too).
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
    """`{"trajectories": [...], "metadata": {...}}` of a growing, finished or merged file, as torch.load gives it, but with
    array.array for tensors. Reads other torch files too, as long as they hold plain values and flat tensors.

    Raises StoreError, FormatError (ForeignObject where Python objects are inside).
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
        raise FormatError("no data.pkl in it: not a torch file")
    data = read_checked(fd, index.data_offset, index.size, index.crc, "data.pkl")
    value = Unpickler(data, _fetch(fd, entries, root + "data/")).load()
    if not isinstance(value, dict) or not isinstance(value.get("trajectories"), list):
        raise FormatError('it does not hold {"trajectories": [...], "metadata": {...}}')
    return cast(TrajectoryFile, value)


def _fetch(fd: int, entries: Iterable[Entry], folder: str) -> FetchStorage:
    """What gives the bytes of a storage by its key: of those `entries` that lie in `folder` of the zip."""
    storages = {entry.name: entry for entry in entries}

    def fetch(key: str) -> bytes:
        entry = storages.get(folder + key)
        if entry is None:
            raise FormatError(f"storage {key} is missing")
        return read_checked(fd, entry.data_offset, entry.size, entry.crc, f"storage {key}")

    return fetch
