"""Turns the shared directory into the View that the state machine decides from. Reads only; no clock of its own.

Each kind of news has its own object and its own pace: the facts about the row (node/row_watch.py) are listed at every look,
generations and joins (node/registry.py), requests (node/stops_seen.py) and heartbeats when they are due (node/schedule.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path

from fsbarrier.node.paces import Paces
from fsbarrier.node.registry import Registry
from fsbarrier.node.row_watch import NO_ROW, RowWatch
from fsbarrier.node.schedule import AT_ONCE, Schedule
from fsbarrier.node.stops_seen import StopsSeen
from fsbarrier.node.unreadable import ReadFailures
from fsbarrier.protocol.facts import Beat, Generation, Join, Position
from fsbarrier.protocol.membership import FINISHED, Ledger, left_to_others
from fsbarrier.protocol.rows import Table
from fsbarrier.protocol.state import WATCHING, Node, ResumePoint, Stage, View, WorkReport
from fsbarrier.protocol.stops import concerns, missed_by
from fsbarrier.rundir.heartbeats import HeartbeatReader
from fsbarrier.rundir.names import StartName
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.record_store import Store


@dataclass
class Observer:
    """What one node has seen of the shared directory; each look makes a View of it."""

    store: Store
    paths: RunPaths
    table: Table[object]
    paces: Paces = field(default_factory=Paces)
    #: see Registry
    can_hold: Callable[[Join | Generation], bool] = lambda record: True
    registry: Registry = field(init=False)
    stops: StopsSeen = field(init=False)
    row: RowWatch = field(init=False)
    schedule: Schedule = field(init=False)
    ledger: Ledger = field(default_factory=Ledger)
    resume_point: ResumePoint | None = None
    #: the view of the last look; None once anything may be new
    last_view: View | None = None
    #: ranks whose heartbeats are listed and can no longer be read, and since when
    hidden_beats: Mapping[int, float] = field(default_factory=dict)
    #: since when this node tries to write a heartbeat; None: the last one is written
    unheard_since: float | None = None
    _heartbeats: HeartbeatReader = field(init=False)
    #: when all heartbeats were read last
    _all_beats_read_at: float = AT_ONCE

    def __post_init__(self) -> None:
        store, paths, failures = self.store, self.paths, ReadFailures(self.store, self.paces.blind_s)
        self.registry = Registry(store, paths, self.table, failures, self.can_hold)
        self.stops = StopsSeen(store, paths, self.paces.unreadable_s)
        self.row = RowWatch(store, paths, self.table, failures)
        self.schedule = Schedule(self.paces)
        self._heartbeats = HeartbeatReader(self.store, self.paths.beats, self.paces.pulses)

    @property
    def newest(self) -> Generation | None:
        """The newest generation that this node has read."""
        return self.registry.newest

    @property
    def joins(self) -> Mapping[int, Join]:
        """The newest known start of each rank."""
        return self.registry.joins

    def row_dir(self, generation: int, position: Position) -> Path:
        """The folder of the facts about one row."""
        return self.row.row_dir(generation, position)

    def prepare(self) -> None:
        """Make the directories that will be listed, and look at what is there. Raises OSError; may be tried again."""
        for directory in (self.paths.joins, self.paths.beats, self.paths.generations, self.paths.stops):
            self.store.make_dir(directory)
        self.read_beats()
        self._look_at_records(None)

    def hurry(self) -> None:
        """Look at everything at the next view, whatever its pace."""
        self.schedule.hurry()

    def view(self, node: Node, now: float, work: WorkReport | None = None) -> View:
        """What the node sees at `now`; `work`: how its own work ended. The same object as last time if nothing is new and only the
        row was due. Raises OSError when the filesystem fails."""
        self._look_around(node, now)
        # A node whose own work has just ended publishes that before it looks at the others.
        watches = node.part in WATCHING and work is None
        if watches:
            self.row.look(node, now)
        if self.row.news:
            self.last_view, self.row.news = None, False
        if self.last_view is not None and self.last_view.work is work:
            return self.last_view
        row = self.row.listing if watches and self.row.listing is not None else NO_ROW
        stop, missed = self.stops.newest(node, concerns), self.stops.newest(node, missed_by)
        self.last_view = View(
            self.newest,
            self.registry.unreadable or row.unreadable,
            self.joins,
            self.ledger,
            stop,
            missed,
            self.resume_point,
            row.arrived,
            row.failed,
            row.leaders_fact,
            work,
        )
        return self.last_view

    def _look_around(self, node: Node, now: float) -> None:
        """Look at what is due beside the row."""
        if self.schedule.follow(node, now):
            self.last_view = None
        if now >= self.schedule.records_due:
            self.last_view = None
            self._look_at_records(now)
            self.schedule.records_seen(node, now)
        if now >= self.schedule.beats_due:
            self.last_view = None
            self._look_at_beats(node, now)
            self.schedule.beats_seen(node, now)

    def _look_at_records(self, now: float | None) -> None:
        self.registry.look(now)
        self.stops.look(now, self.joins.values())

    def _look_at_beats(self, node: Node, now: float) -> None:
        """Read heartbeats. A node that joins looks fast, but reads those of nodes that it saw alive only at the usual pace."""
        watchers, suspecting = self.paces.watchers, self.schedule.suspecting
        left_out = left_to_others(node.generation, node.rank, watchers, suspecting=suspecting)
        spared = {node.rank, *left_out}
        if node.stage is Stage.JOINING and now - self._all_beats_read_at < self.paces.beats_s:
            seen, unsure = self.ledger.seen, self.ledger.unsure
            spared.update(rank for rank, item in seen.items() if item.moved and rank not in unsure)
        else:
            self._all_beats_read_at = now
        beats, unread = self.read_beats(spared, now)
        unheard, blind_s = self.paces.unheard(self.unheard_since, now), self.paces.blind_s
        self.ledger = self.ledger.observe(beats, now, now, blind_s, unread, left_out, unheard=unheard)
        self.row.finished.update(beat.generation for beat in beats.values() if beat.state == FINISHED)

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
        newest = self.registry.newest_known

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
                self.registry.read_join(StartName(rank, beat.incarnation))
            elif beat.incarnation < known(rank):
                unread.add(rank)
            if beat.generation > newest and self.registry.read_generation(beat.generation):
                newest = beat.generation
        if now is not None:
            self.hidden_beats = {rank: self.hidden_beats.get(rank, now) for rank in hidden}
        return beats, unread
