"""Ends a rollout phase before its last few groups: once enough groups are durable everywhere, the rest gets some time, then no more.

Each node says in a file of its own how many of its groups are durable, and reads the others'. The first to have seen enough for
`grace_s`, on its own clock, leaves the file `cut`; whoever sees that ends too. Nothing rests on all seeing it at the same time:
what each node did is in its result, and the leader's decision says what was left out.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from fsbarrier import files
from fsbarrier.rundir.names import CUT, DURABLE_COUNT

LOOK_S = (
    1.0  # between two looks; with many nodes more, so that all of them together read as often as fifty do
)


class Tail:
    """One node's view of how far all are. `share` of `wanted` tasks is enough; `there` of them an older generation did."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        *,
        wanted: int,
        there: int,
        share: float,
        grace_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._mine = folder, DURABLE_COUNT.build(rank)
        self._need = math.ceil(share * wanted) - there
        self._grace_s, self._clock = grace_s, clock
        self._since: float | None = None
        self._said = -1
        self._counts: dict[str, int] = {}
        files.make_dirs(folder)

    @property
    def pause_s(self) -> float:
        """How long to wait until the next look."""
        return max(min(LOOK_S, self._grace_s / 4), LOOK_S * len(self._counts) / 50, 0.1)

    def say(self, durable: int) -> None:
        """Let the others know how many groups this node has on disk."""
        if durable != self._said:
            with contextlib.suppress(OSError):  # the next count will tell as well
                files.write_atomic(self._folder / self._mine, b"%d\n" % durable)
                self._said = durable

    def over(self) -> bool:
        """Whether the phase is to end now, finished or not. What cannot be read now is read at the next look."""
        try:
            return self._over(os.listdir(self._folder))
        except OSError:
            return False

    def _over(self, names: Sequence[str]) -> bool:
        if CUT in names:
            return True
        if self._durable(names) < self._need:
            return False
        self._since = self._clock() if self._since is None else self._since
        if self._clock() - self._since < self._grace_s:
            return False
        files.write_atomic(self._folder / CUT, f"{self._mine}\n".encode())
        return True

    def _durable(self, names: Sequence[str]) -> int:
        for name in names:
            if DURABLE_COUNT.parse(name) is not None:
                try:
                    self._counts[name] = int((self._folder / name).read_bytes())
                except (OSError, ValueError):
                    continue  # being replaced: the count before stands
        return sum(self._counts.values())
