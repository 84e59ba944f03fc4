"""Which node rolls out which task, settled while the phase runs: shares in lots, each claimed by an exclusive create.

A node claims the lots of its own share from the first on, each just before it needs it. When its share is used up, it lists the folder
and claims the last lots of the node that has most left. All nodes cut the shares into the same lots, so a file's name tells which lot
is claimed. The folder belongs to one generation and one split, and a claim is never given back.

A claim that goes wrong does no harm: the part files say what was really done, and the merge takes each task once and names those that
are missing. If two nodes win a claim, work is done twice; if none wins, the phase fails and is tried again.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from fsbarrier import files
from fsbarrier.errors import StoreError
from fsbarrier.protocol.assign import lots
from fsbarrier.reading import RECORD_BYTES, read_bytes
from fsbarrier.retry import until_seen
from fsbarrier.rundir.names import CUT, DURABLE_COUNT, LOT, ROUND_DONE

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Lot:
    """Lot `number` of the share of node `rank`: its tasks."""

    rank: int
    number: int
    tasks: tuple[int, ...]

    @property
    def name(self) -> str:
        return LOT.build(self.rank, self.number)


class Claims:
    """The tasks that one node may still start. `folder` None: only those of its own share, and nobody claims anything.

    For one caller at a time; every method may take as long as the shared directory does.
    """

    def __init__(
        self,
        shares: Mapping[int, Sequence[int]],
        rank: int,
        *,
        folder: Path | None,
        incarnation: int = 0,
        first_lot: int = 0,
    ) -> None:
        """`shares`: every node's, by rank. `first_lot`: the number of each one's first lot. Raises StoreError."""
        self.rank, self.folder = rank, folder
        self.made = self.lost = self.listings = 0
        self.seconds = 0.0
        # Tasks of others' shares.
        self.taken_over: list[int] = []
        self._owner = f"{rank} {incarnation}\n".encode()
        self._left = {
            owner: deque(Lot(owner, number, tasks) for number, tasks in enumerate(lots(share), first_lot))
            for owner, share in shares.items()
            if folder is not None or owner == rank
        }
        # Another node has taken from the end of the own share: from now on the folder is listed before each claim.
        self._others_arrived = False
        # Claimed by an earlier start of this very program, which was cut off.
        self._earlier: tuple[int, ...] = ()
        if folder is not None:
            _retry(lambda: files.make_dirs_below(folder.parent, folder), folder, "made")
            self._earlier = self._of_an_earlier_start(folder)

    @property
    def shared(self) -> bool:
        """Whether other nodes may do what this one has not begun."""
        return self.folder is not None

    @property
    def own_left(self) -> int:
        """Tasks of the own share that are still to be taken, as far as is known."""
        return len(self._earlier) + sum(len(lot.tasks) for lot in self._left.get(self.rank, ()))

    def take(self) -> tuple[int, ...]:
        """The next tasks to start, claimed; () when nothing is left anywhere. Raises StoreError.

        A program that starts again gets what it had claimed before, too: it may have done some of that.
        """
        begin = time.monotonic()
        try:
            return self._take()
        finally:
            self.seconds += time.monotonic() - begin

    def summary(self) -> dict[str, int | float]:
        """For a result: how many tasks of others were taken over, and what claiming cost."""
        return {
            "taken_over": len(self.taken_over),
            "claims": self.made,
            "claims_lost": self.lost,
            "claim_listings": self.listings,
            "claim_s": round(self.seconds, 4),
        }

    def _take(self) -> tuple[int, ...]:
        if self._earlier:
            earlier, self._earlier = self._earlier, ()
            return earlier
        own = self._left.get(self.rank, deque())
        while own and not self._others_arrived:
            lot = own.popleft()
            if self._claim(lot):
                return lot.tasks
            self._others_arrived = True
        while self.folder is not None:
            self._leave_out_claimed(self.folder)
            left = {
                owner: sum(len(lot.tasks) for lot in queue) for owner, queue in self._left.items() if queue
            }
            if not left:
                break
            # Nodes that run out of tasks together should not all help the same node: where several have equally much left, each
            # prefers another one.
            owner = max(left, key=lambda rank: (left[rank], -((rank - self.rank) % (1 + max(left)))))
            lot = self._left[owner].pop()
            if self._claim(lot):
                self.taken_over += lot.tasks if owner != self.rank else ()
                return lot.tasks
        return ()

    def _claim(self, lot: Lot) -> bool:
        if self.folder is None:
            return True
        path, tries = self.folder / lot.name, 0

        def create() -> bool:
            nonlocal tries
            tries += 1
            # Not flushed: after a power loss the nodes that it hit are lost, and the next generation shares out anew.
            won = files.create_exclusive(path, self._owner, durable=False)
            # The answer to an earlier try may have been lost on its way back.
            return won or (tries > 1 and read_bytes(path, RECORD_BYTES) == self._owner)

        won = _retry(create, path, "claimed")
        self.made, self.lost = self.made + won, self.lost + (not won)
        return won

    def _leave_out_claimed(self, folder: Path) -> frozenset[str]:
        """Leave out what is claimed by now. A listing that is behind shows too much left, and then the claim is lost."""
        self.listings += 1
        # The directory is freshly opened, which makes an NFS client look again.
        names = frozenset(_retry(lambda: os.listdir(folder), folder, "listed"))
        for owner, queue in self._left.items():
            self._left[owner] = deque(lot for lot in queue if lot.name not in names)
        return names

    def _of_an_earlier_start(self, folder: Path) -> tuple[int, ...]:
        everything = [lot for queue in self._left.values() for lot in queue]
        names = self._leave_out_claimed(folder)
        tasks: list[int] = []
        for lot in everything:
            path = folder / lot.name
            if (
                lot.name in names
                and _retry(partial(read_bytes, path, RECORD_BYTES), path, "read") == self._owner
            ):
                tasks += lot.tasks
                self.taken_over += lot.tasks if lot.rank != self.rank else ()
        return tuple(tasks)


def remove_old(folder: Path, rank: int) -> None:
    """Clean up after a phase that all nodes have left: each node removes the claims on its own share, the last one the folder."""
    # If this fails, the folder is gone already, or it stays: nobody reads it any more.
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            owned = LOT.parse(name) or ROUND_DONE.parse(name)
            mine = owned is not None and owned.rank == rank
            if mine or name in (DURABLE_COUNT.build(rank), CUT):
                (folder / name).unlink(missing_ok=True)
        folder.rmdir()


def _retry(operation: Callable[[], T], path: Path, done: str) -> T:
    """What `operation` gives, once the filesystem does not fail. Raises StoreError."""
    try:
        return until_seen(operation)
    except OSError as error:
        raise StoreError(f"{path}: cannot be {done}: {error.strerror or error}") from error
