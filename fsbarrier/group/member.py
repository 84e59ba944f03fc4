"""One member of a group, without threads or a clock: it looks, decides, and finds out how its caller's call ends.

member_threads.py runs the looks in a thread, the simulator in virtual time. The caller never touches the filesystem: it sets what it
wants (`asked`, `regroup_after`), and reads the last Snapshot, which is immutable.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from fsbarrier.coordination.loop import NodeLoop
from fsbarrier.coordination.row_watch import RowListing
from fsbarrier.coordination.unreadable import must_read
from fsbarrier.errors import Fenced, FsbarrierError, NodeError, OutOfStep, PeerLost, StoreError
from fsbarrier.group.collective import Collective, CollectiveWork, Outcome, as_typed
from fsbarrier.protocol.facts import Beat, Fact, Generation, Join, Member, Pulse
from fsbarrier.protocol.membership import Ledger, Loss, live_joiners, losses
from fsbarrier.protocol.state import Node, View
from fsbarrier.rundir.names import CALL_FACT, CALLS_FACTS, ITERATIONS_FACTS, fact_name
from fsbarrier.store.retry import FAILING

#: errors of a start that may be transient: the mount fails for a moment, or shows new directories late
_MAY_PASS = FAILING | {errno.ENOENT}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a member last saw. `looked_at`: its last look without an error; `trouble`: the error of its last look, or ""."""

    node: Node
    looked_at: float
    trouble: str = ""
    ledger: Ledger = field(default_factory=Ledger)
    joins: Mapping[int, Join] = field(default_factory=dict)
    #: the members that are done with this node's row
    arrived: frozenset[int] = frozenset()
    #: the live ranks that wait to join
    joiners: tuple[int, ...] = ()
    #: how the last finished call ended
    outcome: Outcome | None = None
    #: what ended this membership
    failure: Exception | None = None


