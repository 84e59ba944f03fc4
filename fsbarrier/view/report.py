"""A run's figures as one HTML file to read and to send: no script, nothing loaded from elsewhere, light and dark."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from html import escape

import fsbarrier
from fsbarrier.settings.sources import flatten
from fsbarrier.view import phases
from fsbarrier.view.amounts import amount, duration, one_line, percent
from fsbarrier.view.event_wording import event_text
from fsbarrier.view.report_charts import Block, Lane, Part, Series, line_chart, stacked_bars, timeline
from fsbarrier.view.report_style import STYLE
from fsbarrier.view.run_reader import RunReader
from fsbarrier.view.run_status import RunStatus
from fsbarrier.view.timings import CUT_SHORT, OPEN, IterationTime, Span, phase_totals

#: How much is shown at most, of the newest: iterations as bars and in tables, events, nodes in a timeline.
BARS = 60
TABLE_ROWS = 200
EVENT_ROWS = 500
LANES = 64
#: Phases below this share of the time are left out of a legend.
LEAST_SHARE = 0.002

UPDATE_COLUMNS = {
    "loss": "loss",
    "logprob_gap_mean": "log-prob gap, mean",
    "logprob_gap_max": "max",
    "clip_fraction": "clipped",
    "grad_norm": "gradient norm",
    "optimizer_steps": "steps",
    "seconds": "seconds",
}


def page(reader: RunReader, status: RunStatus, *, iterations: int = 3) -> str:
    """The whole report. `iterations`: how many newest ones get a timeline."""
    finished = status.finished_times
    sections = [
        _head(reader, status),
        _tiles(status, finished, reader),
        _problems(status),
        _section("Mean reward by iteration", _rewards(status)),
        _section("Where the time goes", _times(finished)),
        _section("The last iterations, node by node", _timelines(reader, status, iterations)),
        _section("Coordination", _coordination(finished)),
        _section("Updates", _updates(reader)),
        _section("Nodes", _nodes(status)),
        _section("What happened", _events(reader)),
        _section("Settings", _settings(reader)),
    ]
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    title = escape(f"fsbarrier run {status.run_id}")
    html = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{title}</title><style>{STYLE}</style></head><body><main>"
        + "\n".join(section for section in sections if section)
        + f"<footer>made by fsbarrier {escape(fsbarrier.__version__)} on {made} from "
        f"<code>{escape(status.log_path)}</code></footer></main></body></html>\n"
    )
    return re.sub(r"[\x00-\x09\x0b-\x1f\x7f]", "", html)


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>" if body else ""


def _table(head: Sequence[str], body: Iterable[Sequence[str]], left: Sequence[int] = ()) -> str:
    """A table of texts that are escaped here; columns in `left` are no numbers."""

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=left' if index in left else ''}>{escape(one_line(cell))}</{tag}>"
            for index, cell in enumerate(row)
        )

    listed = "".join(f"<tr>{cells('td', row)}</tr>" for row in body)
    return f'<div class="scroll"><table><thead><tr>{cells("th", head)}</tr></thead><tbody>{listed}</tbody></table></div>'


def _legend(entries: Iterable[tuple[str, str]]) -> str:
    listed = "".join(f'<li><i class="{style}"></i>{escape(name)}</li>' for style, name in entries)
    return f'<ul class="legend">{listed}</ul>'


def _chart(svg: str) -> str:
    return f'<div class="scroll chart">{svg}</div>' if svg else ""


# --- top --------------------------------------------------------------------------------------------------------------------


def _head(reader: RunReader, status: RunStatus) -> str:
    record = reader.record
    of = f" of {status.iterations}" if status.iterations is not None else ""
    facts = [
        f"program {status.program}",
        f"{status.num_nodes} node{'s' if status.num_nodes != 1 else ''}",
        f"iteration {status.iteration}{of}",
        f"begun {record.created} by {record.created_by}",
        *([f"model {record.model}"] if record.model else []),
    ]
    return (
        f'<header><h1>{escape(status.run_id)} <span class="state {escape(status.state)}">{escape(status.state)}</span></h1>'
        f"<p>{escape(one_line(' · '.join(facts)))}</p></header>"
    )


def _tiles(status: RunStatus, finished: Sequence[IterationTime], reader: RunReader) -> str:
    tiles = []
    for name, values in (
        ("held-out reward", [r.test for r in status.rewards if r.test is not None]),
        ("train reward", [r.train for r in status.rewards if r.train is not None]),
    ):
        if values:
            first = f"{amount(values[0])} → " if len(values) > 1 else ""
            tiles.append((name, f"{first}{amount(values[-1])}", f"best {amount(max(values))}"))
    if finished:
        seconds = sum(one.seconds for one in finished)
        coordination = sum(one.coordination_s for one in finished)
        count = len(finished)
        tiles.append(("an iteration", duration(seconds / count), f"mean of {count}"))
        note = "by one clock" if all(one.exact for one in finished) else "by the hosts' wall clocks"
        share = percent(coordination / seconds if seconds else 0.0)
        tiles.append(("coordination", share, f"{duration(coordination / count)} an iteration, {note}"))
    losses = len(reader.history.losses)
    generations = max(status.generation - 1, 0)
    tiles.append(("nodes lost", str(losses), f"{generations} regrouping{'s' if generations != 1 else ''}"))
    return '<div class="tiles">' + "".join(
        f"<div><small>{escape(name)}</small><b>{escape(value)}</b><small>{escape(note)}</small></div>"
        for name, value, note in tiles
    ) + "</div>"  # fmt: skip


def _problems(status: RunStatus) -> str:
    listed = "".join(
        f"<li{' class=said' if problem.startswith(' ') else ''}>{escape(one_line(problem))}</li>"
        for problem in status.problems
    )
    return f'<ul class="problems">{listed}</ul>' if listed else ""


# --- curves and times ---------------------------------------------------------------------------------------------------------


def _rewards(status: RunStatus) -> str:
    train = [(float(one.iteration), one.train) for one in status.rewards if one.train is not None]
    test = [(float(one.iteration), one.test) for one in status.rewards if one.test is not None]
    curves = [Series("train reward", "train", train), Series("held-out reward", "test", test)]
    curves = [one for one in curves if one.points]
    if not curves:
        return ""
    body = [
        (
            str(one.iteration),
            _value(one.policy_version),
            amount(one.train),
            amount(one.test),
            _value(one.trajectories),
        )
        for one in status.rewards[-TABLE_ROWS:]
    ]
    table = _table(("iteration", "policy version", "train", "held-out", "trajectories"), body)
    return (
        _legend((one.style, one.name) for one in curves)
        + _chart(line_chart(curves, "iteration"))
        + f"<details><summary>figures</summary>{table}</details>"
    )


def _times(finished: Sequence[IterationTime]) -> str:
    if not finished:
        return ""
    shown = finished[-BARS:]
    bars = []
    for one in shown:
        parts = [Part(f"p{index}", name, seconds) for (index, name), seconds in one.work.items()]
        parts.append(Part("coordination", "coordination", one.coordination_s))
        bars.append((str(one.iteration), parts))
    whole = sum(one.seconds for one in shown) or 1.0
    entries = [
        (f"p{index}", f"{name} {duration(seconds / len(shown))}")
        for (index, name), seconds in phase_totals(shown, work_only=True).items()
        if seconds / whole >= LEAST_SHARE
    ]
    mean = sum(one.coordination_s for one in shown) / len(shown)
    entries.append(("coordination", f"coordination {duration(mean)}"))
    hidden = f"<p>The last {len(shown)} of {len(finished)} iterations.</p>" if len(finished) > BARS else ""
    return hidden + _legend(entries) + _chart(stacked_bars(bars, "iteration"))


def _timelines(reader: RunReader, status: RunStatus, newest: int) -> str:
    by_iteration: dict[int, list[Span]] = defaultdict(list)
    for span in reader.spans():
        by_iteration[span.iteration].append(span)
    known = {one.iteration for one in status.times} | {status.iteration}
    chosen = _chosen([i for i in sorted(by_iteration) if i in known], by_iteration, reader, newest)
    charts, time_in, about = [], dict.fromkeys(range(phases.COUNT), 0.0), ""
    for iteration in chosen:
        spans = by_iteration[iteration]
        one_clock = len({span.clock for span in spans}) == 1
        lanes, seconds = _lanes(reader, spans, iteration, one_clock)
        chart = timeline(lanes[:LANES], seconds, f"iteration {iteration} by node")
        about = about if one_clock else " Hosts are aligned by their wall clocks."
        if chart:
            charts.append(f"<h3>Iteration {iteration}: {escape(duration(seconds))}</h3>{_chart(chart)}")
        for span in spans:
            time_in[span.phase] = time_in.get(span.phase, 0.0) + span.seconds
    if not charts:
        return ""
    whole = sum(time_in.values()) or 1.0
    names = [
        (f"p{index}", phases.phase_name(index))
        for index in range(phases.COUNT)
        if time_in[index] / whole >= LEAST_SHARE
    ]
    note = f"<p>Full colour: the node works; pale: it waits for the others; ✕: it was lost.{about}</p>"
    return note + _legend(names) + "".join(charts)


def _chosen(
    known: Sequence[int], spans: Mapping[int, Sequence[Span]], reader: RunReader, newest: int
) -> list[int]:
    """The newest iterations, and before them the last two in which a node was lost."""
    if newest <= 0:
        return []
    begins = {iteration: min(span.began_at for span in spans[iteration]) for iteration in known}
    lost_in = [
        max((i for i in known if begins[i] <= loss.at), default=None) for loss in reader.history.losses
    ]
    last = known[-newest:]
    troubled = sorted({i for i in lost_in if i is not None and i not in last})[-2:]
    return [*troubled, *last]


def _lanes(
    reader: RunReader, spans: Sequence[Span], iteration: int, one_clock: bool
) -> tuple[list[Lane], float]:
    def at(span: Span, mono_s: float) -> float:
        return mono_s if one_clock else mono_s + span.wall_offset

    begin = min(at(span, span.began_s) for span in spans)
    wall_begin = min(span.began_at for span in spans)
    seconds = max(at(span, span.ended_s) for span in spans) - begin
    losses = [loss for loss in reader.history.losses if wall_begin <= loss.at <= wall_begin + seconds + 1.0]
    lanes = []
    for rank in sorted({span.node_rank for span in spans}):
        own = sorted((span for span in spans if span.node_rank == rank), key=lambda span: span.began_at)
        blocks = [_block(span, at(span, 0.0) - begin) for span in own]
        marks = []
        for loss in losses:
            before = [n for n, span in enumerate(own) if span.generation <= loss.generation]
            if loss.node_rank == rank and before:
                last = blocks[before[-1]]
                seen = last.end if loss.seen_at is None else max(last.end, loss.seen_at - wall_begin)
                if last.cut:  # its journal ends here, its life a little later
                    blocks[before[-1]] = replace(
                        last, done=seen if last.done >= last.end else last.done, end=seen
                    )
                marks.append((seen, f"node {rank} is lost: {loss.why}"))
        lanes.append(Lane(f"node {rank}", blocks, marks))
    return lanes, seconds


def _block(span: Span, offset: float) -> Block:
    begin, end = span.began_s + offset, span.ended_s + offset
    done = span.done_s + offset if span.done_s is not None else end
    cut = span.outcome in (CUT_SHORT, OPEN) or span.failed
    return Block(begin, max(begin, min(done, end)), end, f"p{span.phase}", one_line(span.phase_name), cut)


def _coordination(finished: Sequence[IterationTime]) -> str:
    if not finished:
        return ""
    table = _table(
        ("iteration", "seconds", "coordination", "share", "cut short"),
        (
            (
                str(one.iteration),
                f"{one.seconds:.2f}",
                duration(one.coordination_s),
                percent(one.share),
                duration(one.cut_short_s) if one.cut_short_s else "–",
            )
            for one in finished[-TABLE_ROWS:]
        ),
    )
    exact = all(one.exact for one in finished)
    about = (
        "" if exact else " The nodes run on several hosts, so this is as exact as their wall clocks agree."
    )
    return (
        "<p>From the moment when the last node is done with its work to the moment when the last node has begun "
        f"the next phase, over all phases of an iteration.{about}</p>{table}"
    )


# --- tables -------------------------------------------------------------------------------------------------------------------


def _updates(reader: RunReader) -> str:
    updates = reader.history.updates()
    columns = {
        field: name
        for field, name in UPDATE_COLUMNS.items()
        if any(update.number(field) is not None for update in updates.values())
    }
    if not columns:
        return ""
    body = [
        (str(iteration), *(_figure(update.number(field)) for field in columns))
        for iteration, update in list(updates.items())[-TABLE_ROWS:]
    ]
    return _table(("iteration", *columns.values()), body)


def _nodes(status: RunStatus) -> str:
    return _table(
        ("node", "host", "process", "start", "state", "logs"),
        (
            (
                f"{node.node_rank}{' (leader)' if node.node_rank == status.leader else ''}",
                node.host or "–",
                _value(node.pid),
                _value(node.incarnation),
                node.state,
                node.logs or "–",
            )
            for node in status.nodes
        ),
        left=(0, 1, 4, 5),
    )


def _events(reader: RunReader) -> str:
    worded = [(event, text) for event in reader.history.newest_events() if (text := event_text(event))]
    if not worded:
        return ""
    body = [
        (
            datetime.fromtimestamp(event.at, UTC).strftime("%Y-%m-%d %H:%M:%S"),
            str(event.generation),
            str(event.node_rank),
            text,
        )
        for event, text in worded[-EVENT_ROWS:]
    ]
    hidden = f"<p>The newest {EVENT_ROWS} of {len(worded)}.</p>" if len(worded) > EVENT_ROWS else ""
    return hidden + _table(("time (UTC)", "generation", "told by node", "event"), body, left=(0, 3))


def _settings(reader: RunReader) -> str:
    body = [(key, _value(value)) for key, value in flatten(reader.record.settings_json, ()).items()]
    table = _table(("setting", "value"), body, left=(0, 1))
    digest = escape(reader.record.settings_digest[:12])
    return f"<details><summary>{len(body)} settings (digest {digest})</summary>{table}</details>"


def _value(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _figure(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.0f}" if value == int(value) and abs(value) < 1e6 else f"{value:.3g}"
