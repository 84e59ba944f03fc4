"""The settings of a run, those of several side by side, and how to serve or ask a version of the policy."""

from __future__ import annotations

import shlex
from asyncio import to_thread
from collections.abc import Mapping

from nicegui import Client, ui

from fsbarrier.errors import FsbarrierError
from fsbarrier.page.charts import curve
from fsbarrier.page.curves_view import Figures, figures
from fsbarrier.page.layout import html, link, page
from fsbarrier.page.metric_words import GROUPS, words_of
from fsbarrier.page.open_runs import OpenRun, OpenRuns
from fsbarrier.page.render import part
from fsbarrier.page.runs_view import MOST_COMPARED
from fsbarrier.settings.secrecy import shown
from fsbarrier.settings.section import leaves
from fsbarrier.view.run_reader import RunReader
from fsbarrier.view.run_status import RunStatus
from fsbarrier.wording import setting_text, visible


def settings_of(reader: RunReader, _: RunStatus) -> dict[str, str]:
    """Every setting in force as text, without secrets."""
    return {name: setting_text(value) for name, value in leaves(shown(reader.settings.as_json()))}


async def show(client: Client, opened: OpenRun) -> None:
    with page(client, f"{opened.name}: settings", opened.name, "Settings"):
        values = await to_thread(opened.newest.ask, settings_of)
        where = shlex.quote(str(opened.path))
        commands = [
            ("ask a version of the policy, in a terminal", f"fsbarrier chat --log-path {where}"),
            ("serve it with an OpenAI-compatible API", f"fsbarrier serve --log-path {where}"),
            ("write it as a model folder, for any other server", f"fsbarrier export OUT --log-path {where}"),
        ]
        html(part("commands", commands))
        html(part("settings", ["value"], [(name, [value], False) for name, value in values.items()]))


async def compare(client: Client, runs: OpenRuns) -> None:
    """Two to four runs: their curves over each other, and the settings in which they differ."""
    names = client.request.query_params.getlist("run")[:MOST_COMPARED] if client.request is not None else []
    with page(client, "compared runs"):
        try:
            opened = [each for name in names if (each := await to_thread(runs.get, name)) is not None]
            figures_of = {each.name: await to_thread(each.newest.ask, figures) for each in opened}
            settings = {each.name: await to_thread(each.newest.ask, settings_of) for each in opened}
        except (FsbarrierError, OSError) as error:
            html(part("problem", "The runs cannot be compared", str(error)))
            return
        if len(opened) < 2:
            html(part("problem", "Nothing to compare", "Choose two to four runs in the list."))
            return
        html(part("compared", [(each.name, link(each.name)) for each in opened]))
        ui.label("Settings that differ").classes("heading").props("role=heading aria-level=2")
        rows = _differences(settings)
        html(part("settings", [visible(name) for name in settings], rows))
        _curves(figures_of)


def _differences(settings: Mapping[str, Mapping[str, str]]) -> list[tuple[str, list[str], bool]]:
    """(setting, its value in each run, whether it is marked)"""
    names = sorted({name for values in settings.values() for name in values})
    rows = [(name, [values.get(name, "–") for values in settings.values()], True) for name in names]
    return [row for row in rows if len(set(row[1])) > 1]


def _curves(figures_of: Mapping[str, Figures]) -> None:
    columns = {column: None for figured in figures_of.values() for column in figured.columns}
    for group in GROUPS:
        own = [column for column in columns if words_of(column).group == group]
        if not own:
            continue
        ui.label(group).classes("heading").props("role=heading aria-level=2")
        with ui.element("div").classes("curves"):
            for column in own:
                series = {name: figured.columns.get(column, []) for name, figured in figures_of.items()}
                words = words_of(column)
                with ui.element("div").classes("curve"):
                    ui.label(visible(words.title)).classes("title")
                    ui.label(words.says).classes("muted says")
                    named = {visible(name): points for name, points in series.items()}
                    ui.echart(curve(named, about=words.title))
