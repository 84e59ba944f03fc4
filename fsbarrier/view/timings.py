"""Computes from the journals how long each phase took and how much of that was coordination. Pure.

A row (one phase of one iteration under one generation) lasts from the time its last member entered it until the last member entered the
next row. It has two parts:

    last member enters row k ---- work ----> last member done with its work ---- coordination ----> last member enters row k + 1

so work and coordination of all rows add up to the duration of the iteration. A member without work is done when it enters. On one host all
members share a monotonic clock. Across hosts their wall clocks are compared, for display only, and coordination is only as accurate as
those.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fsbarrier.rundir.journal import Event
from fsbarrier.rundir.phase_time import PhaseTime

#: the row was passed; the row was aborted (new generation, signal); the journal ends in the row
PASSED, CUT_SHORT, OPEN = "passed", "cut short", "open"
NO_TIME = PhaseTime()


@dataclass(frozen=True, slots=True)
class Span:
    """One node's time in one row, by its own monotonic clock; `began_at`: the start by its wall clock.

    `done_s`: when its work was done (its entry if it had none); None: unknown. `time`: the parts of the time, as far as the journal
    records them. `failed`: its program failed.
    """

    node_rank: int
    generation: int
    iteration: int
    phase: int
    phase_name: str
    clock: str
    began_at: float
    began_s: float
    ended_s: float
    done_s: float | None = None
    time: PhaseTime = NO_TIME
    outcome: str = OPEN
    failed: bool = False

    def ended(self, ended_s: float, outcome: str) -> Span:
        return self.going_on(ended_s, self.done_s, self.time, outcome, self.failed)

    def going_on(
        self, ended_s: float, done_s: float | None, time: PhaseTime, outcome: str, failed: bool
    ) -> Span:
        # A report creates a million of these; `dataclasses.replace` would take half of the time.
        where = self.node_rank, self.generation, self.iteration, self.phase, self.phase_name, self.clock
        return Span(*where, self.began_at, self.began_s, ended_s, done_s, time, outcome, failed)

    @property
    def seconds(self) -> float:
        return max(0.0, self.ended_s - self.began_s)

    @property
    def wall_offset(self) -> float:
        """The offset from this node's monotonic clock to wall-clock time."""
        return self.began_at - self.began_s

    @property
    def row(self) -> tuple[int, int, int]:
        """Generation, iteration, phase."""
        return self.generation, self.iteration, self.phase


class SpanReader:
    """Converts one journal's events, in order, to spans. `open`: the span of the current row."""

    def __init__(self) -> None:
        self.open: Span | None = None

    def feed(self, event: Event) -> Span | None:
        """Process the next event; returns the span that it ended, if any."""
        span = self.open
        if event.name == "phase_started":
            self.open = Span(
                event.node_rank,
                *event.row,
                event.phase_name,
                event.clock,
                began_at=event.at,
                began_s=event.mono_s,
                ended_s=event.mono_s,
                done_s=event.mono_s if event.waits else None,
            )
            return span.ended(event.mono_s, CUT_SHORT) if span else None
        if span is None:
            return None
        if event.name == "phase_finished" and event.row == span.row:
            self.open = None
            return _passed(span, event)
        if event.name in ("generation_started", "left_generation", "node_ended"):
            self.open = None
            return span.ended(event.mono_s, CUT_SHORT)
        if event.row == span.row:
            self.open = _going_on(span, event)
        return None


def _passed(span: Span, event: Event) -> Span:
    """The span of a row that its `phase_finished` ends."""
    seconds, time, done_s = max(0.0, event.mono_s - span.began_s), span.time, span.done_s
    if event.number("wait_s") is not None:
        time = PhaseTime.read(event.fields)
        waited_s = event.number("waited_s")
        done_s = event.mono_s - (time.wait_s if waited_s is None else waited_s)
    elif done_s is None and event.number("seconds") is not None:
        # A row whose work took no time.
        time = PhaseTime.read(event.fields)
        done_s = event.mono_s
    return span.going_on(event.mono_s, done_s, time.within(seconds), PASSED, span.failed)


def _going_on(span: Span, event: Event) -> Span:
    """The span of the current row, updated by one more event."""
    ended_s = max(span.ended_s, event.mono_s)
    if event.name not in ("work_finished", "work_failed"):
        return span.going_on(ended_s, span.done_s, span.time, OPEN, span.failed)
    time = PhaseTime.read(event.fields)
    done_s = event.mono_s - (event.number("waited_s") or 0.0) if time.seconds > 0 else span.began_s
    return span.going_on(ended_s, done_s, time, OPEN, event.name == "work_failed")


def read_spans(journals: Iterable[Iterable[Event]]) -> list[Span]:
    """The spans of complete journals; the row in which a journal ends is OPEN."""
    spans = []
    for events in journals:
        reader = SpanReader()
        spans += [span for span in map(reader.feed, events) if span is not None]
        if reader.open is not None:
            spans.append(reader.open)
    return spans


