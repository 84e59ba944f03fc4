"""Distributes tasks between nodes while the phase runs: shares are split into lots, and each lot is claimed by an exclusive create.

A node claims the lots of its own share in order, each just before it needs it. When its share is used up, it lists the folder and claims
the last lots of the node with the most lots left. All nodes split the shares in the same way, so the file name identifies the lot. The
folder belongs to one generation and one split, and claims are never released.

Wrong claims are harmless: the part files record what was really done, and the merge takes each task once and reports missing ones. If two
nodes win a claim, the work is done twice; if none wins, the phase fails and is retried.
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

from fsbarrier.errors import StoreError
from fsbarrier.protocol.assign import lots
from fsbarrier.rundir.names import CUT, DURABLE_COUNT, LOT, ROUND_DONE
from fsbarrier.rundir.record_store import PosixStore
from fsbarrier.store import files, reading
from fsbarrier.store.retry import HIDDEN_S, fails_or_hides, patiently

T = TypeVar("T")


def _owner_of(claim: Path) -> bytes:
    return reading.read_bytes(claim, reading.RECORD_BYTES)


@dataclass(frozen=True, slots=True)
class Lot:
    """Lot `number` of the share of node `rank`, with its tasks."""

    rank: int
    number: int
    tasks: tuple[int, ...]

    @property
    def name(self) -> str:
        return LOT.build(self.rank, self.number)


class Claims:
    """The tasks that one node may still start. `folder=None`: only its own share, without claims.

    Not thread-safe. Every method may block on the shared directory.
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
        """`shares`: all nodes' shares, by rank. `first_lot`: the number of each node's first lot. Raises StoreError."""
        self.rank, self.folder = rank, folder
        self.made = self.lost = self.listings = 0
        self.seconds = 0.0
        # Tasks taken from other nodes' shares.
        self.taken_over: list[int] = []
        self._owner = f"{rank} {incarnation}\n".encode()
        self._left = {
            owner: deque(Lot(owner, number, tasks) for number, tasks in enumerate(lots(share), first_lot))
            for owner, share in shares.items()
            if folder is not None or owner == rank
        }
        # Whether another node has taken lots of our share. If so, the folder is listed before each claim.
        self._others_arrived = False
        # Lots claimed by an earlier start of this program, which was interrupted.
        self._earlier: tuple[int, ...] = ()
        if folder is not None:
            wait_out(lambda: files.make_dirs_below(folder.parent, folder), folder, "made")
            self._earlier = self._of_an_earlier_start(folder)

    @property
    def shared(self) -> bool:
        """Whether other nodes may take over tasks that this node has not started."""
        return self.folder is not None

    @property
    def own_left(self) -> int:
        """Tasks of our own share that are not claimed yet, as far as is known."""
        return len(self._earlier) + sum(len(lot.tasks) for lot in self._left.get(self.rank, ()))

    def take(self) -> tuple[int, ...]:
        """Claim and return the next tasks to start; () when nothing is left on any node. Raises StoreError.

        A restarted program also gets its earlier claims again, although some of those tasks may be done.
        """
        begin = time.monotonic()
        try:
            return self._take()
        finally:
            self.seconds += time.monotonic() - begin

    def take_lots(self, count: int) -> list[int]:
        """`take` until there are `count` tasks, or none is left. Raises StoreError."""
        tasks: list[int] = []
        while len(tasks) < count and (lot := self.take()):
            tasks += lot
        return tasks

    def summary(self) -> dict[str, int | float]:
        """For the result: the number of tasks taken over, and the cost of claiming."""
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
            # Nodes that run out of tasks at the same time should not all help the same node, so break ties differently on each
            # node.
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
            # No fsync: after a power loss the affected nodes are lost, and the next generation redistributes the tasks.
            won = files.create_exclusive(path, self._owner, durable=False)
            # The response to an earlier, successful attempt may have been lost.
            return won or (tries > 1 and _owner_of(path) == self._owner)

        won = wait_out(create, path, "claimed")
        self.made, self.lost = self.made + won, self.lost + (not won)
        return won

    def _leave_out_claimed(self, folder: Path) -> frozenset[str]:
        """Drop the lots claimed so far. With a stale listing too many remain, and claiming them then fails."""
        self.listings += 1
        # The directory is opened anew, which makes an NFS client revalidate its cache.
        names = frozenset(wait_out(lambda: os.listdir(folder), folder, "listed"))
        for owner, queue in self._left.items():
            self._left[owner] = deque(lot for lot in queue if lot.name not in names)
        return names

    def _of_an_earlier_start(self, folder: Path) -> tuple[int, ...]:
        everything = [lot for queue in self._left.values() for lot in queue]
        names = self._leave_out_claimed(folder)
        tasks: list[int] = []
        for lot in everything:
            path = folder / lot.name
            if lot.name in names and wait_out(partial(_owner_of, path), path, "read") == self._owner:
                tasks += lot.tasks
                self.taken_over += lot.tasks if lot.rank != self.rank else ()
        return tuple(tasks)


def remove_old(folder: Path, rank: int) -> None:
    """Clean up after all nodes have left the phase: each node removes the claims on its own share, the last one the folder."""
    # If this fails, the folder is already gone, or it stays; it is not read any more.
    store = PosixStore()
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            owned = LOT.parse(name) or ROUND_DONE.parse(name)
            mine = owned is not None and owned.rank == rank
            if mine or name in (DURABLE_COUNT.build(rank), CUT):
                store.remove(folder / name)
        folder.rmdir()


def wait_out(operation: Callable[[], T], path: Path, done: str) -> T:
    """The result of `operation` on the folder of the claims. Raises StoreError, which no code for HTTP takes for its own."""
    try:
        return patiently(operation, HIDDEN_S, passes=fails_or_hides)
    except OSError as error:
        raise StoreError(f"{path}: cannot be {done}: {error.strerror or error}") from error
