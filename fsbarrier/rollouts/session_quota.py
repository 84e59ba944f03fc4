"""Divides an environment's limited number of sessions (`environment.sessions`) among the nodes.

Each node publishes, in the name of a file, how many sessions it can still use at a time. This number only falls during a round. `divided`
computes each node's part from all these numbers; a node's part never shrinks because another node needs less. A node that learns late of a
new number therefore uses too few sessions, never too many, and needs no locks. The files are in the claims folder (claims.py) and are
valid for its generation only, so those of a dead node expire too.
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
    """This node's part of `total` sessions of environment `number`. `folder=None`: it has all. `most`: how many it can use."""

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
        """`weights`: the weight of each node that samples. Raises OSError."""
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
        """Begin round `number`, in which nodes may need more sessions again; no node uses a session of the previous round any more."""
        self.round = number
        self._needs: dict[int, float] = dict.fromkeys(self.weights, math.inf)
        self._divide()

    def exchange(self, need: int) -> None:
        """Publish that this node needs at most `need` sessions at a time, if the others can use the rest, and read their needs.

        May block on the shared directory. If it cannot be read or written, the next call tries again.
        """
        assert self.folder is not None
        number, needs, own = self.round, self._needs, self.rank
        with suppress(OSError):
            for one in SESSIONS.parse_all(os.listdir(self.folder)):
                if (one.environment, one.round) == (self.number, number) and one.rank in needs:
                    needs[one.rank] = min(needs[one.rank], one.need)
            # An earlier start of this program may have published 0 and then lost its work.
            needs[own] = max(1, needs[own])
            # Publish only if the others could use the sessions that this node does not need.
            if need < needs[own] and (not need or need < divided(self.total, needs, self.weights)[own]):
                name = SESSIONS.build(own, self.number, number, need)
                files.create_exclusive(self.folder / name, b"", durable=False)
                needs[own] = need
        self._divide()

    def _divide(self) -> None:
        alone = self.folder is None
        self.mine = self.total if alone else divided(self.total, self._needs, self.weights)[self.rank]


def divided(total: int, needs: Mapping[int, float], weights: Mapping[int, float]) -> dict[int, int]:
    """Give out the sessions one by one, each to the node with the greatest weight per session among those that need more."""
    parts = dict.fromkeys(sorted(needs), 0)
    for _ in range(total):
        hungry: Collection[int] = [rank for rank, part in parts.items() if part < needs[rank]]
        if not hungry:
            break
        parts[max(hungry, key=lambda rank: weights[rank] / parts[rank] if parts[rank] else math.inf)] += 1
    return parts