@dataclass
class GroupMember:
    """One membership. Only the looking thread calls its methods; the caller only sets the three wishes."""

    loop: NodeLoop
    work: CollectiveWork
    snapshot: Snapshot
    #: wish: regroup after this generation; 0: no
    regroup_after: int = 0
    begun: bool = False
    #: wish: leave; the end of the loop is then no failure
    leaving: bool = False
    #: the joins and heartbeats that the first look found, perhaps of an earlier session
    earlier_joins: Mapping[int, Join] = field(default_factory=dict)
    earlier_beats: Mapping[int, Pulse] = field(default_factory=dict)
    #: when the last heartbeat was written, and its distance from the one before
    _last_beat: tuple[float, float] = (0.0, 0.0)
    #: the last call that was examined, and the view in which it was
    _answered: tuple[Collective | None, View | None] = (None, None)
    #: the call, ledger and joins in which none of the awaited members was lost
    _nobody_lost: tuple[Collective | None, Ledger | None, Mapping[int, Join] | None] = (None, None, None)
    #: the call whose objects cannot be read, and since when
    _unread: tuple[Collective, float] | None = None

    @property
    def asked(self) -> Collective | None:
        """Wish: the caller's collective."""
        return self.work.asked

    def begin(self, now: float) -> bool:
        """Join the group's directory; True when done. After a transient failure, try again."""
        observer, here = self.loop.observer, self.loop.join
        try:
            observer.prepare()
            self.earlier_beats, self.earlier_joins = observer.read_beats(), dict(observer.joins)
            self.loop.start(now)
        except OSError as error:
            if error.errno in _MAY_PASS:
                self.snapshot = replace(self.snapshot, trouble=str(error))
            else:
                message = f"node {here.rank}: cannot join the group at {observer.paths.root}: {error}"
                self.fail(StoreError(message, here.rank, here.host, 0.0))
            return False
        self.begun, self._last_beat = True, (now, 0.0)
        return True

    def look(self, now: float) -> bool:
        """Run one tick. True if anything happened, so more may follow at once."""
        loop, before = self.loop, self.snapshot
        try:
            if self.regroup_after != loop.rules.regroup:
                loop.rules = replace(loop.rules, regroup=self.regroup_after)
                loop.observer.hurry()
            busy = loop.tick(now)
            asked, seen = self.asked, loop.observer.last_view
            if seen is not None and self._answered[0] is asked and self._answered[1] is seen:
                self.snapshot = replace(before, looked_at=now, trouble="")
                return busy
            failure = self._ended_since(before.node, now)
            outcome = before.outcome
            if asked is not None and failure is None and (outcome is None or outcome.of is not asked):
                outcome = self._outcome(asked, now) or outcome
        except OSError as error:
            # The next look tries again. The caller's timeout limits that.
            self.snapshot = replace(before, trouble=str(error))
            return False
        except FsbarrierError as error:
            self.fail(self._fenced(str(error), now))
            return False
        # Unreadable objects may be readable at the next look, even if nothing else is new.
        unread = self._unread is not None and self._unread[0] is asked
        self._answered = (None, None) if unread else (asked, seen)
        self._take_snapshot(now, outcome, failure)
        return busy

    def beat(self, now: float) -> Beat:
        """The next heartbeat, to be written now."""
        self._last_beat = now, now - self._last_beat[0]
        return self.loop.beat()

    def fail(self, failure: Exception) -> None:
        """End this membership."""
        self.snapshot = replace(self.snapshot, failure=failure)

    def _take_snapshot(self, now: float, outcome: Outcome | None, failure: Exception | None) -> None:
        loop, before = self.loop, self.snapshot
        observer, node = loop.observer, loop.node
        joiners = before.joiners
        if observer.ledger is not before.ledger or observer.joins is not before.joins:
            live = live_joiners(observer.joins, observer.ledger, now, loop.rules.limits)
            members = node.generation.ranks if node.generation is not None else ()
            joiners = tuple(rank for rank in sorted(live) if rank not in members)
        row = self._listing()
        arrived = row.arrived if row is not None else frozenset()
        self.snapshot = Snapshot(
            node, now, "", observer.ledger, observer.joins, arrived, joiners, outcome, failure
        )

    # --- what becomes of a call ---

    def _outcome(self, asked: Collective, now: float) -> Outcome | None:
        """How the call ends, if that is decided. Raises OSError."""
        node, observer = self.loop.node, self.loop.observer
        if node.generation is None:
            return None
        here = node.generation.number == asked.generation.number
        if here and node.position is not None and node.position > asked.position:
            return self._success(asked, now)
        lost: Loss | None = None
        if here:
            row = self._listing()
            if row is not None and row.call:
                odd = self._out_of_step(asked, row.names or ())
                if odd is not None:
                    return odd
            lost = self._lost_before(asked)
            if lost is None:
                return None
        # A member is lost, or the others have regrouped. If all had reached this row before, this node passes it too.
        names = observer.store.names(self._row(asked))
        odd = self._out_of_step(asked, names)
        if odd is not None:
            return odd
        if self._was_passed(asked, names):
            return self._success(asked, now)
        error = (
            self._peer_lost(asked, lost)
            if lost is not None
            else self._superseded(asked, node.generation, now)
        )
        return Outcome(asked, error=error)

    def _listing(self) -> RowListing | None:
        """The facts of the row that this node is in; None before the first look at it."""
        node, row = self.loop.node, self.loop.observer.row.listing
        if row is None or node.generation is None:
            return None
        return row if (row.generation, row.position) == (node.generation.number, node.position) else None

    def _out_of_step(self, asked: Collective, names: Iterable[str]) -> Outcome | None:
        """The error if these names of facts show that members have called different collectives."""
        begin, alike = ITERATIONS_FACTS.build(asked.position.iteration), CALLS_FACTS.build(asked.call)
        if all(name.endswith(alike) for name in names if name.startswith(begin)):
            return None
        members = {member.rank: member for member in asked.generation.members}
        facts = [one for one in CALL_FACT.parse_all(names) if one.iteration == asked.position.iteration]
        said = {fact.rank: fact.call for fact in facts if fact.rank in members}
        if len(set(said.values())) < 2:
            return None
        # A stale listing may lack this member's own fact.
        said.setdefault(self.loop.join.rank, asked.call)
        other = members[min(rank for rank, call in said.items() if call != asked.call)]
        calls = ", ".join(
            f"node {rank} ({members[rank].host}) called {as_typed(call)}"
            for rank, call in sorted(said.items())
        )
        message = (
            f"node {self.loop.join.rank}: the members are out of step in collective no. {asked.position.iteration} "
            f"of generation {asked.generation.number}: {calls}"
        )
        return Outcome(asked, error=OutOfStep(message, other.rank, other.host))

    def _lost_before(self, asked: Collective) -> Loss | None:
        """The first lost member that has not reached this node's row."""
        observer, known = self.loop.observer, self._nobody_lost
        if known[0] is asked and known[1] is observer.ledger and known[2] is observer.joins:
            return None
        row = self._listing()
        arrived = row.arrived if row is not None else ()
        lost = self._lost(member for member in asked.generation.members if member.rank not in arrived)
        self._nobody_lost = (asked, observer.ledger, observer.joins) if lost is None else (None, None, None)
        return lost

    def _lost(self, members: Iterable[Member]) -> Loss | None:
        """The first lost one of these members."""
        loop = self.loop
        observer, node = loop.observer, loop.node
        ledger, limits = observer.ledger, loop.rules.limits
        since = node.watches_since(ledger)
        found = losses(members, node.rank, observer.joins, ledger, since, limits)
        return found[0] if found else None

    def _was_passed(self, asked: Collective, names: Iterable[str]) -> bool:
        """Whether all members have reached this row.

        If a stale listing does not show it, a heartbeat may, since a member that passed the row has seen all facts. Example: node 1
        ends its script after its last barrier, and node 2's mount shows node 1's last heartbeat at once, but the facts 3 s later.
        """
        if {self._fact(asked, rank).name for rank in asked.generation.ranks}.issubset(names):
            return True
        ledger = self.loop.observer.ledger
        for member in asked.generation.members:
            news = ledger.news(member)
            here = news is not None and news.beat.generation == asked.generation.number
            if news is not None and here and news.beat.iteration > asked.position.iteration:
                return True
        return False

    def _success(self, asked: Collective, now: float) -> Outcome | None:
        """The successful outcome, if all objects can be read. They all exist, but a mount may show them late."""
        objects = []
        for rank in asked.objects_of:
            if rank == self.loop.join.rank:
                text = asked.json
            else:
                path = self._fact(asked, rank)
                try:
                    text = must_read(self.loop.observer.store, path, Fact).value["json"]
                except OSError as error:
                    return self._unreadable_object(asked, rank, f"{path}: {error}", now)
            objects.append(json.loads(text or "null"))
        return Outcome(asked, tuple(objects))

    def _unreadable_object(self, asked: Collective, rank: int, why: str, now: float) -> Outcome | None:
        if self._unread is None or self._unread[0] is not asked:
            self._unread = asked, now
        unread_s = now - self._unread[1]
        if unread_s < self.loop.rules.limits.dead_s:
            return None
        member = next(m for m in asked.generation.members if m.rank == rank)
        what = f"what node {rank} ({member.host}) gave cannot be read: {why}"
        message = f"node {self.loop.join.rank}: {asked.name}: {what}"
        if self._lost([member]) is not None:
            # Example: its host lost power before the object was flushed. It will never be readable.
            message = f"{message}; and that node is lost; regroup() goes on without it"
            return Outcome(asked, error=PeerLost(message, rank, member.host, unread_s))
        return Outcome(asked, error=StoreError(message, rank, member.host, unread_s))

    # --- errors ---

    def _peer_lost(self, asked: Collective, lost: Loss) -> PeerLost:
        member, why = lost.member, lost.why
        if lost.beat is not None and lost.beat.state == "left":
            observer = self.loop.observer
            status = observer.store.read(observer.paths.beat(member.rank, member.incarnation), Beat)
            left_because = status.progress.get("why") if status is not None else None
            why = f"it left the group after {left_because}" if left_because else "it left the group"
        message = (
            f"node {self.loop.join.rank}: {asked.name}: node {member.rank} ({member.host}) is lost: {why}; "
            "regroup() goes on without it"
        )
        return PeerLost(message, member.rank, member.host, lost.age_s)

    def _superseded(self, asked: Collective, new: Generation, now: float) -> PeerLost:
        """The error if another member has regrouped before this one."""
        old = asked.generation
        hosts = {m.rank: m.host for m in (*old.members, *new.members)}
        gone = [m for m in old.members if new.incarnation_of(m.rank) != m.incarnation]
        maker = f"node {new.created_by} ({hosts.get(new.created_by, '')})"
        names = ", ".join(f"node {m.rank} ({m.host})" for m in gone)
        what = f"{maker} regrouped without {names}" if gone else f"{maker} regrouped"
        message = (
            f"node {self.loop.join.rank}: {asked.name}: generation {old.number} is over: {what}; "
            "regroup() goes along"
        )
        if gone:
            return PeerLost(message, gone[0].rank, gone[0].host, self.loop.observer.ledger.age(gone[0], now))
        return PeerLost(message, new.created_by, hosts.get(new.created_by, ""))

    def _ended_since(self, before: Node, now: float) -> NodeError | None:
        """The error if this membership has ended since the node was as `before`."""
        loop = self.loop
        if before.generation is not None and loop.node.generation is None:
            newest = loop.observer.newest
            number = newest.number if newest is not None else "a newer one"
            return self._fenced(
                f"node {loop.node.rank}: the others took it for dead and went on as generation {number}; join again",
                now,
            )
        if loop.exit is not None and not self.leaving:
            if loop.exit.code == Fenced.exit_code:
                return self._fenced(loop.exit.reason, now)
            # An unreadable record, or one of another format: in a group nothing else ends a member's loop.
            return StoreError(loop.exit.reason, loop.join.rank, loop.join.host, 0.0)
        return None

    def _fenced(self, message: str, now: float) -> Fenced:
        """The error if the others went on without this node. Its age is the last gap between this node's heartbeats, which they saw."""
        here, newest = self.loop.join, self.loop.observer.joins.get(self.loop.node.rank)
        written_at, gap_s = self._last_beat
        silent_s = max(gap_s, now - written_at)
        return Fenced(message, here.rank, newest.host if newest is not None else here.host, silent_s)

    # --- facts on disk ---

    def _row(self, asked: Collective) -> Path:
        return self.loop.observer.row_dir(asked.generation.number, asked.position)

    def _fact(self, asked: Collective, rank: int) -> Path:
        return self._row(asked) / fact_name(asked.position.iteration, rank, "done", asked.call)
