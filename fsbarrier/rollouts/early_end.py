"""Ends a rollout phase before its last few groups: once enough groups are durable everywhere, the rest gets some time, then no more.

Each node says in a file of its own how many of its groups are durable, and reads the others'. The first to have seen enough for
`grace_s`, on its own clock, leaves the file `cut`; whoever sees that ends too. It does not matter that nodes see it at different
times: what each node did is in its result, and the leader's decision says what was left out.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from fsbarrier import files
from fsbarrier.reading import RECORD_BYTES, read_bytes
from fsbarrier.rundir.names import CUT, DURABLE_COUNT

#: between two looks at what the others have; with many nodes more, so that all of them together read as often as FULL_RATE do
LOOK_S = 1.0
FULL_RATE = 50


class EarlyEnd:
    """One node's view of how far all are. `share` of `wanted` tasks is enough; `already` of them an older generation did."""

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
        """How long to wait until the next look."""
        return max(min(LOOK_S, self._grace_s / 4), LOOK_S * len(self._counts) / FULL_RATE, 0.1)

    def report(self, durable: int) -> None:
        """Let the others know how many groups this node has on disk."""
        if durable != self._reported:
            # Where that fails, the next count tells them as well.
            with contextlib.suppress(OSError):
                files.write_atomic(self._folder / self._own_file, b"%d\n" % durable)
                self._reported = durable

    def reached(self) -> bool:
        """Whether the phase is to end now, finished or not. What cannot be read now is read at the next look."""
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
                # A file that is being replaced cannot be read: then the count before stands.
                with contextlib.suppress(OSError, ValueError):
                    self._counts[name] = int(read_bytes(self._folder / name, RECORD_BYTES)[:20])
        return sum(self._counts.values())
