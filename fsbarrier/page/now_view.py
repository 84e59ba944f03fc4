"""Where a run is: its state, its nodes and who waits for whom, what happened last. It updates by itself."""

from __future__ import annotations

from asyncio import to_thread

from nicegui import Client, ui

from fsbarrier.page.layout import html, link, page
from fsbarrier.page.open_runs import OpenRun
from fsbarrier.page.render import part
from fsbarrier.view.event_wording import event_text, phase_name
from fsbarrier.view.report import tiles
from fsbarrier.view.run_reader import RunReader
from fsbarrier.view.run_status import RunStatus, elapsed_s

LOOK_S = 1.0
EVENTS = 40


async def show(client: Client, opened: OpenRun) -> None:
    def parts(reader: RunReader, status: RunStatus) -> list[str]:
        newest = reader.history.newest_events(200)
        events = [(event.at, text) for event in newest if (text := event_text(event))]
        return [
            part("head", status, reader.record, elapsed_s(reader), phase_name),
            part("tiles", tiles(status, status.finished_times, reader)),
            part("nodes", status, link(opened.name, "logs")),
            part("events", events[-EVENTS:][::-1]),
        ]

    with page(client, opened.name, opened.name, "Now"):
        shown = await to_thread(opened.newest.ask, parts)
        elements = []
        for title, content in zip(("", "", "Nodes", "What happened"), shown, strict=True):
            if title:
                ui.label(title).classes("text-subtitle1 text-weight-medium").props(
                    "role=heading aria-level=2"
                )
            elements.append(html(content))

        async def look() -> None:
            for element, content in zip(elements, await to_thread(opened.newest.ask, parts), strict=True):
                element.set_content(content)

        ui.timer(LOOK_S, look, immediate=False)
