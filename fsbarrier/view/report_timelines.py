"""The report's timelines of recent iterations: when each node worked, waited or was lost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape

from fsbarrier.view.amounts import duration, one_line
from fsbarrier.view.history import FoundLoss
from fsbarrier.view.html_pieces import LEAST_SHARE, chart, legend
from fsbarrier.view.report_charts import Block, Lane, timeline
from fsbarrier.view.run_reader import RunReader
from fsbarrier.view.run_status import RunStatus
from fsbarrier.view.timings import PASSED, Span

#: maximum number of nodes in a timeline
LANES = 64


def timelines(reader: RunReader, status: RunStatus, newest: int) -> str:
    """The timelines of the `newest` iterations, and of the last two in which a node was lost."""
    losses = reader.history.losses
    known = {one.iteration for one in status.times} | {status.iteration}
    spans_of: dict[int, list[Span]] = defaultdict(list)
    for span in reader.spans():
        if span.iteration in known:
            spans_of[span.iteration].append(span)
    charts, about = [], ""
    names, seconds_in = dict[int, str](), defaultdict[int, float](float)
    for iteration in _chosen(spans_of, losses, newest):
        spans = spans_of[iteration]
        one_clock = len({span.clock for span in spans}) == 1
        lanes, seconds = _lanes(spans, losses, one_clock)
        svg = timeline(lanes[:LANES], seconds, f"iteration {iteration} by node")
        if svg:
            charts.append(f"<h3>Iteration {iteration}: {escape(duration(seconds))}</h3>{chart(svg)}")
        if not one_clock:
            about = " Nodes on different hosts are aligned by their wall clocks."
        for span in spans:
            names.setdefault(span.phase, span.phase_name)
            seconds_in[span.phase] += span.seconds
    if not charts:
        return ""
    whole = sum(seconds_in.values()) or 1.0
    entries = [(f"p{i}", name) for i, name in sorted(names.items()) if seconds_in[i] / whole >= LEAST_SHARE]
    note = f"<p>Full colour: working; pale: waiting for other nodes; ✕: lost.{about}</p>"
    return note + legend(entries) + "".join(charts)


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
