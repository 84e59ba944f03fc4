"""The report: one self-contained HTML file without scripts or external resources, with light and dark mode.

This module computes the contents; report.html.jinja has the layout, and escapes every value that comes from the run. `--csv` writes tables
of all figures.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import fsbarrier
from fsbarrier.settings.secrecy import shown
from fsbarrier.settings.section import leaves
from fsbarrier.view.event_wording import event_text
from fsbarrier.view.history import Draws
from fsbarrier.view.report_curves import curves
from fsbarrier.view.report_formats import iteration_rows
from fsbarrier.view.report_samples import samples
from fsbarrier.view.run_reader import RunReader
from fsbarrier.view.run_status import RunStatus
from fsbarrier.view.terminal_lines import draws_text
from fsbarrier.view.timings import IterationTime, together, wastes
from fsbarrier.wording import amount, counted, duration, one_line, percent, setting_text

#: maximum numbers to show, newest first: iterations as bars, events
BARS = 30
EVENT_ROWS = 500
#: charts that are shown at once; the others unfold
FIRST_CURVES = 8
#: maximum interruptions to show, the longest first
INTERRUPTIONS = 5
#: Phases below this share of the time are not listed in a legend.
LEAST_SHARE = 0.002
#: A bar longer than this multiple of the median is cut off at the page's edge, so that the others stay visible. Its value is beside it.
OUTLIER = 3.0
TEMPLATE = Path(__file__).with_name("report.html.jinja")

#: a segment of a bar: its class, its tooltip, its beginning and width in per cent of the bar
Piece = tuple[str, str, float, float]
#: a bar's label, its segments, its value
Bar = tuple[str, list[Piece], str]


@dataclass(frozen=True, slots=True)
class Table:
    """A table of texts; the columns in `left` are left-aligned."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: Collection[int] = (0,)


#: a run's reader and its status
Run = tuple[RunReader, RunStatus]


def page(
    reader: RunReader, status: RunStatus, *, with_samples: bool = True, compared: Run | None = None
) -> str:
    """The whole report. `with_samples`: include some prompts and answers. `compared`: a second run, whose curves and settings are shown
    beside those of the first one."""
    import jinja2

    finished = status.finished_times
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["line"] = one_line
    other = {_named(compared[1]): iteration_rows(*compared)} if compared is not None else {}
    shown_times = finished[-BARS:]
    barred = {timing.iteration for timing in shown_times}
    spans = [span for span in reader.spans() if span.iteration in barred]
    html = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        name=_named(status),
        status=status,
        facts=_facts(reader, status),
        tiles=tiles(status, finished, reader),
        curves=curves({_named(status, compared): iteration_rows(reader, status), **other}),
        first_curves=FIRST_CURVES,
        compared=_difference(reader, *compared) if compared is not None else None,
        draws=_draws(status.draws) if status.draws is not None else None,
        samples=samples(reader.paths, status.iteration) if with_samples else [],
        phases=_legend(shown_times),
        times=_times(shown_times),
        all_times=len(finished),
        wastes=wastes(spans)
        + [
            f"{duration(interruption.cost_s)} before generation {interruption.generation}: {interruption.reason or 'unknown reason'}"
            for interruption in status.interruptions[:INTERRUPTIONS]
        ],
        events=_events(reader),
        settings=_settings(reader),
        digest=reader.record.settings_digest[:12],
        version=fsbarrier.__version__,
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
    )
    return re.sub(r"[\x00-\x09\x0b-\x1f\x7f]", "", html)


def _named(status: RunStatus, other: Run | None = None) -> str:
    """A run by its folder and the folder of that; with the run's id if that is also the name of `other`."""
    folder = Path(status.log_path)
    name = f"{folder.parent.name}/{folder.name}".lstrip("/")
    return f"{name} {status.run_id}" if other is not None and _named(other[1]) == name else name


# --- top --------------------------------------------------------------------------------------------------------------------


def _facts(reader: RunReader, status: RunStatus) -> str:
    record = reader.record
    of = f" of {status.iterations}" if status.iterations is not None else ""
    facts = [
        status.run_id,
        f"program {status.program}",
        counted(status.num_nodes, "node"),
        f"iteration {status.iteration}{of}",
        f"started {record.created[:16].replace('T', ' ')} UTC by {record.created_by}",
        *([f"model {record.model}"] if record.model else []),
    ]
    return one_line(" · ".join(facts))


