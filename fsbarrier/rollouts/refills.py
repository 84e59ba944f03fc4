"""Decides whether a training rollout needs another round, because too few groups have differing rewards (`rollout.max_refills`).

When a node has finished a round and its groups are on disk, it creates an empty file beside the claims. The file name contains the number
of its groups with signal, i.e. with differing rewards. Once the files of all nodes are listed, every node computes the same sum and the
same decision. If a node dies before it creates its file, the generation ends, and the next one adopts the groups.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path

from fsbarrier.rollouts.claims import wait_out
from fsbarrier.rundir.names import ROUND_DONE, RoundDoneName
from fsbarrier.store import files
from fsbarrier.store.retry import Backoff

#: polling interval
PAUSES = Backoff(0.05, 1.0)


class Refills:
    """One node's view of the finished rounds. Its methods may block on the shared directory, and raise StoreError."""

    def __init__(
        self, folder: Path, rank: int, *, ranks: Collection[int], already: Sequence[int], enough: int
    ) -> None:
        """`ranks`: the nodes that roll out; `already`: groups with signal from an older generation, by round."""
        self._folder, self._rank, self._ranks = folder, rank, frozenset(ranks)
        self._already, self._enough = already, enough
        wait_out(lambda: files.make_dirs_below(folder.parent, folder), folder, "made")

    def report(self, number: int, with_signal: int) -> None:
        """Report that this node has finished round `number`. An earlier report of this node takes precedence."""
        mine = ROUND_DONE.build(self._rank, number, with_signal)
        if all((done.rank, done.round) != (self._rank, number) for done in self._listed()):
            path = self._folder / mine
            wait_out(lambda: files.create_exclusive(path, b"", durable=False), path, "made")

    def another_after(self, number: int) -> bool | None:
        """Whether there is a round after round `number`; None if some node has not finished it yet."""
        if number + 1 == len(self._already):
            return False
        done = {(one.rank, one.round): one.with_signal for one in self._listed() if one.round <= number}
        if any((rank, number) not in done for rank in self._ranks):
            return None
        return sum(self._already[: number + 1]) + sum(done.values()) < self._enough

    def rounds_done(self) -> int:
        """The number of rounds this node has finished."""
        return sum(done.rank == self._rank for done in self._listed())

    def _listed(self) -> list[RoundDoneName]:
        # The directory is opened anew, which makes an NFS client revalidate its cache.
        return ROUND_DONE.parse_all(wait_out(lambda: os.listdir(self._folder), self._folder, "listed"))
