"""Polls a run directory for the views (status, live view, summary, report). Read-only.

Each poll reads only what is new: journals from the last offset, immutable records once, heartbeats always. Torn, foreign or vanishing
files are skipped and never an error. The first poll reads only the newest part of long journals completely.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from fsbarrier.network.this_host import boot_id, host_name
from fsbarrier.processes.processes import Stat
from fsbarrier.protocol.facts import Beat, Generation, Join
from fsbarrier.protocol.membership import GONE, Ledger
from fsbarrier.rundir import names, runrecord
from fsbarrier.rundir.heartbeats import HeartbeatReader, names_of_beats, with_name
from fsbarrier.rundir.journal import FREQUENT, Event, JournalReader
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.record_store import LenientStore
from fsbarrier.rundir.session_settings import in_force
from fsbarrier.settings.sections import Settings
from fsbarrier.view.event_wording import last_phase, phase_name
from fsbarrier.view.history import MAX_EVENTS, RunHistory
from fsbarrier.view.timings import IterationTime, RowTime, Span, SpanReader, iteration_times, row_times

#: A longer gap between two polls does not count as silence of the nodes, because this process was not watching.
BLIND_S = 5.0
#: Minimum to read from each journal, which is enough to find its node's current position.
LEAST_BYTES = 12_000


@dataclass
class RunReader:
    """The collected state of one run. The constructor raises UsageError if there is no readable run.

    `keep`: keep timings of this many recent iterations; None: of all. `newest_bytes`: read only this much of the end of all journals
    together on the first poll; None: everything. From the older part, only rare events are read (losses, results, failures): with
    `all_pasts` from every journal, otherwise only from the leader's journals, which also contain every result and loss.
    """

    log_path: Path
    keep: int | None = None
    newest_bytes: int | None = None
    all_pasts: bool = True

    #: the newest start of each rank, and when this process first saw it
    joins: dict[int, Join] = field(default_factory=dict)
    joined_since: dict[int, float] = field(default_factory=dict)

    #: the newest generation, and the newest incarnation of each rank that was ever a member
    newest: Generation | None = None
    members: dict[int, int] = field(default_factory=dict)

    #: the heartbeats' advances as seen by this process, and the write time of each by the shared filesystem's clock
    ledger: Ledger = field(default_factory=Ledger)
    beat_times: dict[int, float] = field(default_factory=dict)

    #: the furthest row (generation, iteration, phase) that any node began, and each rank's newest `phase_started`
    position: tuple[int, int, int] = (0, 0, 0)
    places: dict[int, Event] = field(default_factory=dict)

    #: the members that are done with the row at `position`
    arrived: frozenset[int] = frozenset()

    history: RunHistory = field(default_factory=RunHistory)
    #: the last status of each rank that could be read
    _beats: dict[int, Beat] = field(default_factory=dict)
    _generations: set[int] = field(default_factory=set)
    _phase_names: dict[int, str] = field(default_factory=dict)
    _starts: set[names.StartName] = field(default_factory=set)
    _journals: dict[str, tuple[JournalReader, SpanReader]] = field(default_factory=dict)
    _spans: list[Span] = field(default_factory=list)
    _rows: list[RowTime] | None = None
    #: every journal is complete from this iteration on; and the truncated journals already considered for that
    _whole_from: int = 0
    _begun: set[str] = field(default_factory=set)
    #: each rank's newest event that says that it is done with its work in a row
    _done: dict[int, Event] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.paths = RunPaths(self.log_path)
        self.record = runrecord.load(self.log_path)
        self._boot = boot_id()
        self._host = host_name()
        self._store = LenientStore()
        self._heartbeats = HeartbeatReader(self._store, self.paths.status)

    def poll(self, now: float) -> list[Event]:
        """Poll everything and return the new events, each once, sorted by wall clock. `now`: this process's monotonic time."""
        self._read_joins(now)
        self._read_generations()
        fresh = self._read_journals()
        self._read_beats(now)
        self._read_arrivals()
        return fresh

    @property
    def phase_name(self) -> str:
        """The name of the current row, taken from the journals because a user's program may have its own rows."""
        index = self.position[2]
        return self._phase_names.get(index) or phase_name(index)

    @property
    def settings(self) -> Settings:
        """The run's settings in its newest session."""
        return in_force(self.record.settings, self.newest.settings if self.newest is not None else {})

    @property
    def faults(self) -> list[str]:
        """The reasons why journals cannot be read."""
        return [journal.fault for journal, _ in self._journals.values() if journal.fault]

    def spans(self) -> list[Span]:
        """The kept spans, including rows in progress."""
        under_way = [spans.open for _, spans in self._journals.values()]
        return self._spans + [span for span in under_way if span is not None]

    def rows(self) -> list[RowTime]:
        """The timing of the rows of the kept iterations that nodes have left."""
        if self._rows is None:
            self._rows = row_times(span for span in self._spans if span.iteration >= self._whole_from)
        return self._rows

    def times(self) -> list[IterationTime]:
        """The timing of the kept iterations, from the rows that nodes have left."""
        return iteration_times(self.rows(), last_phase(self.record.settings.rl_phase, self._phase_names))

    # --- derived state ---

    def is_here(self, rank: int) -> bool:
        """Whether a rank's daemon runs (or ran) on this host, so that its process can be checked."""
        join = self.joins.get(rank)
        return join is not None and join.boot_id == self._boot and join.host == self._host

    def process_gone(self, rank: int) -> bool:
        """Whether a rank's daemon has ended, because its process does not exist on this host."""
        if not self.is_here(rank):
            return False
        try:
            return Stat(self.joins[rank].pid).ended
        except (FileNotFoundError, ProcessLookupError):
            return True
        except OSError:
            return False

    def beat(self, rank: int) -> Beat | None:
        """The last heartbeat of a rank's newest incarnation."""
        beat, join = self._beats.get(rank), self.joins.get(rank)
        return beat if beat is not None and (join is None or beat.incarnation >= join.incarnation) else None

    def beat_age_s(self, rank: int, now: float) -> float | None:
        """Seconds since a rank's heartbeat last advanced; None if no advance was seen yet."""
        seen = self.ledger.seen.get(rank)
        return max(0.0, now - seen.since) if seen is not None and seen.moved else None

    def watched_s(self, rank: int, now: float) -> float:
        """Seconds for which this process watched a rank without an advance of its heartbeat, or without finding one."""
        seen = self.ledger.seen.get(rank)
        if seen is None or self.beat(rank) is None:
            return max(0.0, now - self.joined_since.get(rank, now))
        return max(0.0, now - seen.since)

    def waited_s(self) -> float | None:
        """How long members have been waiting at the row's barrier, since the first was done, by wall clocks; None: unknown."""
        done = [
            event.at
            for rank, event in self._done.items()
            if rank in self.arrived and event.row == self.position
        ]
        return max(0.0, time.time() - min(done)) if done else None

    def unsure(self) -> list[int]:
        """The ranks whose heartbeat has not advanced yet, although they have not ended and their process may exist."""
        ranks = []
        for rank in {*self.joins, *self.ledger.seen}:
            beat, seen = self.beat(rank), self.ledger.seen.get(rank)
            claims = beat is None or seen is None or (not seen.moved and beat.state not in GONE)
            if claims and not self.process_gone(rank):
                ranks.append(rank)
        return ranks

    # --- reading ---

    def _read_joins(self, now: float) -> None:
        for name in self._store.names(self.paths.joins):
            start = names.START.parse(name)
            if start is None or start in self._starts:
                continue
            join = self._store.read(self.paths.joins / name, Join)
            if join is None:
                continue
            self._starts.add(start)
            if join.rank not in self.joins or self.joins[join.rank].incarnation < join.incarnation:
                self.joins[join.rank] = join
                self.joined_since[join.rank] = now

    def _read_generations(self) -> None:
        numbers = names.GENERATION.parse_all(self._store.names(self.paths.generations))
        for number in sorted(set(numbers) - self._generations):
            record = self._store.read(self.paths.generation(number), Generation)
            if record is None:
                continue
            self._generations.add(number)
            for member in record.members:
                self.members[member.rank] = max(member.incarnation, self.members.get(member.rank, 0))
            if self.newest is None or number > self.newest.number:
                self.newest = record
                if record.verdict is None:
                    begins = (number, record.start.iteration, record.start.phase)
                    self.position = max(self.position, begins)

    def _read_journals(self) -> list[Event]:
        fresh: deque[Event] = deque(maxlen=MAX_EVENTS)
        # Several nodes report the same event and the first report counts, so the order must be deterministic.
        starts = {name: names.JOURNAL.parse(name) for name in sorted(self._store.names(self.paths.events))}
        journals = {name: start for name, start in starts.items() if start is not None}
        for name, start in journals.items():
            if name not in self._journals:
                self._journals[name] = self._journal(name, start, len(journals)), SpanReader()
            journal, spans = self._journals[name]
            for event in journal.read():
                if journal.shortened and event.name in FREQUENT and name not in self._begun:
                    # The skipped part of this journal may extend into this iteration; the next one is complete.
                    self._whole_from = max(self._whole_from, event.iteration + 1)
                    self._begun.add(name)
                if self._take(event, spans):
                    fresh.append(event)
        self._forget()
        return sorted(fresh, key=lambda event: event.at)

    def _journal(self, name: str, start: names.StartName, journals: int) -> JournalReader:
        most = None if self.newest_bytes is None else max(LEAST_BYTES, self.newest_bytes // journals)
        leads = self.newest is not None and start.rank == self.newest.leader
        return JournalReader(self.paths.events / name, most, with_past=self.all_pasts or leads)

    def _take(self, event: Event, spans: SpanReader) -> bool:
        """Pass the event to all collectors. Returns False if another node has just reported the same."""
        ended = spans.feed(event)
        if ended is not None:
            self._spans.append(ended)
            self._rows = None
        is_news = self.history.feed(event)
        if event.name == "phase_started":
            self.position = max(self.position, event.row)
            self._phase_names[event.phase] = event.phase_name
            place = self.places.get(event.node_rank)
            if place is None or place.row <= event.row:
                self.places[event.node_rank] = event
        if event.waits or event.name == "work_finished":
            self._done[event.node_rank] = event
        return is_news

    def _forget(self) -> None:
        if self.keep is not None:
            oldest = self.position[1] - self.keep
            if any(span.iteration < oldest for span in self._spans[:1]):
                self._spans = [span for span in self._spans if span.iteration >= oldest]
                self._rows = None

    def _read_beats(self, now: float) -> None:
        newest = {start.rank: beat for start, beat in self._heartbeats.read() if beat is not None}
        # On a full disk a node can only change the name.
        pulses = names_of_beats(self._store, self.paths)
        beats = {rank: with_name(beat, pulses) for rank, beat in newest.items()}
        for beat in beats.values():
            with contextlib.suppress(OSError):
                self.beat_times[beat.rank] = self.paths.beat(beat.rank, beat.incarnation).stat().st_mtime
        self._beats.update(beats)
        self.ledger = self.ledger.observe(
            {rank: beat.pulse for rank, beat in beats.items()}, now, now, BLIND_S
        )

    def _read_arrivals(self) -> None:
        """The members that are done with the current row, according to the facts in the row's folder."""
        if self.newest is None or self.position[0] != self.newest.number:
            self.arrived = frozenset()
            return
        generation, iteration, phase = self.position
        folder = self.paths.phase(generation, phase, self.phase_name)
        facts = names.FACT.parse_all(self._store.names(folder))
        done = {fact.rank for fact in facts if (fact.iteration, fact.status) == (iteration, "done")}
        self.arrived = frozenset(done & set(self.newest.ranks))
