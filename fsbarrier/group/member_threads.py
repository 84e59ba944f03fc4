"""A group member's two threads, which work while its caller computes: one looks and decides, the other beats.

Only the looking thread touches the agent. The caller hands it contributions and reads a `Snapshot`, which never changes. Neither
waits for a lock that the other holds during a call to the filesystem, so a caller's deadline holds on a mount that hangs.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fsbarrier.errors import Fenced, FsbarrierError, StoreError
from fsbarrier.group.collective_work import CollectiveWork
from fsbarrier.node.loop import NodeLoop
from fsbarrier.node.polling import FIRST_PAUSE_S, Polling
from fsbarrier.protocol.facts import Beat, Join, Member, Payload, Position
from fsbarrier.protocol.membership import Ledger, live_joiners, losses, silence
from fsbarrier.protocol.state import Exit, Node, Stage
from fsbarrier.retry import Backoff

#: while a caller waits
PAUSES = Backoff(FIRST_PAUSE_S, 0.05)
#: Up to so many nodes use hints. If many members share a host, each arrival wakes all of them: N x N wake-ups a barrier.
HINTED_NODES = 16
#: how long the last heartbeat may take on a filesystem that hangs
LEAVE_S = 5.0


@dataclass(frozen=True, slots=True)
class MissingMember:
    """A member that has not come yet: the seconds without news of it, and why it will not come ("" while it may)."""

    member: Member
    silent_s: float
    lost_because: str = ""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the looking thread last saw, and when. `failure`: what ended this membership."""

    node: Node
    looked_at: float
    ledger: Ledger = field(default_factory=Ledger)
    joins: Mapping[int, Join] = field(default_factory=dict)
    #: the members that are not yet in this node's row, the lost ones first
    missing: tuple[MissingMember, ...] = ()
    #: the ranks that are alive and wait to be taken in
    joiners: tuple[int, ...] = ()
    failure: FsbarrierError | None = None


