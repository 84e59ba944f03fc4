"""All runs of a folder, and the way to those that are to be compared."""

from __future__ import annotations

from asyncio import to_thread
from urllib.parse import urlencode

from nicegui import Client, ui

from fsbarrier.page.layout import link, page
from fsbarrier.page.open_runs import OpenRuns
from fsbarrier.page.render import ago
from fsbarrier.view.run_list import RunLine
from fsbarrier.wording import amount, visible

LOOK_S = 3.0
#: the most runs that can be compared
MOST_COMPARED = 4
COLUMNS = (
    "run",
    "state",
    "program",
    "model",
    "iteration",
    "nodes",
    "held-out now",
    "best",
    "train",
    "activity",
)
LEFT = ("run", "state", "program", "model")
CELL = """<q-td :props="props"><a :href="props.row.link">{{ props.row.run }}</a></q-td>"""
STATE = (
    """<q-td :props="props"><span :class="'pill ' + props.row.state">{{ props.row.state }}</span></q-td>"""
)


async def show(client: Client, runs: OpenRuns) -> None:
    with page(client, "runs"):
        ui.label(f"Runs in {visible(runs.folder)}").classes("text-h6")
        columns = [
            {
                "name": name,
                "label": name,
                "field": name,
                "align": "left" if name in LEFT else "right",
                "sortable": True,
            }
            for name in COLUMNS
        ]
        table = ui.table(rows=[], columns=columns, row_key="run", selection="multiple", pagination=50)
        table.classes("w-full").props("flat dense")
        table.add_slot("body-cell-run", CELL)
        table.add_slot("body-cell-state", STATE)
        table.style("width:100%;background:transparent")

        def compare() -> None:
            chosen = [str(row["run_name"]) for row in table.selected][:MOST_COMPARED]
            ui.navigate.to(f"/compare?{urlencode([('run', name) for name in chosen])}")

        button = ui.button(f"compare (2 to {MOST_COMPARED} runs)", on_click=compare).props("no-caps outline")
        button.bind_enabled_from(table, "selected", lambda rows: 2 <= len(rows) <= MOST_COMPARED)
        skipped = ui.label().classes("muted")

        async def look() -> None:
            lines, problems = await to_thread(runs.lines)
            rows = [_row(name, line) for name, line in lines]
            if rows != table.rows:
                table.rows = rows
            skipped.set_text("; ".join(problems) or ("" if lines else "no run yet"))

        await look()
        ui.timer(LOOK_S, look, immediate=False)


def _row(name: str, line: RunLine) -> dict[str, object]:
    of = "" if line.iterations is None else f" of {line.iterations}"
    return {
        "run": visible(name),
        "run_name": name,
        "link": link(name),
        "state": line.state,
        "program": visible(line.program),
        "model": visible(line.model or "–"),
        "iteration": f"{line.iteration}{of}",
        "nodes": line.nodes,
        "held-out now": amount(line.test_reward),
        "best": amount(line.best_test_reward),
        "train": amount(line.train_reward),
        "activity": ago(line.last_activity_s),
    }
