"""The report: one self-contained HTML file without scripts or external resources, with light and dark mode.

Here is what it says; how it looks is in report.html.jinja, which escapes every value that comes from the run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import fsbarrier
from fsbarrier.protocol.session import shown as plain
from fsbarrier.protocol.wording import counted
from fsbarrier.rundir.journal import Event
from fsbarrier.rundir.phase_time import PARTS
from fsbarrier.settings.hidden import shown
from fsbarrier.settings.section import leaves
from fsbarrier.view import figures
from fsbarrier.view.amounts import amount, duration, one_line, percent
from fsbarrier.view.event_wording import event_text
from fsbarrier.view.report_charts import (
    NARROW,
    SMALL,
    WIDE,
    BarPiece,
    Series,
    line_chart,
    stacked_bars,
    timeline,
)
from fsbarrier.view.report_samples import samples
from fsbarrier.view.report_timelines import timelines
from fsbarrier.view.run_reader import RunReader
from fsbarrier.view.run_status import RunStatus
from fsbarrier.view.timings import IterationTime, row_times, together
from fsbarrier.view.wastes import parts_by_iteration, parts_by_phase, wastes

#: maximum numbers to show, newest first: iterations as bars, iterations in a table, events
BARS = 60
TABLE_ROWS = 200
EVENT_ROWS = 500
#: Phases below this share of the time are not listed in a legend.
LEAST_SHARE = 0.002
NOTHING = "–"
TEMPLATE = Path(__file__).with_name("report.html.jinja")


@dataclass(frozen=True, slots=True)
class Figures:
    """A table of texts; the columns in `left` are left-aligned."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: Collection[int] = (0,)


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart for a desk and for a phone, with its legend: (class in the style sheet, name)."""

    wide: str
    narrow: str
    legend: Sequence[tuple[str, str]] = ()


def page(reader: RunReader, status: RunStatus, *, iterations: int = 3, with_samples: bool = True) -> str:
    """The whole report. `iterations`: number of recent iterations with a timeline; `with_samples`: include some prompts and answers."""
    import jinja2

    finished = status.finished_times
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["line"] = one_line
    folder = Path(status.log_path)
    html = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        name=f"{folder.parent.name}/{folder.name}".lstrip("/"),
        status=status,
        facts=_facts(reader, status),
        tiles=_tiles(status, finished, reader),
        rewards=_rewards(reader, status),
        curves=_curves(reader),
        tables=_tables(reader, status, finished),
        samples=samples(reader.paths, status.iteration, status.run_id) if with_samples else [],
        times=_times(finished),
        shown_times=min(BARS, len(finished)),
        all_times=len(finished),
        wastes=_wastes(reader, finished),
        parts=_parts(reader, finished),
        timelines=_timelines(reader, status, iterations),
        coordination=_coordination(finished),
        one_clock=not finished or together(finished).exact,
        nodes=_nodes(status),
        events=_events(reader),
        settings=_settings(reader),
        digest=reader.record.settings_digest[:12],
        version=fsbarrier.__version__,
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
    )
    return re.sub(r"[\x00-\x09\x0b-\x1f\x7f]", "", html)


def _chart(draw: Callable[[int], str], legend: Sequence[tuple[str, str]] = ()) -> Chart:
    return Chart(draw(WIDE), draw(NARROW), legend)


# --- top --------------------------------------------------------------------------------------------------------------------


def _facts(reader: RunReader, status: RunStatus) -> str:
    record = reader.record
    of = f" of {status.iterations}" if status.iterations is not None else ""
    facts = [
        status.run_id,
        f"program {status.program}",
        counted(status.num_nodes, "node"),
        f"iteration {status.iteration}{of}",
        f"started {record.created} by {record.created_by}",
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
        clocks = "on one clock" if total.exact else "by the hosts' wall clocks"
        note = f"{duration(total.coordination_s / count)} per iteration, {clocks}"
        tiles.append(("coordination", percent(total.share), note))
    losses = len(reader.history.losses)
    tiles.append(("nodes lost", str(losses), ""))
    return tiles


# --- learning ---------------------------------------------------------------------------------------------------------------


def _label(reader: RunReader, iteration: int) -> str:
    """An iteration as people count them. The evaluation of a session's last policy belongs to no iteration: "end"."""
    evaluated = reader.history.reports("evaluated").get(iteration)
    final = evaluated is not None and evaluated.fields.get("final") is True
    return "end" if final and iteration not in reader.history.reports("rolled_out") else str(iteration)