class MemberThreads:
    """The two threads of one membership."""

    def __init__(
        self, agent: NodeLoop, work: CollectiveWork, beat_s: float, earlier_beats: Mapping[int, Beat]
    ) -> None:
        """`earlier_beats`: each rank's last heartbeat from before this node announced itself."""
        self.beat_s = beat_s
        self.root, self.here, self.rules = agent.observer.paths.root, agent.join, agent.rules
        #: the joins and heartbeats that this node's first look found; those nodes may be long gone
        self.earlier_joins, self.earlier_beats = dict(agent.observer.joins), earlier_beats
        self.snapshot = Snapshot(agent.node, time.monotonic())
        #: notified when a new snapshot shows something new
        self.news = threading.Condition()
        self._agent, self._work = agent, work
        self._wake, self._leaving = threading.Event(), threading.Event()
        self._polling = Polling(agent, self._wake)
        self._caller_waits = True
        #: the generation that is to be followed by the next, 0: none
        self._regroup = 0
        #: when the last heartbeat was written, and how long after the one before
        self._last_beat = (time.monotonic(), 0.0)
        self._threads = [
            threading.Thread(target=target, name=f"fsbarrier-{name}", daemon=True)
            for name, target in (("look", self._look), ("beat", self._beat))
        ]

    # --- what the caller asks for ---

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def contribute(self, generation: int, position: Position, value: Payload) -> None:
        """This node is done with row `position` of a generation; `value` is what the others get of it."""
        self._work.contributed = generation, position, value
        self.look_often()

    def regroup(self, number: int) -> None:
        """Let generation `number` be followed by one of the living and of those who wait to join."""
        self._regroup = number
        self.look_often()

    def look_often(self) -> None:
        """A caller waits: look at once, and often."""
        self._caller_waits = True
        self._wake.set()

    def look_rarely(self) -> None:
        """No caller waits, so that looking seldom is enough."""
        self._caller_waits = False

    def leave(self, why: str) -> None:
        """End both threads and tell the others. Never raises."""
        self._work.leaving = why
        self._leaving.set()
        self._wake.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(LEAVE_S)
        self._polling.close()

    # --- the looking thread ---

    def _look(self) -> None:
        idle = Backoff(FIRST_PAUSE_S, max(PAUSES.most_s, self.beat_s / 4))
        while not self._leaving.is_set() and self.snapshot.failure is None:
            now, before = time.monotonic(), self.snapshot
            busy, failure = False, None
            try:
                if self._regroup != self._agent.rules.regroup:
                    self._agent.rules = replace(self._agent.rules, regroup=self._regroup)
                    self._agent.observer.hurry()
                busy = self._polling.look(now)
                failure = self._ended(before.node)
            except StoreError as error:
                failure = error
            except FsbarrierError as error:
                failure = self._fenced(str(error))
            except Exception as error:
                # Hand a bug of ours to the caller, who would otherwise wait for ever.
                failure = FsbarrierError(f"node {self._agent.node.rank}: internal error: {error!r}")
                failure.__cause__ = error
            self._show(before, now, failure)
            hints = self._caller_waits and self.rules.num_nodes <= HINTED_NODES
            self._polling.pause(PAUSES if self._caller_waits else idle, busy=busy, hints=hints)

    def _show(self, before: Snapshot, now: float, failure: FsbarrierError | None) -> None:
        """Show the caller what this look saw, and wake it up if anything is new."""
        agent, ledger = self._agent, self._agent.observer.ledger
        news = agent.node != before.node or ledger != before.ledger or failure is not None
        missing, joiners, joins = before.missing, before.joiners, before.joins
        if news:
            joins = dict(agent.observer.joins)
            live = live_joiners(joins, ledger, now, self.rules.limits)
            members = agent.node.generation.ranks if agent.node.generation is not None else ()
            joiners = tuple(rank for rank in sorted(live) if rank not in members)
            # If this fails, the next look meets the same filesystem.
            with contextlib.suppress(OSError):
                missing = self._missing(now)
        snapshot = Snapshot(agent.node, now, ledger, joins, missing, joiners, failure)
        with self.news:
            self.snapshot = snapshot
            if news:
                self.news.notify_all()

    def _missing(self, now: float) -> tuple[MissingMember, ...]:
        """The other members whose fact is not in this node's row."""
        node, observer, limits = self._agent.node, self._agent.observer, self.rules.limits
        if node.generation is None:
            return ()
        ledger, arrived = observer.ledger, observer.view(node, now).arrived
        absent = [m for m in node.generation.members if m.rank not in arrived and m.rank != node.rank]
        lost = losses(absent, node.rank, observer.joins, ledger, node.since, now, limits)
        reasons = {loss.member: loss.why for loss in lost}
        found = []
        for member in absent:
            reason = reasons.get(member, "")
            if reason and ledger.state(member) == "left":
                left_because = ledger.seen[member.rank].beat.progress.get("why")
                reason = f"it left the group after {left_because}" if left_because else "it left the group"
            found.append(MissingMember(member, silence(member, ledger, node.since, now), reason))
        return tuple(sorted(found, key=lambda one: (not one.lost_because, one.member.rank)))

    def _ended(self, before: Node) -> FsbarrierError | None:
        """Why this membership is over, if it is since the node was as `before`."""
        agent = self._agent
        if before.generation is not None and agent.node.generation is None:
            newest = agent.observer.newest
            number = newest.number if newest is not None else "a newer one"
            return self._fenced(
                f"node {agent.node.rank}: the others took it for dead and went on as generation {number}; join again"
            )
        if agent.exit is not None and not self._leaving.is_set():
            fenced = agent.exit.code == Fenced.exit_code
            return self._fenced(agent.exit.reason) if fenced else FsbarrierError(agent.exit.reason)
        return None

    def _fenced(self, message: str) -> Fenced:
        """The others went on without this node. Its age is this node's last gap between two heartbeats, which they saw as silence."""
        here, newest = self.here, self._agent.observer.joins.get(self._agent.node.rank)
        written_at, gap_s = self._last_beat
        silent_s = max(gap_s, time.monotonic() - written_at)
        return Fenced(message, here.rank, newest.host if newest is not None else here.host, silent_s)

    # --- the beating thread ---

    def _beat(self) -> None:
        paths, store = self._agent.observer.paths, self._agent.store
        while True:
            failure = self.snapshot.failure
            last = self._leaving.is_set() or failure is not None
            if isinstance(failure, Fenced):
                # A newer start has this rank, or the others went on: nobody reads this start's heartbeat any more.
                return
            if last and self._agent.exit is None:
                self._agent.exit = Exit(0, "left", "left")
            # If this fails, the looking thread meets the same filesystem, and tells the caller.
            with contextlib.suppress(OSError):
                beat = self._agent.beat()
                store.put(paths.beat(beat.rank, beat.incarnation), beat)
                now = time.monotonic()
                self._last_beat = now, now - self._last_beat[0]
            if last:
                return
            joining = self._agent.node.stage is Stage.JOINING
            self._leaving.wait(self.beat_s / self._agent.observer.paces.eager if joining else self.beat_s)
