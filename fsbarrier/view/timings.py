"""Computes from the journals how long each phase took and how much of that was coordination. Pure.

A row (one phase of one iteration under one generation) lasts from the time its last member entered it until the last member entered the
next row. It has two parts:

    last member enters row k ---- work ----> last member done with its work ---- coordination ----> last member enters row k + 1

so work and coordination of all rows add up to the duration of the iteration. A member without work is done when it enters. How long a
node spent in a row is measured by its monotonic clock. When it entered is compared by wall clocks, for display only, so coordination
between hosts is only as accurate as those.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fsbarrier.rundir.journal import Event
from fsbarrier.rundir.phase_time import PhaseTime
from fsbarrier.wording import percent, ranks

#: the row was passed; the row was aborted (new generation, signal); the journal ends in the row
PASSED, CUT_SHORT, OPEN = "passed", "cut short", "open"
NO_TIME = PhaseTime()
#: the number of newest complete iterations whose mean duration gives the estimate of the remaining time
NEWEST_ITERATIONS = 5


@dataclass(slots=True)
class Span:
    """One node's time in one row. `began_at`: by its wall clock; `seconds`: how long it was in the row; `time`: the parts of that.

    `done_s`: seconds until its work was done (0 if it had none); None: unknown.
    """

    node_rank: int
    generation: int
    iteration: int
    phase: int
    phase_name: str
    began_at: float
    began_s: float
    done_s: float | None = None
    seconds: float = 0.0
    time: PhaseTime = NO_TIME
    outcome: str = OPEN

    @property
    def row(self) -> tuple[int, int, int]:
        """Generation, iteration, phase."""
        return self.generation, self.iteration, self.phase

    @property
    def ended_at(self) -> float:
        return self.began_at + self.seconds

    @property
    def done_at(self) -> float | None:
        return None if self.done_s is None else self.began_at + self.done_s

    def end(self, seconds: float, outcome: str) -> Span:
        self.seconds, self.outcome = seconds, outcome
        return self


class SpanReader:
    """Converts one journal's events, in order, to spans. `open`: the span of the current row."""

    def __init__(self) -> None:
        self.open: Span | None = None

    def feed(self, event: Event) -> Span | None:
        """Process the next event; returns the span that it ended, if any."""
        span = self.open
        seconds = max(0.0, event.mono_s - span.began_s) if span is not None else 0.0
        if event.name == "phase_started":
            done_s = 0.0 if event.waits else None
            self.open = Span(
                event.node_rank, *event.row, event.phase_name, event.at, event.mono_s, done_s=done_s
            )
            return span.end(seconds, CUT_SHORT) if span else None
        if span is None:
            return None
        if event.name == "phase_finished" and event.row == span.row:
            self.open = None
            return _passed(span, event, seconds)
        if event.name in ("generation_started", "left_generation", "node_ended"):
            self.open = None
            return span.end(seconds, CUT_SHORT)
        if event.row == span.row:
            span.seconds = max(span.seconds, seconds)
            if event.name in ("work_finished", "work_failed"):
                span.time = PhaseTime.read(event.fields)
                span.done_s = seconds - (event.number("waited_s") or 0.0) if span.time.seconds > 0 else 0.0
        return None


def _passed(span: Span, event: Event, seconds: float) -> Span:
    """The span of a row that its `phase_finished` ends."""
    if event.number("wait_s") is not None:
        span.time = PhaseTime.read(event.fields)
        waited_s = event.number("waited_s")
        span.done_s = seconds - (span.time.wait_s if waited_s is None else waited_s)
    elif span.done_s is None and event.number("seconds") is not None:
        # A row whose work took no time.
        span.time, span.done_s = PhaseTime.read(event.fields), seconds
    span.time = span.time.within(seconds)
    return span.end(seconds, PASSED)


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
    """One phase of one iteration under one generation, over all members. In seconds.

    `coordination_s`: None if the row was not passed (yet); `cut_short`: the row was aborted. `last_rank`: the member that all others
    waited for. `began_at`: by the wall clock of the member that entered last.
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


def row_times(spans: Iterable[Span]) -> list[RowTime]:
    """The rows of a run in order of generation, iteration and phase."""
    members: dict[tuple[int, int, int], list[Span]] = defaultdict(list)
    for span in spans:
        members[span.row].append(span)
    keys = sorted(members)
    times = []
    for index, key in enumerate(keys):
        following = keys[index + 1] if index + 1 < len(keys) else None
        follows = members[following] if following is not None and following[0] == key[0] else []
        times.append(_row(members[key], follows))
    return times


def _row(spans: Sequence[Span], following: Sequence[Span]) -> RowTime:
    # If one member passed the row, all were done with it, even one whose journal ends earlier.
    passed = any(span.outcome == PASSED for span in spans)
    began = max(span.began_at for span in spans)
    ends = (
        [span.began_at for span in following] if passed and following else [span.ended_at for span in spans]
    )
    ended = max(ends)
    seconds = max(0.0, ended - began)
    done = {span.node_rank: at for span in spans if (at := span.done_at) is not None}
    last_rank = max(done, key=lambda rank: (done[rank], -rank)) if done else spans[0].node_rank
    coordination = min(max(0.0, ended - done[last_rank]), seconds) if passed and done else None
    cut_short = not passed and any(span.outcome == CUT_SHORT for span in spans)
    return RowTime(*spans[0].row, spans[0].phase_name, began, seconds, coordination, cut_short, last_rank)


@dataclass(frozen=True, slots=True)
class IterationTime:
    """The timing of one iteration, over all generations that worked on it. In seconds.

    `phases`: (index, name) -> seconds, including coordination. `complete`: its last row was passed.
    """

    iteration: int
    seconds: float
    coordination_s: float
    phases: dict[tuple[int, str], float]
    complete: bool

    @property
    def share(self) -> float:
        """Coordination's share of the iteration, 0 to 1."""
        return self.coordination_s / self.seconds if self.seconds > 0 else 0.0


