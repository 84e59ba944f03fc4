"""Trajectory files: `ShardWriter` writes the growing file of one rank; growing, finished and merged ones are read here.

`torch.load(path, weights_only=True)` opens finished and merged files as `{"trajectories": [...], "metadata": {...}}`; the
functions here need no torch, and read files that are still growing too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fsbarrier.data.shardscan import DATA, GroupEntry, NotOurs, ShardScan, checked, reading, scan_shard
from fsbarrier.data.shardwriter import ShardInfo, ShardWriter
from fsbarrier.data.torchpickle import FormatError
from fsbarrier.data.torchunpickle import ForeignObject, Unpickler
from fsbarrier.data.torchzip import Entry, read_directory

__all__ = [
    "ForeignObject",
    "FormatError",
    "GroupEntry",
    "NotOurs",
    "ShardInfo",
    "ShardScan",
    "ShardWriter",
    "iter_trajectories",
    "load",
    "scan_shard",
]


def read_trajectories(fd: int, group: GroupEntry) -> list[dict[str, Any]]:
    """The trajectories of one group of an open file, checksums verified. Raises FormatError, OSError."""
    entries = {entry.name.removeprefix(DATA): entry for entry in group.storages}

    def fetch(key: str) -> bytes:
        if key not in entries:
            raise FormatError(f"group {group.key} has no storage {key}")
        entry = entries[key]
        return checked(fd, entry.data_offset, entry.size, entry.crc, f"storage {key}")

    body = checked(
        fd, group.body_offset, group.body_length, group.body_crc, f"the group of task {group.task_index}"
    )
    trajectories = Unpickler(body, fetch).load_body()
    if len(trajectories) != group.trajectories or not all(isinstance(item, dict) for item in trajectories):
        raise FormatError(f"the group of task {group.task_index} is not the trajectories that it says")
    return trajectories


def iter_trajectories(path: Path) -> Iterator[dict[str, Any]]:
    """The trajectories of a growing, finished or merged file, one group in memory at a time; arrays are array.array.

    Of a growing file: those of its valid groups. Raises StoreError, FormatError (damage in a finished file too).
    """
    scan = scan_shard(path, verify=False)
    with reading(path) as fd:
        for group in scan.groups:
            try:
                yield from read_trajectories(fd, group)
            except FormatError:
                if scan.finished:
                    raise


def load(path: Path) -> dict[str, Any]:
    """`{"trajectories": [...], "metadata": {...}}` of a growing, finished or merged file, as torch.load gives it, but with
    array.array for tensors. Reads other torch files too, as long as they hold plain values and flat tensors.

    Raises StoreError, FormatError (ForeignObject where Python objects are inside).
    """
    with reading(path) as fd:
        size = os.fstat(fd).st_size
        try:
            entries = {entry.name: entry for entry in read_directory(fd, size)}
        except FormatError:
            entries = {}
        if entries:
            return _load_finished(fd, entries)
    scan = scan_shard(path, verify=False)
    trajectories = list(iter_trajectories(path))
    return {"trajectories": trajectories, "metadata": {**scan.header, "finished": False}}


def _load_finished(fd: int, entries: dict[str, Entry]) -> dict[str, Any]:
    root = next(iter(entries)).partition("/")[0] + "/"
    index = entries.get(root + "data.pkl")
    if index is None:
        raise FormatError("no data.pkl in it: not a torch file")

    def fetch(key: str) -> bytes:
        entry = entries.get(f"{root}data/{key}")
        if entry is None:
            raise FormatError(f"storage {key} is missing")
        return checked(fd, entry.data_offset, entry.size, entry.crc, f"storage {key}")

    value = Unpickler(checked(fd, index.data_offset, index.size, index.crc, "data.pkl"), fetch).load()
    if not isinstance(value, dict) or not isinstance(value.get("trajectories"), list):
        raise FormatError('it does not hold {"trajectories": [...], "metadata": {...}}')
    return value
