"""Turns the shared directory into the View that the state machine decides from. Reads only; no clock of its own.

Each kind of news has its own object and its own pace: the facts about the row (coordination/row_watch.py) are listed at every look,
generations, joins and requests to stop (registry.py) and heartbeats when they are due (poll_intervals.py).
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from operator import itemgetter

from fsbarrier.coordination.poll_intervals import PollIntervals, Schedule
from fsbarrier.coordination.registry import Registry
from fsbarrier.coordination.row_watch import NO_ROW, RowWatch
from fsbarrier.protocol.facts import Generation, Join, Pulse
from fsbarrier.protocol.membership import FINISHED, Ledger, silent_members
from fsbarrier.protocol.rows import Table
from fsbarrier.protocol.state import WATCHING, Node, ResumePoint, View, WorkReport
from fsbarrier.rundir.heartbeats import HeartbeatReader
from fsbarrier.rundir.names import PULSE, StartName
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.record_store import Store


@dataclass
class Observer:
    """What one node has seen of the shared directory; each look makes a View of it."""

    store: Store
    paths: RunPaths
    table: Table[object]
    intervals: PollIntervals = field(default_factory=PollIntervals)
    #: see Registry
    can_hold: Callable[[Join | Generation], bool] = lambda record: True
    registry: Registry = field(init=False)
    row: RowWatch = field(init=False)
    schedule: Schedule = field(init=False)
    ledger: Ledger = field(default_factory=Ledger)
    resume_point: ResumePoint | None = None
    #: the view of the last look; None once anything may be new
    last_view: View | None = None
    #: when this node wrote its last heartbeat; None: it has written none
    beaten_at: float | None = None
    #: The time up to which this node's looks were complete: when the last complete look began, or when the look after it began. None
    #: before the first complete look.
    looked_at: float | None = None
    _saw_everything: bool = False
    #: the time of the last look at the heartbeats
    _saw_beats_at: float | None = None
    #: `beaten_at` at that look
    _beaten_before: float | None = None
    #: how long this node has written no heartbeat of its own, without the time in which it did not look
    _unwritten_s: float = 0.0

    def __post_init__(self) -> None:
        store, paths = self.store, self.paths
        self.registry = Registry(store, paths, self.table, self.can_hold)
        self.row = RowWatch(store, paths, self.table)
        self.schedule = Schedule(self.intervals)

    @property
    def newest(self) -> Generation | None:
        """The newest generation that this node has read."""
        return self.registry.newest

    @property
    def joins(self) -> Mapping[int, Join]:
        """The newest known start of each rank."""
        return self.registry.joins

    def prepare(self) -> None:
        """Make the directories that will be listed, and read what is in them. May be repeated after an error. Raises OSError."""
        for directory in self.paths.listed:
            self.store.make_dir(directory)
        self.read_beats()
        self.registry.read_new()

    def read_due(self, node: Node, now: float, *, at_row: bool = False) -> None:
        """Read what is due at `now`, and with `at_row` the node's row. Raises OSError when the filesystem fails, and also when this
        node has not been able to write heartbeats for `dead_s`: then it cannot take part, and the others go on."""
        if self._saw_everything:
            # The last look was complete, and nothing has hung since then: this node is looking again.
            self.looked_at = now
        self._saw_everything = False
        self._read_around(node, now)
        try:
            if at_row:
                self.row.read(node)
        except OSError:
            # A newer generation's decision does not wait for a fact of this one that cannot be read.
            if self.registry.newest_known <= node.place[0].number:
                raise
        self._saw_everything, self.looked_at = True, now
        if self._unwritten_s >= self.intervals.dead_s:
            why = f"this node could not write its heartbeat for {self._unwritten_s:.0f} s"
            raise OSError(errno.EIO, why, str(self.paths.beats))

    def view(self, node: Node, now: float, work: WorkReport | None = None) -> View:
        """What the node sees at `now`. While its own `work` has a report, the row is not listed, since the node publishes the result first.
        Returns the same object as last time if nothing is new and only the row was due. Raises the errors of `read_due`."""
        watches = work is None and node.generation is not None and node.part in WATCHING
        self.read_due(node, now, at_row=watches)
        if self.row.news or work is not None:
            self.last_view, self.row.news = None, False
        if self.last_view is not None:
            return self.last_view
        row = self.row.listing if watches else NO_ROW
        self.last_view = View(
            self.newest,
            self.joins,
            self.ledger,
            self.registry.stop(node),
            self.resume_point,
            row.arrived,
            row.failed,
            row.leaders_fact,
            work,
        )
        return self.last_view

    def _read_around(self, node: Node, now: float) -> None:
        """Look at generations, joins, stop requests and heartbeats, as far as they are due."""
        if self.schedule.follow(node, now):
            self.last_view = None
        if now >= self.schedule.records_due:
            self.last_view = None
            self.registry.read_new()
            self.schedule.records_seen(node, now)
        if now >= self.schedule.beats_due:
            self.last_view = None
            self._look_at_beats(node, now)
            self.schedule.beats_seen(node, now)

    def _look_at_beats(self, node: Node, now: float) -> None:
        """List all heartbeats. Raises OSError."""
        # Take the time before listing: a listing is only sure to be as new as this node's last heartbeat before it.
        beaten_at, poll_gap_s = self.beaten_at, self.intervals.poll_gap_s
        self._note_own_beats(beaten_at, now)
        beats = self.read_beats()
        beats.pop(node.rank, None)
        self.ledger = self.ledger.observe(beats, now, beaten_at, poll_gap_s)
        if silent := self._silent(node):
            self.ledger = self.ledger.observe(self._look_again(silent), now, beaten_at, poll_gap_s)
        self.row.finished.update(beat.generation for beat in beats.values() if beat.state == FINISHED)

    def _note_own_beats(self, beaten_at: float | None, now: float) -> None:
        gap_s = (
            0.0 if self._saw_beats_at is None else min(now - self._saw_beats_at, self.intervals.poll_gap_s)
        )
        written = beaten_at is None or beaten_at != self._beaten_before
        self._unwritten_s = 0.0 if written else self._unwritten_s + gap_s
        self._saw_beats_at, self._beaten_before = now, beaten_at

    def _silent(self, node: Node) -> set[int]:
        """The members that this node would declare dead, judging only by the names of their heartbeats."""
        generation = node.generation or self.newest
        if generation is None:
            return set()
        since, dead_s = node.watches_since(self.ledger), self.intervals.dead_s
        return {
            member.rank
            for member in silent_members(generation.members, node.rank, self.ledger, since, dead_s)
        }

    def _look_again(self, ranks: Set[int]) -> dict[int, Pulse]:
        """List the heartbeats again and read the status files. Returns the newer of the two for each of `ranks`.

        A listing that is made while names change may miss a name, and some mounts show old listings but fresh contents.
        """
        listed = self.read_beats()
        status = HeartbeatReader(self.store, self.paths.status).read(lambda newest: newest.rank in ranks)
        from_status = {start.rank: beat.pulse for start, beat in status if beat is not None}
        pulses = [(rank, beats[rank]) for beats in (listed, from_status) for rank in ranks if rank in beats]
        return dict(sorted(pulses, key=itemgetter(1)))

    def read_beats(self) -> dict[int, Pulse]:
        """The newest heartbeat of each rank. Raises OSError.

        A heartbeat may name a generation or a start that this node's listings do not show yet. Their records exist, so this opens them
        by name.
        """
        newest: dict[int, Pulse] = {}
        for beat in PULSE.parse_all(self.store.names(self.paths.beats)):
            if beat.rank not in newest or beat > newest[beat.rank]:
                newest[beat.rank] = beat
        for rank, beat in newest.items():
            if rank not in self.joins or beat.incarnation > self.joins[rank].incarnation:
                self.registry.read_join(StartName(rank, beat.incarnation))
            if beat.generation > self.registry.newest_known:
                self.registry.read_generation(beat.generation)
        return newest
