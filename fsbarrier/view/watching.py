"""Reads a run directory again and again, for those who look on: status, the live view, the report. Writes nothing there.

Each poll reads only what is new: the journals from where they were left, immutable records once, heartbeats always. A torn,
foreign or vanishing file is passed over; it is never an error.
"""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass, field
from pathlib import Path

from fsbarrier.errors import UsageError
from fsbarrier.machine.host import boot_id
from fsbarrier.program import PHASE_NAMES
from fsbarrier.protocol.facts import Beat, CorruptRecord, Generation, Join, R, decode
from fsbarrier.protocol.membership import GONE, Ledger
from fsbarrier.rundir import names, runrecord
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.supervision.processes import Stat
from fsbarrier.view.history import History
from fsbarrier.view.lines import Line, parse
from fsbarrier.view.timings import IterationTime, Span, SpanReader, iteration_times, rows

MAX_BYTES = 16 * 1024 * 1024  # read of one journal at a time
BLIND_S = 5.0  # a gap between two polls above which nobody's silence counts


@dataclass
class JournalTail:
    """Where the reading of one journal stands."""

    path: Path
    clock: str
    offset: int = 0
    rest: bytes = b""
    spans: SpanReader = field(default_factory=SpanReader)

    def read(self) -> list[Line]:
        """The whole lines that came since the last call."""
        found: list[Line] = []
        while True:
            try:
                with self.path.open("rb") as stream:
                    stream.seek(self.offset)
                    data = stream.read(MAX_BYTES)
            except OSError:
                return found
            self.offset += len(data)
            *whole, self.rest = (self.rest + data).split(b"\n")
            if len(self.rest) > MAX_BYTES:
                self.rest = b""
            found += [line for line in map(self._parse, whole) if line is not None]
            if len(data) < MAX_BYTES:
                return found

    def _parse(self, raw: bytes) -> Line | None:
        try:
            return parse(json.loads(raw), self.clock)
        except (ValueError, RecursionError):
            return None