def _rewards(reader: RunReader, status: RunStatus) -> Chart | None:
    train = [(float(one.iteration), one.train) for one in status.rewards if one.train is not None]
    test = [(float(one.iteration), one.test) for one in status.rewards if one.test is not None]
    curves = [Series("train reward", "train", train), Series("held-out reward", "test", test)]
    curves = [one for one in curves if one.points]
    if not curves:
        return None
    label = _label(reader, status.rewards[-1].iteration)
    last = label if label == "end" else ""
    return _chart(
        lambda width: line_chart(width, curves, "iteration", last=last, marks=_changes(reader)),
        [(one.style, one.name) for one in curves],
    )


def _changes(reader: RunReader) -> dict[int, str]:
    """Iteration -> the settings that changed there, by the sessions that began with others than the one before."""
    found: dict[int, list[str]] = {}
    now = reader.record.settings.flat()
    for event in sorted(reader.history.events, key=lambda one: one.generation):
        settings = event.fields.get("settings")
        for name, value in settings.items() if isinstance(settings, Mapping) else ():
            before, now[name] = now.get(name), value
            texts = [one_line(f"{name} {plain(before)} → {plain(value)}")] if before != value else []
            found[event.iteration] = found.get(event.iteration, []) + texts
    return {iteration: ", ".join(texts) for iteration, texts in found.items() if texts}


def _curves(reader: RunReader) -> list[tuple[str, str, str]]:
    """(title, newest value, chart) of each metric that is not always 0, each part of the reward, each further metric of evaluations."""
    rollouts, evaluations = (reader.history.reports(name).values() for name in ("rolled_out", "evaluated"))
    parts = [name for name in figures.rollout_columns(rollouts) if name.startswith(figures.PART)]
    sets = [
        name for name in figures.evaluation_figures(evaluations) if not name.endswith(("_se", "reward_mean"))
    ]
    found = []
    for event, name, title in (
        *figures.CURVES,
        *(("rolled_out", name, f"Reward: {name.removeprefix(figures.PART)}") for name in parts),
        *(("evaluated", name, f"Evaluation: {name}") for name in sets),
    ):
        reports = reader.history.reports(event).items()
        points = [
            (float(iteration), value)
            for iteration, report in reports
            if (value := report.number(name)) is not None
        ]
        if any(value for _, value in points):
            svg = line_chart(SMALL, [Series(title, "train", points)], "iteration")
            found.append((title, _figure(points[-1][1]), svg))
    return found


def _tables(reader: RunReader, status: RunStatus, finished: Sequence[IterationTime]) -> dict[str, Figures]:
    """The figures behind the curves, by the words that unfold them."""
    history = reader.history
    rollouts, updates = history.reports("rolled_out"), history.reports("updated")
    tables = {}
    if status.rewards:
        rewards = [
            (
                _label(reader, one.iteration),
                _value(one.policy_version),
                amount(one.train),
                amount(one.test),
                _value(one.trajectories),
            )
            for one in status.rewards[-TABLE_ROWS:]
        ]
        head = ("iteration", "policy version", "train", "held-out", "trajectories")
        tables["rewards"] = Figures(head, rewards)
    if columns := figures.rollout_columns(rollouts.values()):
        tables["rollouts"] = _figures_table(rollouts, columns)
    if evaluated := _evaluations(reader):
        tables["evaluations"] = evaluated
    if columns := figures.update_columns(updates.values()):
        tables["updates"] = _figures_table(updates, columns)
    return tables


def _figures_table(events: Mapping[int, Event], columns: Mapping[str, str]) -> Figures:
    """A row for each of the newest iterations. `columns`: metric name in the events -> column title."""
    rows = [
        (str(iteration), *(_figure(event.number(name)) for name in columns))
        for iteration, event in list(events.items())[-TABLE_ROWS:]
    ]
    return Figures(("iteration", *columns.values()), rows)


def _evaluations(reader: RunReader) -> Figures | None:
    """The evaluation metrics with standard errors, by set and by source if there are several."""
    evaluations = reader.history.reports("evaluated")
    columns = [name for name in figures.evaluation_figures(evaluations.values()) if not name.endswith("_se")]
    if not columns:
        return None
    rows = [
        (
            _label(reader, iteration),
            _value(event.integer("policy_version")),
            *(_with_error(event, name) for name in columns),
        )
        for iteration, event in list(evaluations.items())[-TABLE_ROWS:]
    ]
    return Figures(("iteration", "policy version", *columns), rows)


