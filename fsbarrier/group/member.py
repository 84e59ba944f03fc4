"""One member of a group, without threads or a clock. It runs the node's loop and decides how its caller's call ends.

`Group` drives it with the machine's clock, and the simulator in virtual time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from fsbarrier.coordination.loop import LookAgain, NodeLoop
from fsbarrier.coordination.observer import Observer
from fsbarrier.coordination.own_facts import refresh_listing
from fsbarrier.coordination.poll_intervals import DICE, PollIntervals, join_factor, next_beat_s
from fsbarrier.errors import Fenced, FsbarrierError, NodeError, OutOfStep, PeerLost, StoreError
from fsbarrier.group.collective import BARRIER, TABLE, Collective, CollectiveWork, answers
from fsbarrier.protocol.facts import Beat, Fact, Generation, Join, Member, Pulse
from fsbarrier.protocol.membership import UNWRITABLE, Limits, Loss, live_joiners, losses
from fsbarrier.protocol.state import Exit, Rules, Stage
from fsbarrier.rundir.names import START, fact_name
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.record_store import Store


@dataclass(frozen=True, slots=True)
class Awaited:
    """A missing node: how long it has been silent (None: unknown), and what is known about it, for people."""

    rank: int
    host: str
    silent_s: float | None
    known: str


@dataclass
class GroupMember:
    """One membership. Only the caller's thread calls its methods, except `beat`."""

    loop: NodeLoop
    work: CollectiveWork
    #: the error that ended this membership
    failure: NodeError | None = None
    #: when the present look began; None between looks
    looking_since: float | None = None
    #: whether this node has been in a generation
    _entered: bool = False
    #: the names of the joins, and the heartbeats, that existed when this node joined; they may belong to an earlier session
    _earlier_joins: Set[str] = frozenset()
    _earlier_beats: Mapping[int, Pulse] = field(default_factory=dict)

    @property
    def generation(self) -> Generation | None:
        """The newest generation that this node is in."""
        return self.loop.node.generation

    def begin(self, now: float) -> None:
        """Join the group's directory. Raises OSError; may be tried again."""
        observer, store, paths = self.loop.observer, self.loop.store, self.loop.observer.paths
        observer.prepare()
        # Files that appear from here on belong to this session. So a stale listing must not hide the files of earlier sessions now.
        for folder in (paths.joins, paths.beats):
            refresh_listing(store, folder, self.loop.join.rank)
        self._earlier_joins, beats = frozenset(store.names(paths.joins)), observer.read_beats()
        observer.ledger = observer.ledger.observe(beats, now, None, observer.intervals.poll_gap_s)
        self._earlier_beats = beats
        self.loop.start(now)

    def tick(self, now: float) -> LookAgain:
        """Run one tick; returns when to run the next. Raises OSError, and the error that ended the membership."""
        # A tick may fail after the node has left its generation.
        self._entered = self._entered or self.generation is not None
        if self.failure is None:
            self.looking_since = now
            try:
                again = self.loop.tick(now)
                self.failure = self._end()
            except FsbarrierError as error:
                self.failure = self._fenced(str(error))
            finally:
                self.looking_since = None
        if self.failure is not None:
            raise self.failure
        return again

    def beat(self, now: float, beat_s: float, *, last: bool = False, dice: Random = DICE) -> float:
        """Write a heartbeat; returns the pause before the next one. It may be called while the caller computes. `last`: the member leaves.
        A member whose look hangs writes none, since the others should not wait for it for ever."""
        loop, since = self.loop, self.looking_since
        if last and loop.exit is None:
            loop.exit = Exit(0, "left", "left")
        if last or since is None or now - since <= loop.rules.limits.suspect_s / 2:
            loop.write_beat(loop.beat(), now)
        joining = loop.node.stage is Stage.JOINING
        return next_beat_s(beat_s / loop.observer.intervals.join_factor if joining else beat_s, dice)

    def regroup(self, after: Generation) -> None:
        """Ask for a generation after `after`, of the living members and the nodes that wait to join."""
        self.loop.answers = answers(regroup_after=after.number)
        self.loop.observer.schedule.poll_now()

    @property
    def joiners(self) -> tuple[int, ...]:
        """The live ranks that waited to join when this node last looked."""
        observer, generation = self.loop.observer, self.generation
        live = live_joiners(
            observer.joins, observer.ledger, observer.looked_at or 0.0, self.loop.rules.limits
        )
        members = generation.ranks if generation is not None else ()
        return tuple(rank for rank in sorted(live) if rank not in members)

    # --- how a call ends ---

    def first_generation(self) -> Generation | None:
        """The node's generation; None before there is one. Raises ValueError if the nodes joined with different arguments.

        It compares the members of the generation. Before there is one, it compares the nodes that joined or wrote a heartbeat after this
        node's first look, since earlier sessions leave their joins behind. One heartbeat is enough, because a node that refuses this
        node's arguments leaves immediately.
        """
        observer, own_start = self.loop.observer, self.loop.join
        for rank, join in observer.joins.items():
            if self.generation is not None:
                concerned = self.generation.incarnation_of(rank) == join.incarnation
            else:
                news = observer.ledger.news(Member(rank, join.incarnation))
                beaten = news is not None and news.beat != self._earlier_beats.get(rank)
                concerned = beaten or START.build(rank, join.incarnation) not in self._earlier_joins
            for name, mine in own_start.choices.items() if concerned else ():
                if (theirs := join.choices.get(name)) != mine:
                    raise ValueError(
                        f"node {rank} ({join.host}) joined {observer.paths.root} with {name}={theirs}, "
                        f"node {own_start.rank} with {name}={mine}: all must give the same"
                    )
        return self.generation

    def outcome(self, collective: Collective) -> Sequence[Any] | None:
        """The objects that the call returns; None while the call is not decided. Raises OSError, PeerLost, OutOfStep."""
        node, observer, generation = self.loop.node, self.loop.observer, self.generation
        if generation is None:
            return None
        loss: Loss | None = None
        if generation.number == collective.generation.number:
            if node.position is not None and node.position > collective.position:
                return self._objects(collective)
            # The last look was at the row of this call, so its listing shows who has arrived.
            arrived = observer.row.listing.arrived
            loss = self._lost(member for member in generation.members if member.rank not in arrived)
            if loss is None:
                return None
        # A member is lost, or the others have regrouped. If all had reached this row before, this node passes it too.
        if self._was_passed(collective):
            return self._objects(collective)
        if loss is not None:
            raise self._peer_lost(collective, loss)
        raise self._superseded(collective, generation)

    def _lost(self, members: Iterable[Member]) -> Loss | None:
        """The first of these members that is lost; None if none is."""
        observer, node = self.loop.observer, self.loop.node
        since, limits = node.watches_since(observer.ledger), self.loop.rules.limits
        lost = losses(members, node.rank, observer.joins, observer.ledger, since, limits)
        return lost[0] if lost else None

    def _was_passed(self, collective: Collective) -> bool:
        """Whether all members have reached this row. Raises OSError.

        If a stale listing does not show that, a heartbeat may, since a member that passed the row has seen all facts. Example: node 1
        ends its script after its last barrier, and node 2's mount shows node 1's last heartbeat at once, but the facts 3 s later.
        """
        observer, generation = self.loop.observer, collective.generation
        facts = {self._fact(collective, rank).name for rank in generation.ranks}
        if facts.issubset(observer.store.names(self._row(collective))):
            return True
        news = [observer.ledger.news(member) for member in generation.members]
        beats = [item.beat for item in news if item is not None and item.beat.generation == generation.number]
        return any(beat.iteration > collective.position.iteration for beat in beats)

    def _objects(self, collective: Collective) -> Sequence[Any]:
        """The objects that the call returns. All facts exist, but a mount may show them late. Raises OSError, OutOfStep, PeerLost.

        In every call but `barrier` a member also reads which call the next member made. So if members make different calls, at least one
        notices it. When that one ends or regroups, the others notice too.
        """
        if collective.call == BARRIER:
            return ()
        store, members = self.loop.observer.store, collective.generation.members
        own = [member.rank for member in members].index(self.loop.join.rank)
        following = members[(own + 1) % len(members)].rank
        values = {self.loop.join.rank: collective.value}
        for member in members:
            if member.rank in values or member.rank not in (following, *collective.objects_of):
                continue
            try:
                values[member.rank] = store.must_read(self._fact(collective, member.rank), Fact).value
            except OSError as error:
                self._raise_if_silent(collective, member, error)
                raise
        called = {rank: value.get("call", BARRIER) for rank, value in values.items()}
        if {*called.values()} != {collective.call}:
            raise self._out_of_step(collective, called)
        return [json.loads(values[rank]["json"]) for rank in collective.objects_of]

    def _raise_if_silent(self, collective: Collective, member: Member, error: OSError) -> None:
        """Raise PeerLost if the member whose fact cannot be read is silent: if its host lost power before the flush, it never can be."""
        ledger, node = self.loop.observer.ledger, self.loop.node
        silent_s = ledger.silence(member, node.watches_since(ledger))
        if silent_s >= self.loop.rules.limits.dead_s:
            raise PeerLost(
                f"node {node.rank}: {collective.name}: what node {member.rank} ({member.host}) gave cannot be read: {error}; "
                "and that node is lost; regroup() goes on without it",
                member.rank,
                member.host,
                silent_s,
            ) from None

    # --- errors ---

    def awaited(self, now: float) -> Sequence[Awaited]:
        """The nodes that this node waits for: the members that have not reached its row. Before it is in a generation: the nodes that it
        has not seen, and those that are in a generation without it."""
        node, observer, rules = self.loop.node, self.loop.observer, self.loop.rules
        if self.generation is not None:
            arrived, absent = observer.row.listing.arrived, []
            for member in self.generation.members:
                if member.rank != node.rank and member.rank not in arrived:
                    heard_s = observer.ledger.age(member, now)
                    silent_s = now - node.since if heard_s is None else heard_s
                    known = f"{member.host}, last heartbeat {silent_s:.1f} s ago"
                    absent.append(Awaited(member.rank, member.host, silent_s, known))
            return absent
        missing = sorted({*range(rules.num_nodes)} - {node.rank, *self.joiners})
        return [self._not_joined(rank, now) for rank in missing]

    def _not_joined(self, rank: int, now: float) -> Awaited:
        observer, dead_s = self.loop.observer, self.loop.rules.limits.dead_s
        join, seen = observer.joins.get(rank), observer.ledger.seen.get(rank)
        if join is None or seen is None:
            return Awaited(rank, join.host if join is not None else "", None, "never seen")
        silent_s = now - seen.since
        known = f"{join.host}, last heartbeat {silent_s:.1f} s ago"
        if silent_s < dead_s and seen.beat.state in (Stage.RUNNING, UNWRITABLE):
            known = f"{join.host}, a member of a group that must call regroup() to let this one in"
        return Awaited(rank, join.host, silent_s, known)

    def _out_of_step(self, collective: Collective, called: Mapping[int, str]) -> OutOfStep:
        hosts = {member.rank: member.host for member in collective.generation.members}
        calls = ", ".join(f"node {rank} ({hosts[rank]}) called {called[rank]}" for rank in sorted(called))
        message = (
            f"node {self.loop.join.rank}: the members are out of step in collective no. {collective.position.iteration} "
            f"of generation {collective.generation.number}: {calls}"
        )
        other = min(rank for rank in called if called[rank] != collective.call)
        return OutOfStep(message, other, hosts[other])

    def _peer_lost(self, collective: Collective, loss: Loss) -> PeerLost:
        member, why = loss.member, loss.why
        if loss.beat is not None and loss.beat.state == "left":
            observer = self.loop.observer
            status = observer.store.read(observer.paths.beat(member.rank, member.incarnation), Beat)
            left_because = status.progress.get("why") if status is not None else None
            why = f"it left the group after {left_because}" if left_because else "it left the group"
        message = (
            f"node {self.loop.join.rank}: {collective.name}: node {member.rank} ({member.host}) is lost: {why}; "
            "regroup() goes on without it"
        )
        return PeerLost(message, member.rank, member.host, loss.age_s)

    def _superseded(self, collective: Collective, new: Generation) -> PeerLost:
        """The error of a call if another member has regrouped before this one."""
        old = collective.generation
        left_out = [member for member in old.members if new.incarnation_of(member.rank) != member.incarnation]
        maker = next(member for member in (*new.members, *old.members) if member.rank == new.created_by)
        names = ", ".join(f"node {member.rank} ({member.host})" for member in left_out)
        message = (
            f"node {self.loop.join.rank}: {collective.name}: generation {old.number} is over: node {maker.rank} ({maker.host}) regrouped"
            f"{f' without {names}' if left_out else ''}; regroup() goes along"
        )
        about = left_out[0] if left_out else maker
        observer = self.loop.observer
        return PeerLost(
            message, about.rank, about.host, observer.ledger.age(about, observer.looked_at or 0.0)
        )

    def _end(self) -> NodeError | None:
        """The error if this membership has ended."""
        loop = self.loop
        if self._entered and loop.node.generation is None:
            newest = loop.observer.newest
            number = newest.number if newest is not None else "a newer one"
            return self._fenced(
                f"node {loop.node.rank}: the others took it for dead and went on as generation {number}; join again"
            )
        if loop.exit is None:
            return None
        if loop.exit.code == Fenced.exit_code:
            return self._fenced(loop.exit.reason)
        # Only a verdict in a foreign record ends the loop otherwise, since groups make no verdicts.
        return StoreError(loop.exit.reason, loop.join.rank, loop.join.host, 0.0)

    def _fenced(self, message: str) -> Fenced:
        """The error if the others went on without this node. It names the host that has this rank now."""
        newest = self.loop.observer.joins.get(self.loop.node.rank, self.loop.join)
        return Fenced(message, newest.rank, newest.host)

    # --- facts on disk ---

    def _row(self, collective: Collective) -> Path:
        return self.loop.observer.row.row_dir(collective.generation.number, collective.position)

    def _fact(self, collective: Collective, rank: int) -> Path:
        return self._row(collective) / fact_name(collective.position.iteration, rank)


def make_member(
    store: Store, paths: RunPaths, own_start: Join, num_nodes: int, limits: Limits, beat_s: float
) -> GroupMember:
    """Make a member that has not joined yet. This does not touch the filesystem."""
    rules = Rules(TABLE, num_nodes, limits=limits)
    # Nodes of a large group look less often, to spare the metadata server.
    members_s = min(0.05 * max(1.0, num_nodes / 16), beat_s / 2)
    beats_s = min(beat_s, limits.suspect_s / 3)
    intervals = PollIntervals(members_s, beats_s, 1.5 * beat_s, limits.dead_s, join_factor(num_nodes))
    work, observer = CollectiveWork(), Observer(store, paths, TABLE, intervals)
    return GroupMember(
        NodeLoop(store, observer, rules, work, own_start, lambda *_: None, answers=answers(regroup_after=0)),
        work,
    )
