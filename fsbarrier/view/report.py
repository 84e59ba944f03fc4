"""The report: one self-contained HTML file without scripts or external resources, with light and dark mode.

Here is what it says; how it looks is in report.html.jinja, which escapes every value that comes from the run. Tables of all figures are
what `--csv` writes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import fsbarrier
from fsbarrier.protocol.wording import counted
from fsbarrier.settings.hidden import shown
from fsbarrier.settings.section import leaves
from fsbarrier.view.amounts import amount, duration, one_line, percent
from fsbarrier.view.event_wording import event_text
from fsbarrier.view.report_charts import Bar, Piece, Series, line_chart, piece
from fsbarrier.view.report_formats import Row, iteration_rows
from fsbarrier.view.report_samples import samples
from fsbarrier.view.run_reader import RunReader
from fsbarrier.view.run_status import RunStatus
from fsbarrier.view.timings import IterationTime, Span, together, wastes

#: maximum numbers to show, newest first: iterations as bars, events
BARS = 30
EVENT_ROWS = 500
#: maximum interruptions to show, the longest first
INTERRUPTIONS = 5
#: Phases below this share of the time are not listed in a legend.
LEAST_SHARE = 0.002
#: A bar this many times as long as the middle one ends with the page, so that the others can be seen. Its value stands beside it.
OUTLIER = 3.0
NOTHING = "–"
#: beginnings of the columns of the table that have curves: what rollouts, evaluations, batches and updates measure
MEASURED = ("rollout_", "eval_", "batch_", "update_")
TEMPLATE = Path(__file__).with_name("report.html.jinja")


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
    spans = _spans_of(reader, {one.iteration for one in finished[-BARS:]})
    html = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        name=f"{folder.parent.name}/{folder.name}".lstrip("/"),
        status=status,
        facts=_facts(reader, status),
        tiles=_tiles(status, finished, reader),
        curves=_curves(reader, status),
        samples=samples(reader.paths, status.iteration) if with_samples else [],
        phases=_legend(finished[-BARS:]),
        times=_times(finished[-BARS:]),
        all_times=len(finished),
        wastes=wastes(spans)
        + [
            f"{duration(one.cost_s)} before generation {one.generation}: {one.reason or 'unknown reason'}"
            for one in status.interruptions[:INTERRUPTIONS]
        ],
        nodes=_nodes(status),
        events=_events(reader),
        settings=_settings(reader),
        digest=reader.record.settings_digest[:12],
        version=fsbarrier.__version__,
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
    )
    return re.sub(r"[\x00-\x09\x0b-\x1f\x7f]", "", html)


def _spans_of(reader: RunReader, iterations: Collection[int]) -> list[Span]:
    return [span for span in reader.spans() if span.iteration in iterations]


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


def _tiles(
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
        lost = duration(sum(one.cost_s for one in status.interruptions))
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
    metrics = [one for one in columns if one.startswith(MEASURED) and not one.endswith(("_se", "_s"))]
    rewards = {"train": "train_reward", "held-out": "test_reward"}
    for title, named in {"reward": rewards, **{metric: {metric: metric} for metric in metrics}}.items():
        series = [
            Series(name, "test" if column.startswith(("test", "eval")) else "train", points)
            for name, column in named.items()
            if (points := _points(rows, column))
        ]
        if any(value for one in series for _, value in one.points):
            newest = ", ".join(
                f"{one.name} " * (len(series) > 1) + _figure(one.points[-1][1]) for one in series
            )
            error = "eval_reward_se" if named is rewards else f"{title}_se"
            if deviations := _points(rows, error):
                newest += f" ± {amount(deviations[-1][1])}"
            curves.append((title, newest, line_chart(series)))
    return curves


def _points(rows: Mapping[int, Row], column: str) -> list[tuple[float, float]]:
    found = ((float(iteration), row.get(column)) for iteration, row in rows.items())
    return [(iteration, value) for iteration, value in found if isinstance(value, int | float)]


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
    usual = [one.seconds for one in times if one.seconds <= OUTLIER * median(each.seconds for each in times)]
    longest = max(usual, default=0.0) or 1.0
    bars = []
    for one in times:
        pieces: list[Piece] = []
        begin = 0.0
        for (index, name), seconds in one.phases.items():
            pieces.append(piece(f"p{index}", name, begin, seconds, longest))
            begin += seconds
        bars.append(Bar(str(one.iteration), pieces, duration(one.seconds)))
    return bars


# --- tables -----------------------------------------------------------------------------------------------------------------


def _nodes(status: RunStatus) -> Table:
    rows = [
        (
            f"{node.node_rank}{' (leader)' if node.node_rank == status.leader else ''}",
            node.host or NOTHING,
            _value(node.pid),
            _value(node.incarnation),
            node.state,
            node.logs or NOTHING,
        )
        for node in status.nodes
    ]
    return Table(("node", "host", "process", "start", "state", "logs"), rows, left=(0, 1, 4, 5))


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
    return Table(("setting", "value"), [(key, _value(value)) for key, value in values], left=(0, 1))


def _figure(value: float) -> str:
    """A metric's newest value, as `amount` writes a reward."""
    if abs(value) >= 100 or value == int(value):
        return f"{value:.0f}" if abs(value) < 1e6 else f"{value:.3g}"
    return amount(value) if abs(value) >= 0.1 else f"{value:.2g}"


def _value(value: object) -> str:
    if value is None:
        return NOTHING
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
