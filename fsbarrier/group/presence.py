"""A group member's presence while its caller computes: one thread looks and decides, another beats.

Only the looking thread touches the agent. The caller hands it an offer and reads a `Sight`, which is never changed: neither ever
waits for a lock that the other holds during a call to the filesystem, so that a caller's deadline holds on a mount that hangs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from fsbarrier.errors import Fenced, FsbarrierError, StoreError
from fsbarrier.node.agent import Agent
from fsbarrier.node.directory_watch import Hints
from fsbarrier.protocol.facts import Join, Member, Payload, Position
from fsbarrier.protocol.membership import Ledger, live_joiners, losses, silence
from fsbarrier.protocol.state import Exit, Node, Part, Stage, WorkReport

POLL_MIN_S, POLL_MAX_S, POLL_GROWTH = 0.001, 0.05, 1.5
HINTED_NODES = 16  # where more share a host, each arrival would wake all of them: N x N wake-ups a barrier
LEAVE_S = 5.0  # what a last heartbeat may take on a filesystem that hangs


@dataclass
class Offer:
    """The work of a group's member: that of a row is done once the caller has offered a value for it.

    A row is named with its generation: the caller may offer for one that the looking thread has just left.
    """

    given: tuple[int, Position, Payload] | None = None
    row: tuple[int, Position] | None = None
    leaving: str = ""

    def launch(self, node: Node, part: Part) -> None:
        assert node.generation is not None and node.position is not None
        self.row = node.generation.number, node.position

    def cancel(self) -> None:
        self.given = self.row = None

    def report(self) -> WorkReport | None:
        given = self.given
        if given is None or given[:2] != self.row:
            return None
        return WorkReport(Part.EACH, True, given[2], 0.0)

    def progress(self) -> Payload:
        return {"why": self.leaving} if self.leaving else {}


@dataclass(frozen=True)
class Missing:
    """A member that is waited for: why it will not come ("" while it may), and the seconds without news of it."""

    member: Member
    age: float
    why: str = ""


@dataclass(frozen=True)
class Sight:
    """What the looking thread last saw. `missing`: the members that are not yet in this node's row, the lost ones first."""

    node: Node
    looked_at: float
    ledger: Ledger = field(default_factory=Ledger)
    joins: Mapping[int, Join] = field(default_factory=dict)
    missing: tuple[Missing, ...] = ()
    joiners: tuple[int, ...] = ()
    failure: FsbarrierError | None = None


