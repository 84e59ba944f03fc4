"""Reads a run directory again and again, for the views: status, the live view, the summary, the report. Writes nothing.

Each poll reads only what is new: the journals from where they were left, immutable records once, heartbeats always. A torn,
foreign or vanishing file is passed over; it is never an error. Of long journals the first look reads only the newest part whole.
"""

from __future__ import annotations

import contextlib
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from fsbarrier.errors import UsageError
from fsbarrier.host.identity import boot_id, host_name
from fsbarrier.protocol.facts import Beat, Generation, Join, Revision
from fsbarrier.protocol.membership import GONE, Ledger
from fsbarrier.rundir import names, runrecord
from fsbarrier.rundir.heartbeats import HeartbeatReader
from fsbarrier.rundir.journal import FREQUENT, Event, JournalReader
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.record_store import LenientStore
from fsbarrier.rundir.revisions import present
from fsbarrier.settings.sections import Settings
from fsbarrier.supervision.processes import Stat
from fsbarrier.view.history import MAX_EVENTS, History
from fsbarrier.view.phase_names import last_phase, phase_name
from fsbarrier.view.timings import IterationTime, Span, SpanReader, iteration_times, row_times

#: If more seconds lie between two polls, they count as nobody's silence: this process did not look.
BLIND_S = 5.0
#: However many journals there are, of each at least so much is read: where its node is now.
LEAST_BYTES = 12_000


