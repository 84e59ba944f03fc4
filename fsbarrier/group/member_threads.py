"""A group member's two threads: one looks and decides, the other writes heartbeats, while the caller computes.

Only they touch the filesystem, where any operation may hang. The caller reads snapshots, so its timeout holds whatever the mount does.
Both are daemon threads, so that neither keeps the interpreter alive.
"""

from __future__ import annotations

import os
import threading
import time

from fsbarrier.coordination.paces import next_beat_s
from fsbarrier.coordination.polling import FIRST_PAUSE_S, Polling
from fsbarrier.errors import Fenced, FsbarrierError
from fsbarrier.group.collective import Collective
from fsbarrier.group.member import GroupMember, Snapshot
from fsbarrier.group.noted_store import NotedStore
from fsbarrier.protocol.state import Exit, Stage
from fsbarrier.rundir.record_store import PosixStore
from fsbarrier.store.retry import Backoff

#: the first pause while a caller waits, for each member: members on one host compete for CPU time
PAUSE_FOR_EACH_S = 0.0003
LONGEST_PAUSE_S = 0.05
#: the largest number of nodes that use hints: members on one host wake each other, N x N times a barrier
HINTED_NODES = 16
#: between two tries to join
BEGIN_AGAIN_S = 0.05


class MemberThreads:
    """The two threads of one membership."""

    def __init__(self, member: GroupMember, store: NotedStore, beat_s: float) -> None:
        """`store`: the member's store."""
        self.beat_s, self.member, self._store = beat_s, member, store
        self.root, self.here, self.rules = (
            member.loop.observer.paths.root,
            member.loop.join,
            member.loop.rules,
        )
        self.snapshot: Snapshot = member.snapshot
        #: notified when a new snapshot shows something new
        self.news = threading.Condition()
        self._wake, self._leaving = threading.Event(), threading.Event()
        self._caller_waits = True
        self._looking, self._beating = (
            threading.Thread(target=target, name=f"fsbarrier-{name}", daemon=True)
            for name, target in (("look", self._run_looks), ("beat", self._write_heartbeats))
        )

    # --- what the caller asks for ---

    def start(self) -> None:
        self._looking.start()

    def ask(self, collective: Collective) -> None:
        """The caller calls a collective, perhaps again."""
        self.member.work.asked = collective
        self.look_often()

    def regroup(self, number: int) -> None:
        """Ask for a generation after `number`, of the living members and the nodes that wait to join."""
        self.member.regroup_after = number
        self.look_often()

    def look_often(self) -> None:
        """The caller waits: look at once, and often."""
        self._caller_waits = True
        self._wake.set()

    def look_rarely(self) -> None:
        """The caller does not wait: look rarely."""
        self._caller_waits = False

    def doing(self) -> str:
        """The current or last operation of the looking thread."""
        doing = self._store.doing
        return f"{doing[0]} {doing[1]}" if doing is not None else f"looking at {self.root}"

    def leave(self, why: str, within_s: float) -> None:
        """Tell the others and end both threads; abandon threads that hang for `within_s`. Never raises."""
        self.member.work.leaving, self.member.leaving = why, True
        self._leaving.set()
        self._wake.set()
        deadline = time.monotonic() + within_s
        for thread in (self._looking, self._beating):
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))

    # --- the looking thread ---

    def _run_looks(self) -> None:
        try:
            if os.path.lexists(self.member.loop.observer.paths.record):
                self.member.fail(
                    ValueError(f"{self.root} is the directory of a run; give the group one of its own")
                )
                self._show()
            while not self._has_ended() and not self.member.begin(time.monotonic()):
                self._show()
                self._leaving.wait(BEGIN_AGAIN_S)
            if self.member.begun:
                self._beating.start()
                self._look_until_the_end()
        except Exception as error:
            # A bug of ours: pass it to the caller, who would otherwise wait for ever.
            failure = FsbarrierError(f"node {self.here.rank}: internal error: {error!r}")
            failure.__cause__ = error
            self.member.fail(failure)
        self._show()

    def _look_until_the_end(self) -> None:
        # While the caller does not wait, the row does not matter: look once more, then rarely.
        idle = Backoff(FIRST_PAUSE_S, self.beat_s / 4, factor=1000.0)
        waiting = Backoff(PAUSE_FOR_EACH_S * max(1, self.rules.num_nodes - 2), LONGEST_PAUSE_S)
        polling = Polling(self.member.loop, self._wake, self.member.look)
        try:
            while not self._has_ended():
                busy = polling.look(time.monotonic())
                self._show()
                hints = self._caller_waits and self.rules.num_nodes <= HINTED_NODES
                polling.pause(waiting if self._caller_waits else idle, busy=busy, hints=hints)
        finally:
            polling.close()

    def _has_ended(self) -> bool:
        return self._leaving.is_set() or self.snapshot.failure is not None

    def _show(self) -> None:
        """Publish the snapshot of this look, and wake the caller if anything is new."""
        before, after = self.snapshot, self.member.snapshot
        # This node's own arrival is no news for the caller.
        new = (
            after.node.generation is not before.node.generation
            or after.ledger is not before.ledger
            or after.outcome is not before.outcome
            or after.failure is not None
        )
        with self.news:
            self.snapshot = after
            if new:
                self.news.notify_all()

    # --- the beating thread ---

    def _write_heartbeats(self) -> None:
        loop, store = self.member.loop, PosixStore()
        while True:
            failure = self.snapshot.failure
            last = self._leaving.is_set() or failure is not None
            if isinstance(failure, Fenced):
                # A newer start has this rank, or the others went on: nobody reads this heartbeat any more.
                return
            if last and loop.exit is None:
                loop.exit = Exit(0, "left", "left")
            now = time.monotonic()
            loop.write_beat(self.member.beat(now), store, now)
            if last:
                return
            joining = loop.node.stage is Stage.JOINING
            usual_s = self.beat_s / loop.observer.paces.eager if joining else self.beat_s
            self._leaving.wait(next_beat_s(usual_s))
