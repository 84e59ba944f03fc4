"""The report's timelines of recent iterations: when each node worked, waited or was lost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fsbarrier.view.amounts import one_line
from fsbarrier.view.history import FoundLoss
from fsbarrier.view.report_charts import Block, Lane
from fsbarrier.view.run_reader import RunReader
from fsbarrier.view.run_status import RunStatus
from fsbarrier.view.timings import PASSED, Span

#: maximum number of nodes in a timeline
LANES = 64


@dataclass(frozen=True, slots=True)
class Timeline:
    """One iteration, node by node. `seconds`: its duration."""

    iteration: int
    seconds: float
    lanes: Sequence[Lane]


def timelines(reader: RunReader, status: RunStatus, newest: int) -> tuple[list[Timeline], bool]:
    """The timelines of the `newest` iterations, and of the last two in which a node was lost; and whether all are on one clock."""
    losses = reader.history.losses
    known = {one.iteration for one in status.times} | {status.iteration}
    spans_of: dict[int, list[Span]] = defaultdict(list)
    for span in reader.spans():
        if span.iteration in known:
            spans_of[span.iteration].append(span)
    found, exact = [], True
    for iteration in _chosen(spans_of, losses, newest):
        spans = spans_of[iteration]
        one_clock = len({span.clock for span in spans}) == 1
        lanes, seconds = _lanes(spans, losses, one_clock)
        if lanes and seconds > 0:
            found.append(Timeline(iteration, seconds, lanes[:LANES]))
            exact = exact and one_clock
    return found, exact


def _chosen(spans_of: Mapping[int, Sequence[Span]], losses: Sequence[FoundLoss], newest: int) -> list[int]:
    """The newest iterations, preceded by the last two in which a node was lost."""
    if newest <= 0 or not spans_of:
        return []
    begins = {iteration: min(span.began_at for span in spans) for iteration, spans in spans_of.items()}
    last = sorted(begins)[-newest:]
    lost_in = {max((i for i in begins if begins[i] <= loss.at), default=last[0]) for loss in losses}
    return [*sorted(lost_in.difference(last))[-2:], *last]


def _lanes(spans: Sequence[Span], losses: Sequence[FoundLoss], one_clock: bool) -> tuple[list[Lane], float]:
    """One iteration's lanes and duration. Nodes on one host are aligned by its monotonic clock, others by their wall clocks."""
    offsets = [0.0 if one_clock else span.wall_offset for span in spans]
    begin = min(span.began_s + offset for span, offset in zip(spans, offsets, strict=True))
    end = max(span.ended_s + offset for span, offset in zip(spans, offsets, strict=True))
    began_at = min(span.began_at for span in spans)
    lanes = []
    for rank in sorted({span.node_rank for span in spans}):
        own = [pair for pair in zip(spans, offsets, strict=True) if pair[0].node_rank == rank]
        own.sort(key=lambda pair: pair[0].began_at)
        blocks = [_block(span, offset - begin) for span, offset in own]
        marks = []
        for loss in losses:
            before = [number for number, (span, _) in enumerate(own) if span.generation <= loss.generation]
            here = loss.node_rank == rank and began_at <= loss.at <= began_at + end - begin + 1.0
            if here and before:
                last = blocks[before[-1]]
                gone = last.end if loss.seen_at is None else max(last.end, loss.seen_at - began_at)
                # A killed node's journal ends with its last event, but the node lived slightly longer, so extend its last block.
                if last.cut:
                    done = gone if last.done >= last.end else last.done
                    blocks[before[-1]] = replace(last, done=done, end=gone)
                marks.append((gone, f"node {rank} is lost: {loss.why}"))
        lanes.append(Lane(f"node {rank}", blocks, marks))
    return lanes, end - begin


def _block(span: Span, offset: float) -> Block:
    begin, end = span.began_s + offset, span.ended_s + offset
    done = span.done_s + offset if span.done_s is not None else end
    cut = span.outcome != PASSED or span.failed
    return Block(begin, max(begin, min(done, end)), end, f"p{span.phase}", one_line(span.phase_name), cut)
