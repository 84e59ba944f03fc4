"""Finds the largest losses of the nodes' time, by its parts (start, load, work, save, wait). Pure.

A node's waiting time in a row has two parts: it waits for the row's last member until that one is done, and the rest is coordination.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from fsbarrier.view.amounts import percent, ranks
from fsbarrier.view.timings import CUT_SHORT, PASSED, RowTime, Span, row_times

#: causes with a smaller share of the time are not reported
LEAST = 0.01


def wastes(spans: Iterable[Span], most: int = 3) -> list[str]:
    """The largest losses first, such as "42 % of node 2's time: waiting for node 0's update"."""
    spans = [*spans]
    rows = {(row.generation, row.iteration, row.phase): row for row in row_times(spans)}
    whole: dict[int, float] = defaultdict(float)
    lost: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for span in spans:
        whole[span.node_rank] += span.seconds
        for cause, seconds in _losses(span, rows[span.row]):
            lost[cause][span.node_rank] += seconds
    everything = sum(whole.values())
    found = []
    for cause, by_node in lost.items():
        # Omit nodes with a negligible loss, so that their time does not dilute the share.
        named = sorted(rank for rank, own in by_node.items() if own >= LEAST * whole[rank] > 0)
        if named and sum(by_node.values()) >= LEAST * everything:
            share = sum(by_node[rank] for rank in named) / sum(whole[rank] for rank in named)
            whose = f"node {named[0]}'s time" if len(named) == 1 else f"the time of nodes {ranks(named)}"
            found.append((-sum(by_node.values()), f"{percent(share)} of {whose}: {cause}"))
    return [sentence for _, sentence in sorted(found)[:most]]


def _losses(span: Span, row: RowTime) -> Iterable[tuple[str, float]]:
    """A span's time other than work, by cause."""
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
