"""`RankFileWriter`: appends groups to one rank's file. rank_file.py describes the layout.

Each call appends whole frames with one fsync, so several groups can share it. Nothing that was acknowledged is ever rewritten.

`SharedFlush` lets all groups that arrive during one flush share the next one: a flush takes as long for fifty groups as for one, and with
short answers fifty groups finish during one flush.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Collection, Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from fsbarrier.data.group_stats import GroupStats
from fsbarrier.data.rank_file import END, MAGIC, GroupEntry, frame, pack, scan_rank_file, unpack
from fsbarrier.data.trajectory import REQUIRED, Trajectory
from fsbarrier.errors import StoreError, UsageError
from fsbarrier.protocol.facts import Payload
from fsbarrier.store.files import fsync_dir, open_new, open_own
from fsbarrier.store.retry import patiently


class FramedGroup(NamedTuple):
    """A group of trajectories as bytes."""

    task_index: int
    stats: GroupStats
    data: bytes


class RankFileWriter:
    """Appends groups of trajectories to one rank's file. One writer per file; threads may share a writer.

    `header` is at the start of the file and says whose it is. A merge by hand reads from it `run_id node_rank generation iteration split
    policy_version policy` and `expected` (all tasks of the iteration).

    An existing file with the same header is resumed: its torn tail is cut off, `groups` lists its contents, and new groups are appended.
    Any other existing file is an error.
    Raises UsageError (other file, invalid header), StoreError (filesystem failure).
    """

    def __init__(self, path: Path, *, header: dict[str, object]) -> None:
        self.path, self.finished = path, False
        # Compare in the form in which it is read back, where tuples are lists.
        self._header = unpack(pack(header, f"{path}: the header"))
        self._lock = threading.Lock()
        self._groups: dict[int, GroupEntry] = {}
        self._broken = ""
        self._fd = -1
        self._end = 0
        try:
            try:
                os.close(patiently(lambda: open_new(path)))
                self._begin()
            except FileExistsError:
                self._resume()
        except OSError as error:
            self.close()
            raise StoreError(f"{path}: cannot start writing: {error.strerror or error}") from error
        except BaseException:
            self.close()
            raise

    @property
    def groups(self) -> tuple[GroupEntry, ...]:
        """The groups in the file, including those of an earlier start; of several groups of one task the newest."""
        return tuple(self._groups.values())

    @property
    def valid_bytes(self) -> int:
        """The acknowledged size, which other nodes may rely on."""
        return self._end

    def append_group(self, task_index: int, trajectories: Sequence[Payload]) -> GroupEntry:
        """Write all trajectories of one task (see data/trajectory.py); durable on return. Raises the errors of `framed` and `write`."""
        return self.write([self.framed(task_index, trajectories)])[0]

    def framed(self, task_index: int, trajectories: Sequence[Payload]) -> FramedGroup:
        """Encode a group as a frame. Raises UsageError if a field is missing or cannot be stored."""
        if not trajectories:
            raise UsageError(f"{self.path}: the group of task {task_index} is empty")
        for trajectory in trajectories:
            if lacking := [name for name in REQUIRED if name not in trajectory]:
                raise UsageError(f"{self.path}: a trajectory of task {task_index} lacks {', '.join(lacking)}")
        content = {"task_index": task_index, "trajectories": list(trajectories)}
        data = frame(content, f"{self.path}: a trajectory of task {task_index}")
        return FramedGroup(task_index, GroupStats.of(trajectories), data)

    def write(self, groups: Collection[FramedGroup]) -> list[GroupEntry]:
        """Write several groups with one fsync. Raises StoreError; the file remains valid without them."""
        with self._lock:
            self._check_open()
            ends = [*accumulate((len(group.data) for group in groups), initial=self._end)]
            tasks = ", ".join(str(group.task_index) for group in groups)
            self._append(b"".join(group.data for group in groups), f"append task {tasks}")
            entries = [
                GroupEntry(group.task_index, group.stats, begin, end)
                for group, begin, end in zip(groups, ends, ends[1:], strict=False)
            ]
            self._groups |= {entry.task_index: entry for entry in entries}
            return entries

    def finish(self) -> None:
        """Mark the file as complete; a second call does nothing. Raises StoreError."""
        with self._lock:
            if not self.finished:
                self._check_open()
                self._append(frame({END: len(self._groups)}, "the end"), "finish")
                self.finished = True

    def close(self) -> None:
        """Close the descriptor; everything acknowledged is already on disk."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)

    def __enter__(self) -> RankFileWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self) -> None:
        self._fd = open_own(self.path)
        os.ftruncate(self._fd, 0)
        self._append(MAGIC + frame({"header": self._header}, "the header"), "start")
        fsync_dir(self.path.parent)

    def _resume(self) -> None:
        there = scan_rank_file(self.path)
        if not there.valid_bytes:
            # An earlier start was killed before the header was durable.
            self._begin()
            return
        if there.header != self._header:
            raise UsageError(f"{self.path}: was written by another rollout; use a new part name")
        if there.finished and not there.torn_bytes:
            # A finished file must not change, because the rank's checkpoint is usually a hard link to it.
            self._fd = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        else:
            self._fd = open_own(self.path)
        if there.torn_bytes:
            os.ftruncate(self._fd, there.valid_bytes)
            os.fsync(self._fd)
        self._end, self.finished = there.valid_bytes, there.finished
        self._groups = {group.task_index: group for group in there.groups}

    def _check_open(self) -> None:
        if self._broken:
            raise StoreError(self._broken)
        if self._fd < 0 or self.finished:
            raise StoreError(
                f"{self.path}: is {'finished' if self.finished else 'closed'}; nothing more can be written"
            )

    def _append(self, data: bytes, what: str) -> None:
        """Write and fsync after the acknowledged part. If that fails, truncate the file to the acknowledged part."""
        view, end = memoryview(data), self._end
        try:
            while view:
                written = os.pwrite(self._fd, view, end)
                view, end = view[written:], end + written
        except OSError as error:
            try:
                os.ftruncate(self._fd, self._end)
            except OSError:
                self._broken = f"{self.path}: unusable after a failed write"
            raise StoreError(f"{self.path}: cannot {what}: {error.strerror or error}") from error
        try:
            os.fsync(self._fd)
        except OSError as error:
            # After a failed fsync it is unknown which bytes were written, and a second fsync may report success. Never continue.
            self._broken = f"{self.path}: unusable after a failed flush ({error.strerror})"
            raise StoreError(f"{self.path}: cannot {what}: {error.strerror or error}") from error
        self._end = end


class SharedFlush:
    """Buffers the groups that are not on disk yet. `append` and `rest` raise the errors of RankFileWriter."""

    def __init__(self, writer: RankFileWriter) -> None:
        self._writer = writer
        self._waiting: dict[int, FramedGroup] = {}
        self._flushing: asyncio.Task[None] | None = None

    async def append(self, task_index: int, made: Sequence[Trajectory]) -> None:
        """Returns when the group of this task is on disk. If the caller is cancelled, `rest` still writes it."""
        self._waiting[task_index] = self._writer.framed(task_index, made)
        while task_index in self._waiting:
            await self._flushed()

    async def rest(self) -> None:
        """Returns when everything is written."""
        while self._waiting:
            await self._flushed()

    async def _flushed(self) -> None:
        if self._flushing is None or self._flushing.done():
            self._flushing = asyncio.create_task(self._flush())
        # Cancelling one caller must not cancel the flush, because others wait for it.
        await asyncio.shield(self._flushing)

    async def _flush(self) -> None:
        groups = dict(self._waiting)
        await asyncio.to_thread(self._writer.write, groups.values())
        for task_index in groups:
            del self._waiting[task_index]
