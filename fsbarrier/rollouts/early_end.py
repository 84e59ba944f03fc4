"""Ends a rollout phase without its slowest groups: once enough groups are on disk across all nodes, the rest get `grace_s` more.

Each node publishes its number of finished groups in a file and reads the other nodes' files. The first node that has seen enough groups for
`grace_s`, on its own clock, creates the file `cut`, and every node that sees it ends the phase. Nodes may see it at different times: each
result records what that node did, and the leader's decision records what is missing.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from fsbarrier.rundir.names import CUT, DURABLE_COUNT
from fsbarrier.store import files
from fsbarrier.store.reading import RECORD_BYTES, read_bytes

#: polling interval; it grows with the number of nodes above FULL_RATE, to limit the total read rate
LOOK_S = 1.0
FULL_RATE = 50


class EarlyEnd:
    """One node's view of the total progress. `share` of `wanted` tasks is enough; `already` were done by an older generation."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        *,
        wanted: int,
        already: int,
        share: float,
        grace_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._own_file = folder, DURABLE_COUNT.build(rank)
        self._need = math.ceil(share * wanted) - already
        self._grace_s, self._clock = grace_s, clock
        self._enough_since: float | None = None
        self._reported = -1
        self._counts: dict[str, int] = {}
        files.make_dirs(folder)

    @property
    def pause_s(self) -> float:
        """The time to wait until the next poll."""
        return max(min(LOOK_S, self._grace_s / 4), LOOK_S * len(self._counts) / FULL_RATE, 0.1)

    def report(self, durable: int) -> None:
        """Publish the number of groups that this node has on disk."""
        if durable != self._reported:
            # If this fails, the next count will be published.
            with contextlib.suppress(OSError):
                files.write_atomic(self._folder / self._own_file, b"%d\n" % durable)
                self._reported = durable

    def reached(self) -> bool:
        """Whether to end the phase now. If the folder is unreadable, the next poll decides."""
        try:
            return self._reached(os.listdir(self._folder))
        except OSError:
            return False

    def _reached(self, names: Sequence[str]) -> bool:
        if CUT in names:
            return True
        if self._durable_everywhere(names) < self._need:
            return False
        if self._enough_since is None:
            self._enough_since = self._clock()
        if self._clock() - self._enough_since < self._grace_s:
            return False
        files.write_atomic(self._folder / CUT, f"{self._own_file}\n".encode())
        return True

    def _durable_everywhere(self, names: Sequence[str]) -> int:
        for name in names:
            if DURABLE_COUNT.parse(name) is not None:
                # A file may be unreadable while it is replaced; keep the previous count.
                with contextlib.suppress(OSError, ValueError):
                    self._counts[name] = int(read_bytes(self._folder / name, RECORD_BYTES)[:20])
        return sum(self._counts.values())