@dataclass
class RunReader:
    """Everything that is known of one run. Making one raises UsageError where there is no run that can be read.

    `keep`: the times of so many newest iterations are kept; None: of all that was read. `newest_bytes`: of the journals that are there
    at the first look, the newest so many bytes (of all journals together) are read whole; None: all. From what is older only rare events
    are taken (losses, results, failures): `all_pasts` says whether from every journal, or only from those of the leader's starts, which
    have each result and each loss too.
    """

    log_path: Path
    keep: int | None = None
    newest_bytes: int | None = None
    all_pasts: bool = True

    #: The newest start of each rank, and when this process first saw it.
    joins: dict[int, Join] = field(default_factory=dict)
    joined_since: dict[int, float] = field(default_factory=dict)

    #: The newest generation, and the newest incarnation of each rank that was ever in one.
    newest: Generation | None = None
    members: dict[int, int] = field(default_factory=dict)

    #: Heartbeats as this process saw them move, and when each was written by the shared filesystem's clock.
    ledger: Ledger = field(default_factory=Ledger)
    beat_times: dict[int, float] = field(default_factory=dict)

    #: The furthest row (generation, iteration, phase) that anybody began, and each rank's newest `phase_started`.
    position: tuple[int, int, int] = (0, 0, 0)
    places: dict[int, Event] = field(default_factory=dict)

    #: The members that are done with the row at `position`, and since when this process knows.
    arrived: frozenset[int] = frozenset()
    arrived_since: dict[int, float] = field(default_factory=dict)

    history: History = field(default_factory=History)
    _generations: set[int] = field(default_factory=set)
    _phase_names: dict[int, str] = field(default_factory=dict)
    _clocks: dict[names.StartName, str] = field(default_factory=dict)
    _journals: dict[str, tuple[JournalReader, SpanReader]] = field(default_factory=dict)
    _spans: list[Span] = field(default_factory=list)
    _times: list[IterationTime] | None = None
    #: From this iteration on every journal was read whole; and the shortened journals that have been considered for that.
    _whole_from: int = 0
    _begun: set[str] = field(default_factory=set)
    _arrivals: dict[tuple[int, int, int], dict[int, Event]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.paths = RunPaths(self.log_path)
        self.record = load_record(self.log_path)
        self._boot = boot_id()
        self._host = host_name()
        self._store = LenientStore()
        self._heartbeats = HeartbeatReader(self._store, self.paths.beats)

    def poll(self, now: float) -> list[Event]:
        """Look at everything; `now` is this process's monotonic time. Gives the journals' new events, by their wall clocks."""
        self._read_joins(now)
        self._read_generations()
        fresh = self._read_journals()
        self._read_beats(now)
        self._read_arrivals(now)
        return fresh

    @property
    def phase_name(self) -> str:
        """The name of the row that the run is in: by the journals, since a program may have rows of its own."""
        index = self.position[2]
        return self._phase_names.get(index) or phase_name(index)

    @property
    def revisions(self) -> tuple[Revision, ...]:
        """All changes of the run's settings."""
        return self.newest.revisions if self.newest is not None else ()

    @property
    def settings(self) -> Settings:
        """The run's settings as they are now, with those changes that begin with a later iteration."""
        return present(self.record.settings, self.revisions)

    @property
    def faults(self) -> list[str]:
        """Why journals are not read."""
        return [journal.fault for journal, _ in self._journals.values() if journal.fault]

    def spans(self) -> list[Span]:
        """The kept spans, the rows under way included."""
        under_way = [spans.open for _, spans in self._journals.values()]
        return self._spans + [span for span in under_way if span is not None]

    def times(self) -> list[IterationTime]:
        """Where the time of the kept iterations went, as of the rows that nodes have passed."""
        if self._times is None:
            last = last_phase(self.record.settings.rl_phase, self._phase_names)
            whole = (span for span in self._spans if span.iteration >= self._whole_from)
            self._times = iteration_times(row_times(whole), last)
        return self._times

    # --- what follows from what was read ---

    def is_here(self, rank: int) -> bool:
        """Whether a rank's daemon runs (or ran) on this host, so that its process can be looked at."""
        join = self.joins.get(rank)
        return join is not None and join.boot_id == self._boot and join.host == self._host

    def process_gone(self, rank: int) -> bool:
        """Whether a rank's daemon is known to have ended, since this host has no such process."""
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
        seen, join = self.ledger.seen.get(rank), self.joins.get(rank)
        if seen is None or (join is not None and seen.beat.incarnation < join.incarnation):
            return None
        return seen.beat

    def beat_age_s(self, rank: int, now: float) -> float | None:
        """Seconds since a rank's heartbeat was seen to move; None where it was not yet seen to."""
        seen = self.ledger.seen.get(rank)
        return max(0.0, now - seen.since) if seen is not None and seen.moved else None

    def watched_s(self, rank: int, now: float) -> float:
        """Seconds for which we watched a rank's heartbeat without seeing it move, or without finding it."""
        seen = self.ledger.seen.get(rank)
        if seen is None or self.beat(rank) is None:
            return max(0.0, now - self.joined_since.get(rank, now))
        return max(0.0, now - seen.since)

    def waited_s(self, now: float) -> tuple[float, bool] | None:
        """How long the row's barrier has been waited for, since its first member was done; None: nobody waits.

        True: exact, by this host's clock, since all who wait are here. False: as long as this process has seen it.
        """
        if not self.arrived:
            return None
        known = self._arrivals.get(self.position, {})
        events = [known[rank] for rank in self.arrived if rank in known]
        if len(events) == len(self.arrived) and all(event.clock == self._boot for event in events):
            return max(0.0, now - min(event.mono_s for event in events)), True
        return max(0.0, now - min(self.arrived_since.values(), default=now)), False

    def unsure(self) -> list[int]:
        """The ranks that claim to live, but whose heartbeat was not seen to move and whose process may well be there."""
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
            if start is None or start in self._clocks:
                continue
            join = self._store.read(self.paths.joins / name, Join)
            if join is None:
                continue
            self._clocks[start] = join.boot_id
            if join.rank not in self.joins or self.joins[join.rank].incarnation < join.incarnation:
                self.joins[join.rank] = join
                self.joined_since[join.rank] = now

    def _read_generations(self) -> None:
        found = names.GENERATION.parse_all(self._store.names(self.paths.generations))
        for number in sorted(set(found) - self._generations):
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
        # Several nodes report the same thing and the first report counts, so the order must always be the same.
        starts = {name: names.JOURNAL.parse(name) for name in sorted(self._store.names(self.paths.events))}
        journals = {name: start for name, start in starts.items() if start is not None}
        for name, start in journals.items():
            if name not in self._journals:
                self._journals[name] = self._journal(name, start, len(journals)), SpanReader()
            journal, spans = self._journals[name]
            for event in journal.read():
                if journal.shortened and event.name in FREQUENT and name not in self._begun:
                    # What was left out of this journal may reach into this iteration. The next one is whole.
                    self._whole_from = max(self._whole_from, event.iteration + 1)
                    self._begun.add(name)
                self._take(event, spans)
                fresh.append(event)
        self._forget()
        return sorted(fresh, key=lambda event: event.at)

    def _journal(self, name: str, start: names.StartName, journals: int) -> JournalReader:
        # The node's join names its clock. While that cannot be read, nobody else's times are compared with this node's.
        clock = self._clocks.get(start) or f"journal {name}"
        most = None if self.newest_bytes is None else max(LEAST_BYTES, self.newest_bytes // journals)
        leads = self.newest is not None and start.rank == self.newest.leader
        return JournalReader(self.paths.events / name, clock, most, with_past=self.all_pasts or leads)

    def _take(self, event: Event, spans: SpanReader) -> None:
        """Hand the event to everything that keeps something of it."""
        ended = spans.feed(event)
        if ended is not None:
            self._spans.append(ended)
            self._times = None
        self.history.feed(event)
        if event.name == "phase_started":
            self.position = max(self.position, event.row)
            self._phase_names[event.phase] = event.phase_name
            place = self.places.get(event.node_rank)
            if place is None or place.row <= event.row:
                self.places[event.node_rank] = event
        if event.waits or event.name == "work_finished":
            self._arrivals.setdefault(event.row, {})[event.node_rank] = event

    def _forget(self) -> None:
        self._arrivals = {row: events for row, events in self._arrivals.items() if row >= self.position}
        if self.keep is not None:
            oldest = self.position[1] - self.keep
            if any(span.iteration < oldest for span in self._spans[:1]):
                self._spans = [span for span in self._spans if span.iteration >= oldest]
                self._times = None

    def _read_beats(self, now: float) -> None:
        beats = {start.rank: beat for start, beat in self._heartbeats.read() if beat is not None}
        for beat in beats.values():
            with contextlib.suppress(OSError):
                self.beat_times[beat.rank] = self.paths.beat(beat.rank, beat.incarnation).stat().st_mtime
        self.ledger = self.ledger.observe(beats, now, now, BLIND_S)

    def _read_arrivals(self, now: float) -> None:
        """Who is done with the row that the run is in, as the members' facts in the row's folder say."""
        if self.newest is None or self.position[0] != self.newest.number:
            self.arrived, self.arrived_since = frozenset(), {}
            return
        generation, iteration, phase = self.position
        folder = self.paths.phase(generation, phase, self.phase_name)
        facts = names.FACT.parse_all(self._store.names(folder))
        done = {fact.rank for fact in facts if (fact.iteration, fact.status) == (iteration, "done")}
        arrived = done & set(self.newest.ranks)
        since = {rank: self.arrived_since[rank] for rank in arrived & self.arrived}
        self.arrived, self.arrived_since = frozenset(arrived), dict.fromkeys(arrived, now) | since


def load_record(log_path: Path) -> runrecord.RunRecord:
    """The record of the run there. Raises UsageError, in words for those who only look."""
    try:
        there = runrecord.exists(log_path)
    except OSError as error:
        raise UsageError(f"no run at {log_path}: {error.strerror or error}") from None
    if not there:
        why = "there is no run.json" if log_path.is_dir() else "there is no such directory"
        raise UsageError(f"no run at {log_path}: {why}; name a run's directory with --log-path")
    return runrecord.load(log_path)
