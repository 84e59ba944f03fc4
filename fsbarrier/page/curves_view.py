"""Curves of everything that the trackers get, in words, with marks for what happened to the run."""

from __future__ import annotations

from asyncio import to_thread
from collections.abc import Mapping
from dataclasses import dataclass

from nicegui import Client, ui
from nicegui.events import EChartPointClickEventArguments

from fsbarrier.page.charts import Marks, curve
from fsbarrier.page.layout import link, page
from fsbarrier.page.metric_words import GROUPS, is_curve, words_of
from fsbarrier.page.open_runs import OpenRun
from fsbarrier.protocol.succession import RENEWED
from fsbarrier.view.report_formats import Row, iteration_rows
from fsbarrier.view.run_reader import RunReader
from fsbarrier.view.run_status import RunStatus
from fsbarrier.wording import setting_text, visible

LOOK_S = 5.0
SMOOTHINGS = {0.0: "as measured", 0.6: "smooth a little", 0.9: "smooth a lot"}
Points = list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Figures:
    """The columns of a run's table as points, and what happened at which iteration."""

    columns: Mapping[str, Points]
    marks: Marks


def figures(reader: RunReader, status: RunStatus) -> Figures:
    """What the curves show. A column that is always 0 is left out."""
    rows = iteration_rows(reader, status)
    names = [*next(iter(rows.values()), {})]
    columns = {name: points(rows, name) for name in names if is_curve(name)}
    kept = {name: found for name, found in columns.items() if any(y for _, y in found)}
    return Figures(kept, marks(reader))


def points(rows: Mapping[int, Row], column: str) -> Points:
    found = ((float(iteration), row.get(column)) for iteration, row in rows.items())
    return [(iteration, value) for iteration, value in found if isinstance(value, int | float)]


def marks(reader: RunReader) -> Marks:
    """Where a session began, a setting changed, or a node was lost."""
    happened: dict[tuple[float, str], None] = {}
    for event in reader.history.newest_events():
        if event.name == "node_lost":
            happened[event.iteration, "a node was lost"] = None
        elif event.name == "generation_started":
            reason, settings = event.text("reason"), event.fields.get("settings")
            if reason.startswith("start"):
                happened[event.iteration, "a session began"] = None
            # A renewed generation repeats the settings of its session.
            if isinstance(settings, Mapping) and not reason.startswith(RENEWED):
                for name, value in settings.items():
                    happened[event.iteration, visible(f"{name}={setting_text(value)}")] = None
    return [*happened]


async def show(client: Client, opened: OpenRun) -> None:
    with page(client, f"{opened.name}: curves", opened.name, "Curves"):
        without_times = await to_thread(opened.newest.ask, figures)
        if not without_times.columns:
            ui.label("No iteration of this run has been measured yet.")
        with ui.row().style("gap:14px;align-items:center"):
            smoothing = ui.select(SMOOTHINGS, value=0.0, label="smoothing").props("dense outlined")
            smoothing.style("min-width:170px")
            logarithmic = ui.checkbox("log axis")
            ui.label(
                "A point leads to its iteration. Drag with the first symbol of a chart to zoom."
            ).classes("muted")
        charts: dict[str, ui.echart] = {}
        groups = {name: ui.element("section") for name in GROUPS}

        def options(column: str, drawn_from: Figures) -> dict[str, object]:
            title = words_of(column).title
            drawn = curve(
                {title: drawn_from.columns[column]},
                smooth=float(smoothing.value or 0.0),
                log=bool(logarithmic.value),
                marks=drawn_from.marks,
                about=title,
            )
            return drawn

        def draw(found: Figures) -> None:
            """Add the charts of new columns, and bring those that are there up to date."""
            for column in found.columns:
                if column in charts:
                    new = options(column, found)
                    if charts[column].options != new:
                        charts[column].options.clear()
                        charts[column].options.update(new)
                        charts[column].update()
                else:
                    _add(column, found)

        def _add(column: str, found: Figures) -> None:
            words = words_of(column)
            section = groups[words.group]
            if not section.default_slot.children:
                with section:
                    ui.label(words.group).props("role=heading aria-level=2").classes("heading")
                    ui.element("div").classes("curves")
            with section.default_slot.children[1], ui.element("div").classes("curve"):
                ui.label(visible(words.title)).classes("title")
                ui.label(words.says).classes("muted says")
                charts[column] = ui.echart(options(column, found), on_point_click=go_to_iteration)

        def go_to_iteration(event: EChartPointClickEventArguments) -> None:
            data: object = event.data
            if isinstance(data, list | tuple) and data:
                ui.navigate.to(link(opened.name, "answers", iteration=int(data[0])))

        draw(without_times)
        latest = [without_times]

        async def with_times() -> None:
            """Draw also the seconds of all iterations, which take longer to read than the results."""
            whole = await to_thread(lambda: opened.whole().ask(figures))
            latest[0] = whole
            draw(whole)

        for chosen in (smoothing, logarithmic):
            chosen.on_value_change(lambda: draw(latest[0]))
        ui.timer(0.1, with_times, once=True)
        ui.timer(LOOK_S, with_times, immediate=False)
