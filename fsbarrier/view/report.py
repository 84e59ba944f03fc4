"""The report: one self-contained HTML file without scripts or external resources, with light and dark mode.

This module computes the contents; report.html.jinja has the layout, and escapes every value that comes from the run. `--csv` writes tables
of all figures.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from statistics import median

import fsbarrier
from fsbarrier.settings.secrecy import shown
from fsbarrier.settings.section import leaves
from fsbarrier.view.event_wording import event_text
from fsbarrier.view.report_formats import Row, iteration_rows
from fsbarrier.view.report_samples import samples
from fsbarrier.view.run_reader import RunReader
from fsbarrier.view.run_status import RunStatus
from fsbarrier.view.timings import IterationTime, together, wastes
from fsbarrier.wording import amount, counted, duration, one_line, percent, setting_text, short

#: maximum numbers to show, newest first: iterations as bars, events
BARS = 30
EVENT_ROWS = 500
#: maximum interruptions to show, the longest first
INTERRUPTIONS = 5
#: Phases below this share of the time are not listed in a legend.
LEAST_SHARE = 0.002
#: A bar longer than this multiple of the median is cut off at the page's edge, so that the others stay visible. Its value is beside it.
OUTLIER = 3.0
#: prefixes of the table columns that get curves: metrics of rollouts, evaluations, batches and updates
MEASURED = ("rollout_", "eval_", "batch_", "update_")
TEMPLATE = Path(__file__).with_name("report.html.jinja")


#: A curve's size in SVG units. It is drawn at about this size, on a desk and on a phone, so that its letters can be read.
WIDTH, HEIGHT = 330, 190
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 14, 34
MOST_POINTS = 600
#: draw a dot for each point up to this many points
FEW = 60


@dataclass(frozen=True, slots=True)
class Series:
    """A curve: its name, its class in the style sheet, its points in order of x."""

    name: str
    style: str
    points: Sequence[tuple[float, float]]


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


def page(reader: RunReader, status: RunStatus, *, with_samples: bool = True) -> str:
    """The whole report. `with_samples`: include some prompts and answers."""
    import jinja2

    finished = status.finished_times
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["line"] = one_line
    folder = Path(status.log_path)
    shown_times = finished[-BARS:]
    barred = {timing.iteration for timing in shown_times}
    spans = [span for span in reader.spans() if span.iteration in barred]
    html = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        name=f"{folder.parent.name}/{folder.name}".lstrip("/"),
        status=status,
        facts=_facts(reader, status),
        tiles=tiles(status, finished, reader),
        curves=_curves(reader, status),
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


# --- learning ---------------------------------------------------------------------------------------------------------------


def _curves(reader: RunReader, status: RunStatus) -> list[tuple[str, str, str]]:
    """(title, newest value, chart) of the rewards, and of each metric that is not always 0, by its name in the table.

    The evaluation of a session's last policy counts for the iteration that would begin with it.
    """
    rows, curves = iteration_rows(reader, status), []
    columns = [*next(iter(rows.values()), {})]
    metrics = [
        column for column in columns if column.startswith(MEASURED) and not column.endswith(("_se", "_s"))
    ]
    rewards = {"train": "train_reward", "held-out": "test_reward"}
    for title, named in {"reward": rewards, **{metric: {metric: metric} for metric in metrics}}.items():
        series = [
            Series(name, "test" if column.startswith(("test", "eval")) else "train", points)
            for name, column in named.items()
            if (points := _points(rows, column))
        ]
        if any(value for line in series for _, value in line.points):
            newest = ", ".join(
                f"{line.name} " * (len(series) > 1) + f"{_newest(line.points[-1][1])}" for line in series
            )
            error = "eval_reward_se" if named is rewards else f"{title}_se"
            if deviations := _points(rows, error):
                newest += f" ± {amount(deviations[-1][1])}"
            curves.append((title.replace("_", " "), newest, line_chart(series)))
    return curves


def _newest(value: float) -> str:
    """Format with three digits, and large numbers in full: 0.123, 15,500."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _points(rows: Mapping[int, Row], column: str) -> list[tuple[float, float]]:
    points = ((float(iteration), row.get(column)) for iteration, row in rows.items())
    return [(iteration, value) for iteration, value in points if isinstance(value, int | float)]


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


# --- charts: curves as inline SVG, bars as widths in per cent. Colours come from the page's style sheet. ------------------------


def piece(style: str, name: str, begin_s: float, seconds: float, whole_s: float) -> Piece:
    """A segment of a bar that stands for `whole_s` seconds and ends with them."""
    begin = min(100.0, 100 * begin_s / whole_s)
    width = min(100.0 - begin, 100 * seconds / whole_s)
    return style, f"{name} {duration(seconds)}", round(begin, 3), round(width, 3)


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round axis values that cover `low` to `high`."""
    span = high - low if high > low else abs(high) or 1.0
    raw = span / about
    scale = 10.0 ** math.floor(math.log10(raw))
    step = next(scale * factor for factor in (1, 2, 2.5, 5, 10) if scale * factor >= raw * 0.999)
    first = math.floor(low / step + 1e-9)
    last = max(first + 1, math.ceil(high / step - 1e-9))
    # Use as many digits as the step needs, which may be as small as a learning rate.
    digits = max(0, 2 - math.floor(math.log10(step)))
    return [round(number * step, digits) for number in range(first, last + 1)]


def line_chart(series: Sequence[Series]) -> str:
    """A line chart over iterations."""
    points = [point for line in series for point in line.points]
    low, high = min(y for _, y in points), max(y for _, y in points)
    if 0 <= low <= 0.6 * high or low == high > 0:
        low = 0.0
    y_ticks = ticks(low, high, 3)
    x_low, x_high = min(x for x, _ in points), max(x for x, _ in points)
    margin = 0.02 * (x_high - x_low) or 0.5

    def x_of(x: float) -> float:
        return LEFT + (x - x_low + margin) / (x_high - x_low + 2 * margin) * (WIDTH - LEFT - RIGHT)

    def y_of(y: float) -> float:
        return TOP + (y_ticks[-1] - y) / (y_ticks[-1] - y_ticks[0]) * (HEIGHT - TOP - BOTTOM)

    body = []

    def write(x: float, y: float, text: str, anchor: str = "middle") -> None:
        body.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>')

    for y in y_ticks:
        body.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y_of(y):.1f}" y2="{y_of(y):.1f}"/>'
        )
        write(LEFT - 6, y_of(y) + 4, short(y) if abs(y) >= 1000 else f"{y:g}", "end")
    for x in ticks(x_low, x_high, 4):
        if x == int(x) and x_low <= x <= x_high:
            write(x_of(x), HEIGHT - BOTTOM + 16, f"{x:g}")
    write((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 3, "iteration")
    for line in series:
        stride = max(1, math.ceil(len(line.points) / MOST_POINTS))
        path = " ".join(
            f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in [*line.points[:-1:stride], line.points[-1]]
        )
        body.append(f'<polyline class="curve {line.style}" points="{path}"/>')
        for x, y in line.points if len(line.points) <= FEW else ():
            title = f"<title>{escape(line.name)} {_newest(y)} ({x:g})</title>"
            at = f'cx="{x_of(x):.1f}" cy="{y_of(y):.1f}"'
            body.append(f'<circle class="dot {line.style}" {at} r="3">{title}</circle>')
    label = escape(f"{' and '.join(line.name for line in series)} by iteration", quote=True)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(body)}</svg>'
