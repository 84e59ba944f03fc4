"""How many of an environment's sessions a node may use, where all nodes have a limited number together (`environment.sessions`).

Each node says in the names of files how many it can still use at a time: a number that only falls while a round lasts. `divided` makes
the nodes' parts of these, and gives nobody less because somebody else needs less. So a node that hears late has too few sessions, never too
many; nothing is locked, and nothing has to be given back. The files are in the folder of the nodes' claims (claims.py): with its generation
they lose their meaning, and those of a dead node with them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

from fsbarrier.rollouts.claims import FULL_RATE, LOOK_S
from fsbarrier.rundir.names import SESSIONS
from fsbarrier.store import files


class SessionQuota:
    """This node's part of `total` sessions of environment `number`. `folder=None`: it has them all. `most`: what it can use at a time."""

    def __init__(
        self,
        total: int,
        weights: Mapping[int, float],
        rank: int,
        *,
        most: int,
        folder: Path | None = None,
        number: int = 0,
    ) -> None:
        """`weights`: of all nodes that sample. Raises OSError."""
        self.total, self.weights, self.rank, self.most = total, weights, rank, most
        self.folder, self.number = folder, number
        if folder is not None:
            files.make_dirs(folder)
        self.begin_round(0)

    @property
    def pause_s(self) -> float:
        """The time to wait until the next `exchange`."""
        return LOOK_S * max(1.0, len(self.weights) / FULL_RATE)

    def begin_round(self, number: int) -> None:
        """Round `number` begins, in which nodes may need more again: no session of the round before is used any more, on any node."""
        self.round = number
        self._needs: dict[int, float] = dict.fromkeys(self.weights, math.inf)
        self._divide()

    def exchange(self, need: int) -> None:
        """Say that this node will need at most `need` sessions at a time, if the others can use the rest, and hear of theirs.

        May block on the shared directory. If that cannot be read or written, the next look tells.
        """
        assert self.folder is not None
        number, needs, own = self.round, self._needs, self.rank
        with suppress(OSError):
            for one in SESSIONS.parse_all(os.listdir(self.folder)):
                if (one.environment, one.round) == (self.number, number) and one.rank in needs:
                    needs[one.rank] = min(needs[one.rank], one.need)
            # An earlier start of this program may have said that it was done, and lost what it had done.
            needs[own] = max(1, needs[own])
            # Others have to be told only if they could use what this node does not need.
            if need < needs[own] and (not need or need < divided(self.total, needs, self.weights)[own]):
                name = SESSIONS.build(own, self.number, number, need)
                files.create_exclusive(self.folder / name, b"", durable=False)
                needs[own] = need
        self._divide()

    def _divide(self) -> None:
        alone = self.folder is None
        self.mine = self.total if alone else divided(self.total, self._needs, self.weights)[self.rank]


def divided(total: int, needs: Mapping[int, float], weights: Mapping[int, float]) -> dict[int, int]:
    """One session after the other goes to the node with the greatest weight for each that it has, among those that need more."""
    parts = dict.fromkeys(sorted(needs), 0)
    for _ in range(total):
        hungry: Collection[int] = [rank for rank, part in parts.items() if part < needs[rank]]
        if not hungry:
            break
        parts[max(hungry, key=lambda rank: weights[rank] / parts[rank] if parts[rank] else math.inf)] += 1
    return parts