@dataclass
class RunReader:
    """Everything that is known of one run. `keep`: of how many newest iterations the phases' times are kept; None: all.

    Making one raises UsageError where there is no run (or none that can be read).
    """

    log_path: Path
    keep: int | None = None
    joins: dict[int, Join] = field(default_factory=dict)
    joined_since: dict[int, float] = field(default_factory=dict)
    newest: Generation | None = None
    members: dict[int, int] = field(
        default_factory=dict
    )  # rank -> its newest incarnation that ever took part
    ledger: Ledger = field(default_factory=Ledger)
    arrived: frozenset[int] = frozenset()
    arrived_since: dict[int, float] = field(default_factory=dict)
    history: History = field(default_factory=History)
    position: tuple[int, int, int] = (0, 0, 0)
    places: dict[int, Line] = field(default_factory=dict)  # node rank -> its newest phase_started
    beat_times: dict[int, float] = field(default_factory=dict)
    _generations: set[int] = field(default_factory=set)
    _clocks: dict[names.StartName, str] = field(default_factory=dict)
    _tails: dict[str, JournalTail] = field(default_factory=dict)
    _spans: list[Span] = field(default_factory=list)
    _times: list[IterationTime] = field(default_factory=list)
    _times_of: int = 0
    _arrivals: dict[tuple[int, int, int], dict[int, Line]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.paths = RunPaths(self.log_path)
        self.record = load_record(self.log_path)
        self.boot = boot_id()
        self.host = socket.gethostname()

    def poll(self, now: float) -> list[Line]:
        """Look at everything; `now` is this process's monotonic time. Gives the journals' new lines, by their wall clocks."""
        self._look_at_joins(now)
        self._look_at_generations()
        fresh = self._look_at_journals()
        self._look_at_beats(now)
        self._look_at_row(now)
        return fresh

    @property
    def phase_name(self) -> str:
        index = self.position[2]
        return PHASE_NAMES[index] if index < len(PHASE_NAMES) else ""

    def spans(self) -> list[Span]:
        """The kept spans, the rows under way included."""
        return self._spans + [tail.spans.open for tail in self._tails.values() if tail.spans.open is not None]

    def times(self) -> list[IterationTime]:
        """Where the time of the kept iterations went, as of the rows that nodes have passed."""
        if self._times_of != len(self._spans):
            last = 6 if self.record.settings.get("rl_phase") == "rollout" else 13
            self._times = iteration_times(rows(self._spans), last)
            self._times_of = len(self._spans)
        return self._times

    def here(self, rank: int) -> bool:
        """Whether a rank's daemon runs (or ran) on this host, so that its process can be looked at."""
        join = self.joins.get(rank)
        return join is not None and join.boot_id == self.boot and join.host == self.host

    def process_gone(self, rank: int) -> bool:
        """Whether a rank's daemon is known to have ended, since this host has no such process."""
        if not self.here(rank):
            return False
        try:
            return Stat(self.joins[rank].pid).ended
        except ProcessLookupError:
            return True
        except OSError as error:
            return isinstance(error, FileNotFoundError)

    def beat(self, rank: int) -> Beat | None:
        """The last heartbeat of a rank's newest incarnation."""
        seen, join = self.ledger.seen.get(rank), self.joins.get(rank)
        if seen is None or (join is not None and seen.beat.incarnation < join.incarnation):
            return None
        return seen.beat

    def silent_s(self, rank: int, now: float) -> float | None:
        """Seconds since a rank's heartbeat was seen to move; None where it was not yet seen to."""
        seen = self.ledger.seen.get(rank)
        return max(0.0, now - seen.since) if seen is not None and seen.moved else None

    def watched_s(self, rank: int, now: float) -> float:
        """Seconds for which a rank's heartbeat has not moved under our eyes, or not been there at all."""
        seen = self.ledger.seen.get(rank)
        if seen is None or self.beat(rank) is None:
            return max(0.0, now - self.joined_since.get(rank, now))
        return max(0.0, now - seen.since)

    def waited_s(self, now: float) -> tuple[float, bool] | None:
        """How long the row's barrier has been waited for, from its first member's being done; None: nobody waits.

        Exact by this host's clock where that member is here; else (False) as long as this process has seen it.
        """
        if not self.arrived:
            return None
        known = self._arrivals.get(self.position, {})
        lines = [known[rank] for rank in self.arrived if rank in known]
        if len(lines) == len(self.arrived) and all(line.clock == self.boot for line in lines):
            return max(0.0, now - min(line.mono_s for line in lines)), True
        return max(0.0, now - min(self.arrived_since.values(), default=now)), False

    # --- looking ---

    def _look_at_joins(self, now: float) -> None:
        for name in _names(self.paths.joins):
            start = names.START.parse(name)
            if start is None or start in self._clocks:
                continue
            join = _read(self.paths.joins / name, Join)
            if join is None:
                continue
            self._clocks[start] = join.boot_id
            if join.rank not in self.joins or self.joins[join.rank].incarnation < join.incarnation:
                self.joins[join.rank] = join
                self.joined_since[join.rank] = now

    def _look_at_generations(self) -> None:
        found = names.GENERATION.parse_all(_names(self.paths.generations))
        for number in sorted(set(found) - self._generations):
            record = _read(self.paths.generation(number), Generation)
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

    def _look_at_journals(self) -> list[Line]:
        fresh: list[Line] = []
        for name in _names(self.paths.events):
            start = names.JOURNAL.parse(name)
            if start is None:
                continue
            if name not in self._tails:
                # a journal whose node's join cannot be read has a clock that nobody shares
                clock = self._clocks.get(start) or f"journal {name}"
                self._tails[name] = JournalTail(self.paths.events / name, clock)
            tail = self._tails[name]
            lines = tail.read()
            for line in lines:
                self._take(tail, line)
            fresh += lines
        self._forget()
        return sorted(fresh, key=lambda line: line.at)

    def _take(self, tail: JournalTail, line: Line) -> None:
        span = tail.spans.feed(line)
        if span is not None:
            self._spans.append(span)
        self.history.feed(line)
        key = (line.generation, line.iteration, line.phase)
        if line.event == "phase_started":
            self.position = max(self.position, key)
            place = self.places.get(line.node_rank)
            if place is None or (place.generation, place.iteration, place.phase) <= key:
                self.places[line.node_rank] = line
        elif line.event == "work_finished":
            self._arrivals.setdefault(key, {})[line.node_rank] = line

    def _forget(self) -> None:
        self._arrivals = {key: lines for key, lines in self._arrivals.items() if key >= self.position}
        if self.keep is not None:
            oldest = self.position[1] - self.keep
            if any(span.iteration < oldest for span in self._spans[:1]):
                self._spans = [span for span in self._spans if span.iteration >= oldest]
                self._times_of = -1

    def _look_at_beats(self, now: float) -> None:
        beats = dict[int, Beat]()
        for name in _names(self.paths.beats):
            start = names.START.parse(name)
            beat = _read(self.paths.beats / name, Beat) if start is not None else None
            if beat is None or start != names.StartName(beat.rank, beat.incarnation):
                continue
            if beat.rank in beats and beat.incarnation < beats[beat.rank].incarnation:
                continue
            beats[beat.rank] = beat
            try:
                self.beat_times[beat.rank] = (self.paths.beats / name).stat().st_mtime
            except OSError:
                continue
        self.ledger = self.ledger.observe(beats, now, now, BLIND_S)

    def _look_at_row(self, now: float) -> None:
        generation, iteration, phase = self.position
        if self.newest is None or generation != self.newest.number:
            self.arrived, self.arrived_since = frozenset(), {}
            return
        folder = self.paths.phase(generation, iteration, phase, self.phase_name)
        ranks = {fact.rank for fact in names.FACT.parse_all(_names(folder)) if fact.status == "done"}
        here = ranks & set(self.newest.ranks)
        self.arrived_since = {rank: self.arrived_since.get(rank, now) for rank in here & self.arrived} | {
            rank: now for rank in here - self.arrived
        }
        self.arrived = frozenset(here)


def still_silent(reader: RunReader) -> list[int]:
    """The ranks that claim life, but whose heartbeat was not seen to move, and whose process is not known to be gone."""
    found = []
    for rank in {*reader.joins, *reader.ledger.seen}:
        beat, seen = reader.beat(rank), reader.ledger.seen.get(rank)
        claims = beat is None or seen is None or (not seen.moved and beat.state not in GONE)
        if claims and not reader.process_gone(rank):
            found.append(rank)
    return found


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


def _names(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in folder.iterdir())
    except OSError:
        return []


def _read(path: Path, cls: type[R]) -> R | None:
    try:
        return decode(path.read_bytes(), cls)
    except (OSError, CorruptRecord):
        return None
