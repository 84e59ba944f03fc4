"""The addresses of the page, and what each shows."""

from __future__ import annotations

from asyncio import to_thread
from collections.abc import Awaitable, Callable

from fastapi import FastAPI
from fastapi.responses import PlainTextResponse
from nicegui import Client, ui

from fsbarrier.errors import FsbarrierError
from fsbarrier.page import (
    answer_view,
    answers_view,
    curves_view,
    logs_view,
    now_view,
    runs_view,
    settings_view,
    time_view,
)
from fsbarrier.page.layout import RESPONSE_S, html, page
from fsbarrier.page.open_runs import OpenRun, OpenRuns
from fsbarrier.page.render import part

#: shows a view of a run
View = Callable[[Client, OpenRun], Awaitable[None]]
OF_RUNS: dict[str, View] = {
    "now": now_view.show,
    "curves": curves_view.show,
    "answers": answers_view.show,
    "answer": answer_view.show,
    "group": answer_view.show_group,
    "time": time_view.show,
    "logs": logs_view.show,
    "settings": settings_view.show,
}


def build(runs: OpenRuns) -> FastAPI:
    """The application that shows these runs."""
    application = FastAPI(openapi_url=None)

    @ui.page("/", response_timeout=RESPONSE_S)
    async def _(client: Client) -> None:
        await runs_view.show(client, runs)

    @ui.page("/compare", response_timeout=RESPONSE_S)
    async def _(client: Client) -> None:
        await settings_view.compare(client, runs)

    @application.get("/run/{name}/text", response_class=PlainTextResponse)
    def _(name: str, split: str, iteration: int, task: int, number: int) -> str:
        return answer_view.whole_text(runs, name, split, iteration, task, number)

    @ui.page("/run/{name}/{view}", response_timeout=RESPONSE_S)
    async def _(client: Client, name: str, view: str) -> None:
        await _of_run(client, runs, name, OF_RUNS.get(view))

    ui.run_with(application, title="fsbarrier", dark=None, tailwind=False, show_welcome_message=False)
    return application


async def _of_run(client: Client, runs: OpenRuns, name: str, view: View | None) -> None:
    """One view of one run, or why it cannot be shown."""
    try:
        opened = await to_thread(runs.get, name)
        if opened is not None and view is not None:
            await view(client, opened)
            return
        why = "There is no such run in this folder." if opened is None else "There is no such view."
    except (FsbarrierError, OSError) as error:
        why = str(error)
    with page(client, "cannot be shown"):
        html(part("problem", f"{name} cannot be shown", why))
