"""Group commit for a part file: all groups that arrive during one flush share the next one.

A flush takes as long for fifty groups as for one, and with short answers fifty groups finish during one flush.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from fsbarrier.data.rank_file_writer import FramedGroup
from fsbarrier.data.trajectory import Trajectory
from fsbarrier.trajectories import RankFileWriter


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
