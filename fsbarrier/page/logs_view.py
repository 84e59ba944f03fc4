"""The nodes' logs, followed as they grow, and the first failure of the run in front of them."""

from __future__ import annotations

from asyncio import to_thread
from pathlib import Path

from nicegui import Client, ui

from fsbarrier.page.layout import html, page
from fsbarrier.page.open_runs import OpenRun
from fsbarrier.page.render import part
from fsbarrier.rundir.logs import find_logs, read_lines
from fsbarrier.view.first_error import first_error
from fsbarrier.view.run_reader import RunReader
from fsbarrier.view.run_status import RunStatus

LOOK_S = 1.0
#: lines that are shown, and bytes of a log's end that are read for them
LINES, BYTES = 500, 256 << 10


async def show(client: Client, opened: OpenRun) -> None:
    with page(client, f"{opened.name}: logs", opened.name, "Logs"):
        paths = opened.record.paths

        def failure(reader: RunReader, _: RunStatus) -> list[str]:
            return first_error(reader.history.newest_events(), paths.logs)

        failed = await to_thread(lambda: opened.whole().ask(failure))
        if failed:
            html(part("first_error", failed))
        query = client.request.query_params if client.request is not None else {}
        asked = query.get("node", "")
        node = int(asked) if asked.isdecimal() else None
        logs = await to_thread(find_logs, paths)
        named = {log.label: log for log in logs}
        if not named:
            ui.label("No node of this run has written a log yet.")
            return
        first = next((name for name in named if name.startswith(f"[node {node} ")), next(iter(named)))
        chosen = (
            ui.select([*named], value=first, label="log")
            .props("dense outlined")
            .style("min-width:240px;max-width:480px")
        )
        shown = ui.log(max_lines=LINES).style("height:70vh;width:100%;margin-top:10px").classes("logged")
        offsets: dict[Path, int] = {}

        async def follow() -> None:
            path = named[str(chosen.value)].path
            lines, offset = await to_thread(read_lines, path, offsets.get(path, -BYTES))
            if path == named[str(chosen.value)].path:
                offsets[path] = offset
                for line in lines[-LINES:]:
                    shown.push(line)

        async def other() -> None:
            offsets.clear()
            shown.clear()
            await follow()

        chosen.on_value_change(other)
        await follow()
        ui.timer(LOOK_S, follow, immediate=False)
