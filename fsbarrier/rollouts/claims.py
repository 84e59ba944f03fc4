"""The folder in which nodes agree while a rollout phase runs: who does which task, and when the phase ends.

Claims distribute the tasks: shares are split into lots, and each lot is claimed by an exclusive create.

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
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from fsbarrier.errors import StoreError
from fsbarrier.protocol.assign import lots
from fsbarrier.rundir.names import CUT, DURABLE_COUNT, LOT, ROUND_DONE, SESSIONS, RoundDoneName
from fsbarrier.rundir.record_store import PosixStore
from fsbarrier.store import files, reading
from fsbarrier.store.retry import HIDDEN_S, Backoff, fails_or_hides, patiently

#: polling interval of the early end; it grows with the number of nodes above FULL_RATE, to limit the total read rate
LOOK_S = 1.0
FULL_RATE = 50
#: polling interval at the end of a round
PAUSES = Backoff(0.05, 1.0)

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
        self.made = 0
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

    def take_lots(self, count: int) -> list[int]:
        """`take` until there are `count` tasks, or none is left. Raises StoreError."""
        tasks: list[int] = []
        while len(tasks) < count and (lot := self.take()):
            tasks += lot
        return tasks

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
        self.made += won
        return won

    def _leave_out_claimed(self, folder: Path) -> frozenset[str]:
        """Drop the lots claimed so far. With a stale listing too many remain, and claiming them then fails."""
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
            owned = LOT.parse(name) or ROUND_DONE.parse(name) or SESSIONS.parse(name)
            mine = owned is not None and owned.rank == rank
            if mine or name in (DURABLE_COUNT.build(rank), CUT):
                store.remove(folder / name)
        folder.rmdir()


def wait_out(operation: Callable[[], T], path: Path, done: str) -> T:
    """Run `operation` on the claims folder, with retries. Raises StoreError, because HTTP code would take an OSError for one of its own."""
    try:
        return patiently(operation, HIDDEN_S, passes=fails_or_hides)
    except OSError as error:
        raise StoreError(f"{path}: cannot be {done}: {error.strerror or error}") from error


# --- the end of the phase ------------------------------------------------------------------------------------------------


@dataclass
class EarlyEnd:
    """Ends a phase without its slowest groups: once `need` groups are on disk across all nodes, the rest get `grace_s` more.

    Each node publishes its number of finished groups in a file and reads the other nodes' files. The first node that has seen enough
    groups for `grace_s`, on its own clock, creates the file `cut`, and every node that sees it ends the phase. Nodes may see it at
    different times: each result records what that node did, and the leader's decision records what is missing.
    """

    folder: Path
    rank: int
    need: int
    grace_s: float
    clock: Callable[[], float] = time.monotonic
    _enough_since: float | None = None
    _reported: int = -1
    _counts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        files.make_dirs(self.folder)

    @property
    def pause_s(self) -> float:
        """The time to wait until the next poll."""
        return max(min(LOOK_S, self.grace_s / 4), LOOK_S * len(self._counts) / FULL_RATE, 0.1)

    def report(self, durable: int) -> None:
        """Publish the number of groups that this node has on disk."""
        if durable != self._reported:
            # If this fails, the next count will be published.
            with contextlib.suppress(OSError):
                files.write_atomic(self.folder / DURABLE_COUNT.build(self.rank), b"%d\n" % durable)
                self._reported = durable

    def reached(self) -> bool:
        """Whether to end the phase now. If the folder is unreadable, the next poll decides."""
        try:
            return self._reached(os.listdir(self.folder))
        except OSError:
            return False

    def _reached(self, names: Sequence[str]) -> bool:
        if CUT in names:
            return True
        if self._durable_everywhere(names) < self.need:
            return False
        if self._enough_since is None:
            self._enough_since = self.clock()
        if self.clock() - self._enough_since < self.grace_s:
            return False
        files.write_atomic(self.folder / CUT, f"{DURABLE_COUNT.build(self.rank)}\n".encode())
        return True

    def _durable_everywhere(self, names: Sequence[str]) -> int:
        for name in names:
            if DURABLE_COUNT.parse(name) is not None:
                # A file may be unreadable while it is replaced; keep the previous count.
                with contextlib.suppress(OSError, ValueError):
                    self._counts[name] = int(
                        reading.read_bytes(self.folder / name, reading.RECORD_BYTES)[:20]
                    )
        return sum(self._counts.values())


@dataclass(frozen=True)
class Refills:
    """Decides whether a training rollout needs another round, because too few groups have differing rewards (`rollout.max_refills`).

    When one of the `ranks` has finished a round and its groups are on disk, it creates an empty file. The file name contains the number
    of its groups with signal, i.e. with differing rewards; `already` has those from an older generation, by round. Once the files of all
    nodes are listed, every node computes the same sum and the same decision: whether that is `enough`. If a node dies before it creates
    its file, the generation ends, and the next one adopts the groups. The methods may block on the shared directory, and raise StoreError.
    """

    folder: Path
    rank: int
    ranks: Collection[int]
    already: Sequence[int]
    enough: int

    def __post_init__(self) -> None:
        wait_out(lambda: files.make_dirs_below(self.folder.parent, self.folder), self.folder, "made")

    def report(self, number: int, with_signal: int) -> None:
        """Report that this node has finished round `number`. An earlier report of this node takes precedence."""
        mine = ROUND_DONE.build(self.rank, number, with_signal)
        if all((done.rank, done.round) != (self.rank, number) for done in self._listed()):
            path = self.folder / mine
            wait_out(lambda: files.create_exclusive(path, b"", durable=False), path, "made")

    def another_after(self, number: int) -> bool | None:
        """Whether there is a round after round `number`; None if some node has not finished it yet."""
        if number + 1 == len(self.already):
            return False
        done = {
            (report.rank, report.round): report.with_signal
            for report in self._listed()
            if report.round <= number
        }
        if any((rank, number) not in done for rank in self.ranks):
            return None
        return sum(self.already[: number + 1]) + sum(done.values()) < self.enough

    def rounds_done(self) -> int:
        """The number of rounds this node has finished."""
        return sum(done.rank == self.rank for done in self._listed())

    def _listed(self) -> list[RoundDoneName]:
        # The directory is opened anew, which makes an NFS client revalidate its cache.
        return ROUND_DONE.parse_all(wait_out(lambda: os.listdir(self.folder), self.folder, "listed"))