def _with_error(event: Event, name: str) -> str:
    value = event.number(name)
    error = event.number(f"{name.removesuffix('_mean')}_se")
    return amount(value) + (f" ± {amount(error)}" if value is not None and error is not None else "")


# --- time -------------------------------------------------------------------------------------------------------------------


def _times(finished: Sequence[IterationTime]) -> Chart | None:
    if not finished:
        return None
    shown = finished[-BARS:]
    bars = []
    for one in shown:
        parts = [BarPiece(f"p{index}", name, seconds) for (index, name), seconds in one.work.items()]
        parts.append(BarPiece("coordination", "coordination", one.coordination_s))
        bars.append((str(one.iteration), parts))
    total = together(shown)
    entries = [
        (f"p{index}", f"{name} {duration(seconds / len(shown))}")
        for (index, name), seconds in total.work.items()
        if seconds >= LEAST_SHARE * total.seconds
    ]
    entries.append(("coordination", f"coordination {duration(total.coordination_s / len(shown))}"))
    return _chart(lambda width: stacked_bars(width, bars, "iteration", cut_off=True), entries)


def _wastes(reader: RunReader, finished: Sequence[IterationTime]) -> list[str]:
    """The largest losses of time, in words."""
    shown = {one.iteration for one in finished[-BARS:]}
    spans = [span for span in reader.spans() if span.iteration in shown]
    return [one.sentence() for one in wastes(spans, row_times(spans))]


def _parts(reader: RunReader, finished: Sequence[IterationTime]) -> tuple[Chart, Figures] | None:
    """Each phase's time split into parts."""
    shown = {one.iteration for one in finished[-BARS:]}
    spans = [span for span in reader.spans() if span.iteration in shown]
    if not spans:
        return None
    names = {span.phase: one_line(span.phase_name) for span in spans}
    bars, rows = [], []
    for phase, time in parts_by_phase(parts_by_iteration(spans), shown).items():
        parts = time.parts()
        bars.append((str(phase), [BarPiece(part, part, seconds) for part, seconds in parts.items()]))
        rows.append((str(phase), names[phase], *(duration(seconds) for seconds in parts.values())))
    chart = _chart(lambda width: stacked_bars(width, bars, "phase"), [(part, part) for part in PARTS])
    return chart, Figures(("phase", "", *PARTS), rows, left=(0, 1))


def _timelines(reader: RunReader, status: RunStatus, newest: int) -> dict[str, object] | None:
    found, exact = timelines(reader, status, newest)
    if not found:
        return None
    blocks = {(block.style, block.name) for one in found for lane in one.lanes for block in lane.blocks}
    charts = []
    for one in found:
        title = f"iteration {one.iteration} by node"
        drawn = {width: timeline(width, one.lanes, one.seconds, title) for width in (WIDE, NARROW)}
        charts.append(
            (f"Iteration {one.iteration}: {duration(one.seconds)}", Chart(drawn[WIDE], drawn[NARROW]))
        )
    legend = sorted(blocks, key=lambda entry: int(entry[0].removeprefix("p")))
    return {"charts": charts, "legend": legend, "exact": exact}


def _coordination(finished: Sequence[IterationTime]) -> Figures | None:
    if not finished:
        return None
    rows = [
        (
            str(one.iteration),
            f"{one.seconds:.2f}",
            duration(one.coordination_s),
            percent(one.share),
            duration(one.cut_short_s) if one.cut_short_s else NOTHING,
        )
        for one in finished[-TABLE_ROWS:]
    ]
    return Figures(("iteration", "seconds", "coordination", "share", "cut short"), rows)


# --- tables -----------------------------------------------------------------------------------------------------------------


def _nodes(status: RunStatus) -> Figures:
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
    return Figures(("node", "host", "process", "start", "state", "logs"), rows, left=(0, 1, 4, 5))


def _events(reader: RunReader) -> tuple[Figures, int] | None:
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
    return Figures(("time (UTC)", "generation", "by node", "event"), rows, left=(0, 3)), len(worded)


def _settings(reader: RunReader) -> Figures:
    values = leaves(shown(reader.settings.as_json()))
    return Figures(("setting", "value"), [(key, _value(value)) for key, value in values], left=(0, 1))


def _figure(value: float | None) -> str:
    if value is None:
        return NOTHING
    return f"{value:.0f}" if value == int(value) and abs(value) < 1e6 else f"{value:.3g}"


def _value(value: object) -> str:
    if value is None:
        return NOTHING
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