def tiles(
    status: RunStatus, finished: Sequence[IterationTime], reader: RunReader
) -> list[tuple[str, str, str]]:
    """(name, value, note)"""
    tiles = []
    for name, values in (
        ("held-out reward", [r.test for r in status.rewards if r.test is not None]),
        ("train reward", [r.train for r in status.rewards if r.train is not None]),
    ):
        if values:
            first = f"{amount(values[0])} → " if len(values) > 1 else ""
            tiles.append((name, f"{first}{amount(values[-1])}", f"best {amount(max(values))}"))
    if finished:
        total, count = together(finished), len(finished)
        tiles.append(("time per iteration", duration(total.seconds / count), f"mean of {count}"))
        mean = duration(total.coordination_s / count)
        tiles.append(("coordination", percent(total.share), f"{mean} per iteration, by the nodes' clocks"))
    if status.goodput is not None:
        lost = duration(sum(interruption.cost_s for interruption in status.interruptions))
        note = f"{lost} lost by {counted(len(status.interruptions), 'interruption')}"
        tiles.append(("goodput", amount(status.goodput), note if status.interruptions else ""))
    tiles.append(("nodes lost", str(len(reader.history.losses)), ""))
    return tiles


# --- tasks ------------------------------------------------------------------------------------------------------------------


def _draws(draws: Draws) -> tuple[str, Table]:
    """What became of the drawn tasks, in a sentence and by how often they were drawn and finished."""
    rows = [tuple(str(number) for number in row) for row in draws.counts]
    return draws_text(draws), Table(("times drawn", "times trained", "tasks"), rows, left=())


# --- time -------------------------------------------------------------------------------------------------------------------


def _legend(times: Sequence[IterationTime]) -> list[tuple[str, str]]:
    """(class, phase and its mean time), without negligible phases."""
    total = together(times)
    return [
        (f"p{index}", f"{name} {duration(seconds / len(times))}")
        for (index, name), seconds in total.phases.items()
        if seconds >= LEAST_SHARE * total.seconds
    ]


def _times(times: Sequence[IterationTime]) -> list[Bar]:
    """A bar an iteration, made of its phases."""
    usual = [
        timing.seconds
        for timing in times
        if timing.seconds <= OUTLIER * median(each.seconds for each in times)
    ]
    longest = max(usual, default=0.0) or 1.0
    bars = list[Bar]()
    for timing in times:
        pieces: list[Piece] = []
        begin = 0.0
        for (index, name), seconds in timing.phases.items():
            pieces.append(piece(f"p{index}", name, begin, seconds, longest))
            begin += seconds
        bars.append((str(timing.iteration), pieces, duration(timing.seconds)))
    return bars


def piece(style: str, name: str, begin_s: float, seconds: float, whole_s: float) -> Piece:
    """A segment of a bar that stands for `whole_s` seconds and ends with them."""
    begin = min(100.0, 100 * begin_s / whole_s)
    width = min(100.0 - begin, 100 * seconds / whole_s)
    return style, f"{name} {duration(seconds)}", round(begin, 3), round(width, 3)


# --- tables -----------------------------------------------------------------------------------------------------------------


def _events(reader: RunReader) -> tuple[Table, int] | None:
    """The newest events, and how many there are."""
    worded = [(event, text) for event in reader.history.newest_events() if (text := event_text(event))]
    if not worded:
        return None
    rows = [
        (
            datetime.fromtimestamp(event.at, UTC).strftime("%Y-%m-%d %H:%M:%S"),
            str(event.generation),
            str(event.node_rank),
            text,
        )
        for event, text in worded[-EVENT_ROWS:]
    ]
    return Table(("time (UTC)", "generation", "by node", "event"), rows, left=(0, 3)), len(worded)


def _settings(reader: RunReader) -> Table:
    values = leaves(shown(reader.settings.as_json()))
    return Table(("setting", "value"), [(key, setting_text(value)) for key, value in values], left=(0, 1))


def _difference(reader: RunReader, other: RunReader, status: RunStatus) -> tuple[str, str, Table]:
    """The name and the state of a second run, and the settings in which it differs."""
    ours, theirs = (dict(leaves(shown(run.settings.as_json()))) for run in (reader, other))
    differ = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    rows = [
        (name, *(setting_text(values[name]) if name in values else "–" for values in (ours, theirs)))
        for name in differ
    ]
    return (
        _named(status),
        _facts(other, status),
        Table(("setting", "this run", "the other"), rows, left=(0, 1, 2)),
    )
