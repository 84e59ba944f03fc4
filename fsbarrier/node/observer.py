"""Turns what lies in the shared directory into the View that the state machine decides from. Reads only; no clock of its own.

Each kind of news is looked for at its own pace: the row's facts at every poll, generations, joins, beats and stop requests when
a look at them is due. While nothing happens all paces slow down to one look a beat. Immutable records are read once.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path

from fsbarrier.node.paces import Paces
from fsbarrier.node.row_listing import NO_ROW, RowListing
from fsbarrier.protocol.facts import (
    Beat,
    Fact,
    Generation,
    Join,
    Member,
    Payload,
    Position,
    R,
    StopRequest,
)
from fsbarrier.protocol.membership import FINISHED, Ledger, left_to_others
from fsbarrier.protocol.rows import Table
from fsbarrier.protocol.state import WATCHING, Node, Part, ResumePoint, Stage, Unreadable, View, WorkReport
from fsbarrier.protocol.stops import concerns, missed_by
from fsbarrier.rundir.heartbeats import HeartbeatReader
from fsbarrier.rundir.names import DEBUG_REQUEST, FACT, GENERATION, START, STOP_REQUEST, StartName, fact_name
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.record_store import Store

_AT_ONCE = float("-inf")

#: Generations, joins and requests to stop may be seen so much later than they came, as a part of the time in which nothing happened.
LATENESS = 0.02
#: so many times as often heartbeats are read while a member is suspected, or a new generation is due
ALERT = 4.0


@dataclass
class Observer:
    """What one node has seen of the shared directory, in the public fields; each look makes the state machine's View of them.

    A node that joins looks more often, since the others wait for it.
    """

    store: Store
    paths: RunPaths
    table: Table[object]
    paces: Paces = field(default_factory=Paces)
    #: whether the run's settings can have the values that a record asks for; one that they cannot counts as unreadable
    can_hold: Callable[[Join | Generation], bool] = lambda record: True
    newest: Generation | None = None
    joins: Mapping[int, Join] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger)
    resume_point: ResumePoint | None = None
    #: the fact that this node, as a leader, created last: where, and what it says to whoever reads it
    created: tuple[Path, Fact] | None = None
    _heartbeats: HeartbeatReader = field(init=False)
    #: the row that this node looked at last
    row: RowListing | None = None
    #: what this node saw at its last look; None once anything may be new
    last_view: View | None = None
    #: the generation that was listed last and could not be read
    _unreadable: Unreadable | None = None
    #: when a record could not be read last
    _unread_at: float = _AT_ONCE
    #: since when a request to stop cannot be read; None: since before this node started
    _unreadable_stops: dict[str, float | None] = field(default_factory=dict)
    _known_generations: list[str] = field(default_factory=list)
    _known_joins: list[str] = field(default_factory=list)
    #: names in joins/ that are read, or that are no joins
    _learnt: set[str] = field(default_factory=set)
    #: ranks whose heartbeats are listed and can no longer be read, and since when
    hidden_beats: Mapping[int, float] = field(default_factory=dict)
    #: since when this node tries to write a heartbeat; None: the last one is written
    unheard_since: float | None = None
    #: generations whose last row was passed, as a member's last heartbeat says
    _finished: set[int] = field(default_factory=set)
    _stops: dict[str, StopRequest] = field(default_factory=dict)
    #: the keys of all requests to say what this node's processes do, which the daemon answers
    debug_requests: set[str] = field(default_factory=set)
    #: a member is suspected: look at it more often
    suspecting: bool = False
    _members_due: float = _AT_ONCE
    #: when heartbeats are to be read next
    beats_due: float = _AT_ONCE
    _looked_at_all: float = _AT_ONCE
    #: the node as it was at the last look, and since when it is so
    _node: Node | None = None
    _unchanged_since: float = _AT_ONCE

    def __post_init__(self) -> None:
        self._heartbeats = HeartbeatReader(self.store, self.paths.beats, self.paces.pulses)

    def prepare(self) -> None:
        """Make the directories that will be listed, and look at what is there. Raises OSError; may be tried again."""
        for directory in (self.paths.joins, self.paths.beats, self.paths.generations, self.paths.stops):
            self.store.make_dir(directory)
        self.read_beats()
        self._look_at_members(None)

    def learn(self, generation: Generation | None) -> None:
        """Remember a generation if it is the newest, however its record was found."""
        if generation is not None and generation.number > self._newest_known:
            self.newest = generation

    def learn_join(self, join: Join) -> None:
        """Remember a start."""
        self.joins = {**self.joins, join.rank: join}

    def newest_number(self) -> int:
        """The number of the newest generation that can be seen now. Raises OSError."""
        listed = GENERATION.parse_all(self.store.names(self.paths.generations))
        return max([*listed, self._newest_known])

    def hurry(self) -> None:
        """Look at everything at the next view, whatever its pace."""
        self._members_due = self.beats_due = _AT_ONCE

    def view(self, node: Node, now: float, work: WorkReport | None = None) -> View:
        """What the node can see at `now`, and how its own work ended: the very same object as last where nothing is new, and nothing was
        due but a look at the row. Raises OSError when the filesystem fails."""
        self._look_around(node, now)
        # A node whose own work has just ended publishes that before it looks at the others.
        if watches := node.part in WATCHING and work is None:
            self._look_at_row(node, now)
        if self.last_view is not None and self.last_view.work is work:
            return self.last_view
        row = self.row if watches and self.row is not None else NO_ROW
        unreadable = self._unreadable or row.unreadable
        stop, missed = self._newest_stop(node, concerns), self._newest_stop(node, missed_by)
        known = self.newest, unreadable, self.joins, self.ledger, stop, missed, self.resume_point
        view = self.last_view = View(*known, row.arrived, row.failed, row.leaders_fact, work)
        return view

    def _newest_stop(
        self, node: Node, applies: Callable[[StopRequest, int, int], bool]
    ) -> StopRequest | None:
        found = [name for name, stop in self._stops.items() if applies(stop, node.rank, node.started_as)]
        return self._stops[max(found)] if found else None

    def _look_around(self, node: Node, now: float) -> None:
        """Look at what is due beside the row. The loop calls `hurry` when the stage changes, since the pace changes with it."""
        joining, paces = node.stage is Stage.JOINING, self.paces
        if node is not self._node:
            self._node, self._unchanged_since, self.last_view = node, now, None
        alert = self.suspecting or node.failed_since is not None or node.trouble_since is not None
        if alert:
            self.beats_due = min(self.beats_due, now + paces.beats_s / ALERT)
        if now >= self._members_due:
            self.last_view = None
            self._look_at_members(now)
            quiet_s = 0.0 if joining or alert else now - self._unchanged_since
            pause_s = max(paces.members_s, min(LATENESS * quiet_s, 2 * paces.beats_s))
            self._members_due = now + pause_s / (4 if joining else 1)
        if now >= self.beats_due:
            self.last_view = None
            self._look_at_beats(node, now, joining)
            self.beats_due = now + paces.beats_s / (paces.eager if joining else ALERT if alert else 1.0)

    def _unread(self, path: Path, cls: type[R], now: float, before: Unreadable | None) -> Unreadable:
        """What the state machine is told of a record that cannot be read; `before`: what it was told last.

        Only time in which this node looked counts: one that was stopped for 20 s after one garbled read has read it once.
        """
        blind = now - self._unread_at >= self.paces.blind_s
        since = before.since if before is not None and before.path == str(path) and not blind else now
        self._unread_at = now
        return Unreadable(str(path), self.store.fault(path, cls), since)

    def _look_at_row(self, node: Node, now: float) -> None:
        """Look who is done with the node's row and who has failed in it, and once all are done what the leader's fact says."""
        generation, position = node.place
        row, call = self.row, self.table.rows[position.phase].call(node.result)
        if row is None or (row.generation, row.position, row.call) != (generation.number, position, call):
            directory = self.row_dir(generation.number, position)
            row = self.row = RowListing.of(generation, position, call, directory)
        names = self.store.names(row.directory)
        if names != row.names:
            self.last_view = None
            row.arrived = frozenset([row.done[name] for name in names if name in row.done])
            failures = [name for name in names if name.endswith(".failed")]
            if self._read_failures(generation, row, failures, now):
                row.names = names
        if generation.number in self._finished and len(row.arrived) < len(generation.members):
            # Somebody passed this row, the last of all: all facts are there, also where this mount does not list them for long.
            self.last_view = None
            row.arrived = frozenset(generation.ranks)
        row.leaders_fact = None
        if node.part is Part.ANNOUNCED and len(row.arrived) == len(generation.members):
            self.last_view = None
            row.leaders_fact = self._leaders_fact(generation, row, now)

    def _leaders_fact(self, generation: Generation, row: RowListing, now: float) -> Fact | None:
        """The leader's fact about a row in which all members' facts are listed; None while it cannot be read.

        It is not read where this node has created it itself, nor in a row whose results nobody adopts: there no seal can lie.
        """
        if self.table.rows[row.position.phase].transient:
            return Fact(generation.leader, generation.incarnation_of(generation.leader) or 0, "done")
        path = row.directory / fact_name(row.position.iteration, generation.leader, "done", row.call)
        if self.created is not None and self.created[0] == path:
            return self.created[1]
        fact = self.store.read(path, Fact)
        row.unreadable = self._unread(path, Fact, now, row.unreadable) if fact is None else None
        return fact

    def _read_failures(self, generation: Generation, row: RowListing, names: list[str], now: float) -> bool:
        """Read the members' facts of failure in a row, `names`; False while one of them cannot be read."""
        failed, before, row.unreadable = dict(row.failed), row.unreadable, None
        for rank in (fact.rank for fact in FACT.parse_all(names) if fact.iteration == row.position.iteration):
            if rank in generation.ranks and rank not in failed:
                path = row.directory / fact_name(row.position.iteration, rank, "failed")
                record = self.store.read(path, Fact)
                if record is None:
                    row.unreadable = self._unread(path, Fact, now, before)
                    return False
                failed[rank] = record
        row.failed = failed
        return True

    def names_in_row(self, generation: Generation, position: Position) -> list[str]:
        """What the folder of a row showed when this node last looked there; nothing if it has looked elsewhere since."""
        row = self.row
        if row is None or (row.generation, row.position) != (generation.number, position):
            return []
        return row.names or []

    def row_dir(self, generation: int, position: Position) -> Path:
        """Where the facts about one row are."""
        row = self.table.rows[position.phase]
        return self.paths.phase(generation, row.index, row.name)

    def reports(self, node: Node, phase_name: str) -> Mapping[int, Payload]:
        """What each member published about a row of this iteration that `node` has passed, or in which it leads.

        Raises OSError, also for a fact that cannot be read.
        """
        generation, position = node.place
        at = Position(position.iteration, self.table.index(phase_name))
        # The leader publishes its own result only after the leader's work, which asks for it here.
        own = {node.rank: node.result} if at == position else {}
        directory = self.row_dir(generation.number, at)
        others = [rank for rank in generation.ranks if rank not in own]
        return own | {
            rank: self.must_read(directory / fact_name(at.iteration, rank), Fact).value for rank in others
        }

    def must_read(self, path: Path, cls: type[R]) -> R:
        """A record that is known to be there. Raises OSError if it cannot be read now: treating it as absent would lose it."""
        record = self.store.read(path, cls)
        if record is None:
            why = self.store.fault(path, cls).why
            raise OSError(errno.EAGAIN, f"this record cannot be read ({why}); restore it", str(path))
        return record

    def joins_of(self, generation: Generation) -> Mapping[int, Join]:
        """All joins that are known, and those of all members: the generation's record names them, so they are there.

        This changes nothing here, because the work's thread calls it. Raises OSError, also for a join that cannot be read.
        """
        found = dict(self.joins)
        for member in generation.members:
            known = found.get(member.rank)
            if known is None or known.incarnation < member.incarnation:
                found[member.rank] = self.must_read(self.paths.join(member.rank, member.incarnation), Join)
        return found

    def _look_at_members(self, now: float | None) -> None:
        names = self.store.names(self.paths.generations)
        if names != self._known_generations and self._look_at_generations(names, now):
            self._known_generations = names
        names = self.store.names(self.paths.joins)
        if names != self._known_joins:
            for name in names:
                if name in self._learnt:
                    continue
                start = START.parse(name)
                if start is None or self._learn_start(start):
                    self._learnt.add(name)
            if self._learnt.issuperset(names):
                self._known_joins = names
        for name in self.store.names(self.paths.stops):
            if (key := DEBUG_REQUEST.parse(name)) is not None:
                self.debug_requests.add(key)
            if name not in self._stops and STOP_REQUEST.parse(name) is not None:
                self._look_at_stop(name, now)

    def _look_at_stop(self, name: str, now: float | None) -> None:
        """Take note of a request to stop. Where it cannot be read, somebody asked for an end all the same, if not how soon.

        One that could not be read when this node started was made for an earlier session.
        """
        path = self.paths.stops / name
        request = self.store.read(path, StopRequest)
        since = None if request is not None else self._unreadable_stops.setdefault(name, now)
        if now is not None and since is not None and now - since >= self.paces.unreadable_s:
            why = self.store.fault(path, StopRequest).why
            alive = tuple(Member(join.rank, join.incarnation, join.host) for join in self.joins.values())
            request = StopRequest(now=False, who=f"somebody ({path} cannot be read: {why})", alive=alive)
        if request is not None:
            self._stops[name] = request

    def _look_at_generations(self, names: list[str], now: float | None) -> bool:
        """Learn the newest of them that can be read; True if none is newer."""
        newer = sorted((n for n in GENERATION.parse_all(names) if n > self._newest_known), reverse=True)
        unread = newer[0] if newer and not self._read_generation(newer[0]) else None
        if unread is None:
            self._unreadable = None
            return True
        if now is not None:
            path = self.paths.generation(unread)
            self._unreadable = self._unread(path, Generation, now, self._unreadable)
        for number in newer[1:]:
            if self._read_generation(number):
                break
        return False

    @property
    def _newest_known(self) -> int:
        return self.newest.number if self.newest is not None else 0

    def _read_generation(self, number: int) -> bool:
        """Learn a generation from its record; False while it cannot be read."""
        record = self.store.read(self.paths.generation(number), Generation)
        if record is None or record.number != number or record.start.phase >= len(self.table.rows):
            return False
        if not self.can_hold(record):
            return False
        self.learn(record)
        return True

    def _learn_start(self, start: StartName) -> bool:
        """Learn a start from its record; False while it cannot be read."""
        known = self.joins.get(start.rank)
        if known is not None and known.incarnation >= start.incarnation:
            return True
        join = self.store.read(self.paths.join(start.rank, start.incarnation), Join)
        if join is None or (join.rank, join.incarnation) != (start.rank, start.incarnation):
            return False
        if not self.can_hold(join):
            return False
        self.learn_join(join)
        return True

    def _look_at_beats(self, node: Node, now: float, joining: bool) -> None:
        """Read heartbeats. A node that joins looks fast, but reads those of nodes that it saw alive only at the usual pace."""
        watchers, suspecting = self.paces.watchers, self.suspecting
        left_out = left_to_others(node.generation, node.rank, watchers, suspecting=suspecting)
        spared = {node.rank, *left_out}
        if joining and now - self._looked_at_all < self.paces.beats_s:
            seen, unsure = self.ledger.seen, self.ledger.unsure
            spared.update(rank for rank, item in seen.items() if item.moved and rank not in unsure)
        else:
            self._looked_at_all = now
        beats, unread = self.read_beats(spared, now)
        unheard, blind_s = self.paces.unheard(self.unheard_since, now), self.paces.blind_s
        self.ledger = self.ledger.observe(beats, now, now, blind_s, unread, left_out, unheard=unheard)
        self._finished.update(beat.generation for beat in beats.values() if beat.state == FINISHED)

    def read_beats(
        self, spared: Set[int] = frozenset(), now: float | None = None
    ) -> tuple[dict[int, Beat], set[int]]:
        """The heartbeat of each rank's newest start; of a `spared` rank only that of a start newer than the known one.

        Also gives the ranks whose newest known start could not be read. A heartbeat may name a generation or a start that this
        node's listings do not show yet. Those records exist, and are opened by their names here. Raises OSError.
        """
        beats: dict[int, Beat] = {}
        unread: set[int] = set()
        hidden: set[int] = set()
        newest = self._newest_known

        def known(rank: int) -> int:
            return self.joins[rank].incarnation if rank in self.joins else 0

        found = self._heartbeats.read(
            lambda start: start.rank not in spared or start.incarnation > known(start.rank)
        )
        for rank, beat in ((start.rank, beat) for start, beat in found):
            if beat is None:
                hidden.add(rank)
                if known(rank):
                    unread.add(rank)
                continue
            beats[rank] = beat
            if beat.incarnation > known(rank):
                self._learn_start(StartName(rank, beat.incarnation))
            elif beat.incarnation < known(rank):
                unread.add(rank)
            if beat.generation > newest and self._read_generation(beat.generation):
                newest = beat.generation
        if now is not None:
            self.hidden_beats = {rank: self.hidden_beats.get(rank, now) for rank in hidden}
        return beats, unread