@dataclass(frozen=True, slots=True)
class RowTime:
    """One phase of one iteration under one generation, over all members. In seconds; `began_at`: wall-clock time.

    `coordination_s`: None if the row was not passed (yet); `cut_short`: the row was aborted. `last_rank`: the member that all others
    waited for. `exact`: all times are from one clock.
    """

    generation: int
    iteration: int
    phase: int
    phase_name: str
    began_at: float
    seconds: float
    coordination_s: float | None
    cut_short: bool
    last_rank: int
    exact: bool

    @property
    def work_s(self) -> float:
        return self.seconds - (self.coordination_s or 0.0)


def row_times(spans: Iterable[Span]) -> list[RowTime]:
    """The rows of a run in order of generation, iteration and phase."""
    members: dict[tuple[int, int, int], list[Span]] = defaultdict(list)
    clocks: dict[int, set[str]] = defaultdict(set)
    for span in spans:
        members[span.row].append(span)
        clocks[span.generation].add(span.clock)
    keys = sorted(members)
    found = []
    for index, key in enumerate(keys):
        exact = len(clocks[key[0]]) == 1
        following = keys[index + 1] if index + 1 < len(keys) else None
        follows = members[following] if following is not None and following[0] == key[0] else []
        found.append(_row(members[key], follows, exact))
    return found


def _row(spans: Sequence[Span], following: Sequence[Span], exact: bool) -> RowTime:
    def on_axis(span: Span, mono_s: float) -> float:
        return mono_s if exact else mono_s + span.wall_offset

    first = spans[0]
    began = max(on_axis(span, span.began_s) for span in spans)
    # If one member passed the row, all were done with it, even one whose journal ends earlier.
    passed = any(span.outcome == PASSED for span in spans)
    if passed and following:
        ended = max(on_axis(span, span.began_s) for span in following)
    else:
        ended = max(on_axis(span, span.ended_s) for span in spans)
    done = {span.node_rank: on_axis(span, span.done_s) for span in spans if span.done_s is not None}
    last_rank = max(done, key=lambda rank: (done[rank], -rank)) if done else first.node_rank
    coordination = None
    if passed and done:
        coordination = min(max(0.0, ended - done[last_rank]), max(0.0, ended - began))
    return RowTime(
        *first.row,
        first.phase_name,
        began_at=max(span.began_at for span in spans),
        seconds=max(0.0, ended - began),
        coordination_s=coordination,
        cut_short=not passed and any(span.outcome == CUT_SHORT for span in spans),
        last_rank=last_rank,
        exact=exact,
    )


@dataclass(frozen=True, slots=True)
class IterationTime:
    """The timing of one iteration, over all generations that worked on it. In seconds.

    `phases`: (index, name) -> seconds, including coordination; `work`: without coordination. `cut_short_s`: the part of `seconds` spent in
    aborted rows. `complete`: its last row was passed.
    """

    iteration: int
    began_at: float
    seconds: float
    coordination_s: float
    cut_short_s: float
    phases: dict[tuple[int, str], float]
    work: dict[tuple[int, str], float]
    complete: bool
    exact: bool

    @property
    def share(self) -> float:
        """Coordination's share of the iteration, 0 to 1."""
        return self.coordination_s / self.seconds if self.seconds > 0 else 0.0


def iteration_times(run_rows: Iterable[RowTime], last_phase: int | None = None) -> list[IterationTime]:
    """The iterations in order. `last_phase`: the last row of an iteration; None: the highest one seen."""
    by_iteration: dict[int, list[RowTime]] = defaultdict(list)
    for row in run_rows:
        by_iteration[row.iteration].append(row)
    last = (
        max((r.phase for rs in by_iteration.values() for r in rs), default=0)
        if last_phase is None
        else last_phase
    )
    found = []
    for iteration, own in sorted(by_iteration.items()):
        phases: dict[tuple[int, str], float] = defaultdict(float)
        work: dict[tuple[int, str], float] = defaultdict(float)
        for row in own:
            phases[row.phase, row.phase_name] += row.seconds
            work[row.phase, row.phase_name] += row.work_s
        found.append(
            IterationTime(
                iteration=iteration,
                began_at=min(row.began_at for row in own),
                seconds=sum(row.seconds for row in own),
                coordination_s=sum(row.coordination_s or 0.0 for row in own),
                cut_short_s=sum(row.seconds for row in own if row.cut_short),
                phases=dict(sorted(phases.items())),
                work=dict(sorted(work.items())),
                complete=any(row.phase == last and row.coordination_s is not None for row in own),
                exact=all(row.exact for row in own),
            )
        )
    return found


def together(iterations: Sequence[IterationTime]) -> IterationTime:
    """The sum of several iterations; `iteration` and `began_at` are those of the first."""
    phases: dict[tuple[int, str], float] = defaultdict(float)
    work: dict[tuple[int, str], float] = defaultdict(float)
    for one in iterations:
        for phase, seconds in one.phases.items():
            phases[phase] += seconds
            work[phase] += one.work[phase]
    return IterationTime(
        iteration=min((one.iteration for one in iterations), default=0),
        began_at=min((one.began_at for one in iterations), default=0.0),
        seconds=sum(one.seconds for one in iterations),
        coordination_s=sum(one.coordination_s for one in iterations),
        cut_short_s=sum(one.cut_short_s for one in iterations),
        phases=dict(sorted(phases.items())),
        work=dict(sorted(work.items())),
        complete=all(one.complete for one in iterations),
        exact=all(one.exact for one in iterations),
    )
