"""Splits the nodes' time into parts (start, load, work, save, wait) and finds the largest losses. Pure.

A node's waiting time in a row has two parts: it waits for the row's last member until that one is done, and the rest is coordination.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from fsbarrier.rundir.phase_time import PhaseTime
from fsbarrier.view.amounts import percent, ranks
from fsbarrier.view.timings import CUT_SHORT, PASSED, RowTime, Span

#: causes with a smaller share of the time are not reported
LEAST = 0.01


@dataclass(frozen=True, slots=True)
class Cause:
    """A cause of lost time. `kind`: start, load, save, wait, coordination or cut short; `for_rank`: the node that was waited for."""

    kind: str
    phase_name: str = ""
    for_rank: int | None = None


@dataclass(frozen=True, slots=True)
class Waste:
    """Total seconds that some nodes lost for one cause; `share`: of these nodes' time, 0 to 1."""

    cause: Cause
    node_ranks: tuple[int, ...]
    seconds: float
    share: float

    def sentence(self) -> str:
        """42 % of node 2's time: waiting for node 0's update"""
        one = len(self.node_ranks) == 1
        nodes = f"node {self.node_ranks[0]}'s" if one else f"the time of nodes {ranks(self.node_ranks)}"
        return f"{percent(self.share)} of {nodes}{' time' if one else ''}: {_what(self.cause)}"


def _what(cause: Cause) -> str:
    match cause.kind:
        case "wait" if cause.for_rank is None:
            return f"waiting for the other nodes' {cause.phase_name}"
        case "wait":
            return f"waiting for node {cause.for_rank}'s {cause.phase_name}"
        case "start":
            return f"starting programs and engines for {cause.phase_name}"
        case "load":
            return f"loading for {cause.phase_name}"
        case "save":
            return f"saving the results of {cause.phase_name}"
        case "cut short":
            return f"{cause.phase_name}, which was aborted and restarted"
        case _:
            return "coordination: detecting that all nodes are done"


def wastes(spans: Iterable[Span], rows: Iterable[RowTime], most: int = 3) -> list[Waste]:
    """The largest losses first. Ignores spans whose row is not in `rows`."""
    known = {(row.generation, row.iteration, row.phase): row for row in rows}
    whole: dict[int, float] = defaultdict(float)
    lost: dict[Cause, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for span in spans:
        row = known.get(span.row)
        if row is None:
            continue
        whole[span.node_rank] += span.seconds
        for cause, seconds in _losses(span, row):
            lost[cause][span.node_rank] += seconds
    everything = sum(whole.values())
    found = []
    for cause, by_node in lost.items():
        seconds = sum(by_node.values())
        if seconds >= LEAST * everything > 0:
            # Omit nodes with a negligible loss, so that their time does not dilute the share.
            named = sorted(rank for rank, own in by_node.items() if own >= LEAST * whole[rank])
            of_these = sum(by_node[rank] for rank in named)
            if named:
                share = of_these / sum(whole[rank] for rank in named)
                found.append(Waste(cause, tuple(named), seconds, share))
    return sorted(found, key=lambda waste: (-waste.seconds, waste.sentence()))[:most]


def _losses(span: Span, row: RowTime) -> Iterable[tuple[Cause, float]]:
    """A span's time other than work, by cause."""
    name = span.phase_name
    if span.outcome == CUT_SHORT and row.cut_short:
        return [(Cause("cut short", name), span.seconds)]
    if span.outcome != PASSED:
        return []
    time = span.time
    coordination_s = min(row.coordination_s or 0.0, time.wait_s)
    for_rank = None if row.last_rank == span.node_rank else row.last_rank
    return [
        (Cause("start", name), time.start_s),
        (Cause("load", name), time.load_s),
        (Cause("save", name), time.save_s),
        (Cause("coordination"), coordination_s),
        (Cause("wait", name, for_rank), time.wait_s - coordination_s),
    ]


# --- the parts ------------------------------------------------------------------------------------------------------------


def parts_by_iteration(spans: Iterable[Span]) -> dict[tuple[int, int], PhaseTime]:
    """(iteration, phase) -> the parts of the time, averaged over the nodes that passed it."""
    sums: dict[tuple[int, int], PhaseTime] = defaultdict(PhaseTime)
    nodes: dict[tuple[int, int], set[int]] = defaultdict(set)
    for span in spans:
        if span.outcome == PASSED:
            key = span.iteration, span.phase
            sums[key] = sums[key].plus(span.time)
            nodes[key].add(span.node_rank)
    return {key: time.divided(len(nodes[key])) for key, time in sums.items()}


def parts_by_phase(
    by_iteration: Mapping[tuple[int, int], PhaseTime], iterations: Collection[int]
) -> dict[int, PhaseTime]:
    """phase -> the parts of a node's time, averaged over these iterations."""
    sums: dict[int, PhaseTime] = defaultdict(PhaseTime)
    for (iteration, phase), time in sorted(by_iteration.items()):
        if iteration in iterations:
            sums[phase] = sums[phase].plus(time)
    return {phase: time.divided(len(iterations)) for phase, time in sorted(sums.items())}