class Presence:
    """The two threads of one membership."""

    def __init__(self, agent: Agent, offer: Offer, beat_s: float) -> None:
        self.beat_s = beat_s
        self.changed = threading.Condition()
        self.known = dict(agent.observer.joins)  # what was there before this node looked again
        self.root, self.here, self.rules = agent.observer.paths.root, agent.join, agent.rules
        self._agent, self._offer = agent, offer
        self.sight = Sight(agent.node, time.monotonic())
        self._leaving, self._hurry = threading.Event(), threading.Event()
        self._busy = True  # a caller waits
        self._regroup = 0  # the generation that is to be followed by the next
        self._unheard = (
            time.monotonic(),
            0.0,
        )  # the last heartbeat that was written, and how long after the one before
        self._hints = Hints(self.root, self._hurry.set)
        self._threads = [
            threading.Thread(target=target, name=f"fsbarrier-{name}", daemon=True)
            for name, target in (("look", self._look), ("beat", self._beat))
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def offer(self, generation: int, position: Position, value: Payload) -> None:
        """This node is done with row `position` of a generation; `value` is what it gives to it."""
        self._offer.given = generation, position, value
        self.hurry()

    def regroup(self, number: int) -> None:
        """Let generation `number` be followed by one of the living and of those who wait to join."""
        self._regroup = number
        self.hurry()

    def hurry(self) -> None:
        """A caller waits: look at once, and often."""
        self._busy = True
        self._hurry.set()

    def rest(self) -> None:
        """No caller waits."""
        self._busy = False

    def leave(self, why: str) -> None:
        """End both threads and tell the others. Never raises."""
        self._offer.leaving = why
        self._leaving.set()
        self._hurry.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(LEAVE_S)
        self._hints.close()

    # --- looking ---

    def _look(self) -> None:
        interval, failing_since = POLL_MIN_S, None
        while not self._leaving.is_set() and self.sight.failure is None:
            now, before = time.monotonic(), self.sight
            failure: FsbarrierError | None = None
            busy = False
            try:
                if self._regroup != self._agent.rules.regroup:
                    self._agent.rules = replace(self._agent.rules, regroup=self._regroup)
                    self._agent.observer.hurry()
                busy = self._agent.tick(now)
                failing_since = None
                failure = self._ended(before.node)
            except FsbarrierError as error:
                failure = self._fenced(str(error))
            except OSError as error:
                failing_since = now if failing_since is None else failing_since
                if now - failing_since >= self.rules.limits.dead_s:
                    failure = self._store_error(error, now - failing_since)
            except Exception as error:  # a fault of ours must not look like waiting
                failure = FsbarrierError(f"node {self._agent.node.rank}: internal error: {error!r}")
                failure.__cause__ = error
            self._show(before, now, failure)
            interval = POLL_MIN_S if busy else min(interval * POLL_GROWTH, self._longest())
            few = self.rules.num_nodes <= HINTED_NODES
            self._hints.watch(self._row_dir() if few and interval == POLL_MAX_S else None)
            if self._hurry.wait(interval):
                self._hurry.clear()
                interval = POLL_MIN_S

    def _longest(self) -> float:
        """While the caller computes there is nothing to be quick for."""
        return POLL_MAX_S if self._busy else max(POLL_MAX_S, self.beat_s / 4)

    def _row_dir(self) -> Path | None:
        node = self._agent.node
        if node.generation is None or node.position is None:
            return None
        return self._agent.observer.row_dir(node.generation.number, node.position)

    def _show(self, before: Sight, now: float, failure: FsbarrierError | None) -> None:
        """Tell the caller, if there is anything to tell."""
        agent, observer = self._agent, self._agent.observer
        news = agent.node is not before.node or observer.ledger is not before.ledger or failure is not None
        missing, joiners, joins = before.missing, before.joiners, before.joins
        if news:
            joins = dict(observer.joins)
            live = live_joiners(joins, observer.ledger, now, self.rules.limits)
            members = agent.node.generation.ranks if agent.node.generation is not None else ()
            joiners = tuple(rank for rank in sorted(live) if rank not in members)
            try:
                missing = self._missing(now)
            except OSError:
                pass  # the next look meets it
        sight = Sight(agent.node, now, observer.ledger, joins, missing, joiners, failure)
        with self.changed:
            self.sight = sight
            if news:
                self.changed.notify_all()

    def _missing(self, now: float) -> tuple[Missing, ...]:
        """The other members whose fact is not in this node's row."""
        node, observer, limits = self._agent.node, self._agent.observer, self.rules.limits
        if node.generation is None:
            return ()
        ledger, arrived = observer.ledger, observer.view(node, now).arrived
        members = [m for m in node.generation.members if m.rank not in arrived and m.rank != node.rank]
        lost = {
            loss.member: loss.why
            for loss in losses(members, node.rank, observer.joins, ledger, node.since, now, limits)
        }
        found = []
        for member in members:
            why = lost.get(member, "")
            if why and ledger.state(member) == "left":
                said = ledger.seen[member.rank].beat.progress.get("why")
                why = f"it left the group after {said}" if said else "it left the group"
            found.append(Missing(member, silence(member, ledger, node.since, now), why))
        return tuple(sorted(found, key=lambda one: (not one.why, one.member.rank)))

    # --- ends ---

    def _ended(self, before: Node) -> FsbarrierError | None:
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
        here, newest = self.here, self._agent.observer.joins.get(self._agent.node.rank)
        written_at, gap = self._unheard
        age = max(gap, time.monotonic() - written_at)
        return Fenced(message, here.rank, newest.host if newest is not None else here.host, age)

    def _store_error(self, error: OSError, seconds: float) -> StoreError:
        here = self.here
        return StoreError(
            f"node {here.rank}: {self.root} has failed for {seconds:.0f} s: {error}",
            here.rank,
            here.host,
            seconds,
        )

    # --- beating ---

    def _beat(self) -> None:
        paths, store = self._agent.observer.paths, self._agent.store
        while True:
            failure = self.sight.failure
            last = self._leaving.is_set() or failure is not None
            if isinstance(failure, Fenced):
                return  # nobody listens to a start that was superseded
            if last and self._agent.exit is None:
                self._agent.exit = Exit(0, "left", "left")
            try:
                beat = self._agent.beat()
                store.put(paths.beat(beat.rank, beat.incarnation), beat)
                now = time.monotonic()
                self._unheard = now, now - self._unheard[0]
            except OSError:
                pass  # the looking thread meets the same filesystem, and tells
            if last:
                return
            joining = self._agent.node.stage is Stage.JOINING
            self._leaving.wait(self.beat_s / self._agent.observer.paces.eager if joining else self.beat_s)