def iteration_times(rows: Sequence[RowTime], last_phase: int | None = None) -> list[IterationTime]:
    """The iterations in order. `last_phase`: the last row of an iteration; None: the highest one seen."""
    by_iteration: dict[int, list[RowTime]] = defaultdict(list)
    for row in rows:
        by_iteration[row.iteration].append(row)
    last = max((row.phase for row in rows), default=0) if last_phase is None else last_phase
    return [
        IterationTime(
            iteration,
            seconds=sum(row.seconds for row in own),
            coordination_s=sum(row.coordination_s or 0.0 for row in own),
            phases=_sums(((row.phase, row.phase_name), row.seconds) for row in own),
            complete=any(row.phase == last and row.coordination_s is not None for row in own),
        )
        for iteration, own in sorted(by_iteration.items())
    ]


def together(iterations: Sequence[IterationTime]) -> IterationTime:
    """The sum of several iterations; `iteration` is that of the first."""
    return IterationTime(
        iteration=min((timing.iteration for timing in iterations), default=0),
        seconds=sum(timing.seconds for timing in iterations),
        coordination_s=sum(timing.coordination_s for timing in iterations),
        phases=_sums(item for timing in iterations for item in timing.phases.items()),
        complete=all(timing.complete for timing in iterations),
    )


@dataclass(frozen=True, slots=True)
class Goodput:
    """The share of the time that was productive. `share`: phases 1 to 13 of the attempts that counted over the whole time, 0 to 1.

    `costs_s`: generation -> the seconds lost before it began: work of the previous generation that had to be repeated, and the pause
    between the two.
    """

    share: float
    costs_s: dict[int, float]


def goodput(rows: Sequence[RowTime]) -> Goodput | None:
    """The goodput from the first of these rows to the last; None if they took no time. An attempt counts if its row was passed and no later
    generation repeated it."""
    counted = {(row.iteration, row.phase): row.generation for row in rows if row.coordination_s is not None}
    by_generation: dict[int, list[RowTime]] = defaultdict(list)
    for row in rows:
        by_generation[row.generation].append(row)
    productive_s, lost_s, costs_s = 0.0, 0.0, {}
    ended = first = min((row.began_at for row in rows), default=0.0)
    for generation, own in sorted(by_generation.items()):
        pause_s = max(0.0, min(row.began_at for row in own) - ended)
        costs_s[generation] = lost_s + pause_s
        working_s = sum(row.seconds for row in own if row.phase > 0)
        counted_s = sum(
            row.seconds
            for row in own
            if row.phase > 0 and counted.get((row.iteration, row.phase)) == generation
        )
        productive_s, lost_s = productive_s + counted_s, working_s - counted_s
        ended = max(ended, *(row.began_at + row.seconds for row in own))
    whole_s = ended - first
    return Goodput(min(1.0, productive_s / whole_s), costs_s) if whole_s > 0 else None


def _sums(items: Iterable[tuple[tuple[int, str], float]]) -> dict[tuple[int, str], float]:
    sums: dict[tuple[int, str], float] = defaultdict(float)
    for phase, seconds in items:
        sums[phase] += seconds
    return dict(sorted(sums.items()))


# --- the largest losses of time ---

#: causes with a smaller share of the time are not reported
LEAST = 0.01


def wastes(spans: Iterable[Span], most: int = 3) -> list[str]:
    """The largest losses of the nodes' time first, such as "42 % of node 2's time: waiting for node 0's update".

    Waiting in a row has two parts: until the row's last member is done, a node waits for it; the rest is coordination.
    """
    spans = [*spans]
    rows = {(row.generation, row.iteration, row.phase): row for row in row_times(spans)}
    whole: dict[int, float] = defaultdict(float)
    lost: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for span in spans:
        whole[span.node_rank] += span.seconds
        for cause, seconds in _losses(span, rows[span.row]):
            lost[cause][span.node_rank] += seconds
    everything = sum(whole.values())
    wasted = []
    for cause, by_node in lost.items():
        # Omit nodes with a negligible loss, so that their time does not dilute the share.
        named = sorted(rank for rank, own in by_node.items() if own >= LEAST * whole[rank] > 0)
        if named and sum(by_node.values()) >= LEAST * everything:
            share = sum(by_node[rank] for rank in named) / sum(whole[rank] for rank in named)
            whose = f"node {named[0]}'s time" if len(named) == 1 else f"the time of nodes {ranks(named)}"
            wasted.append((-sum(by_node.values()), f"{percent(share)} of {whose}: {cause}"))
    return [sentence for _, sentence in sorted(wasted)[:most]]


def _losses(span: Span, row: RowTime) -> Iterable[tuple[str, float]]:
    """The time of a span that was not work, by cause."""
    name = span.phase_name
    if span.outcome == CUT_SHORT and row.cut_short:
        return [(f"{name}, which was aborted and restarted", span.seconds)]
    if span.outcome != PASSED:
        return []
    time = span.time
    coordination_s = min(row.coordination_s or 0.0, time.wait_s)
    whose = "the other nodes'" if row.last_rank == span.node_rank else f"node {row.last_rank}'s"
    return [
        (f"starting programs and engines for {name}", time.start_s),
        (f"loading for {name}", time.load_s),
        (f"saving the results of {name}", time.save_s),
        ("coordination: detecting that all nodes are done", coordination_s),
        (f"waiting for {whose} {name}", time.wait_s - coordination_s),
    ]
