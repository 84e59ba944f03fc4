"""When each node did what: a timeline that can be zoomed, what the time was lost to, and what to change."""

from __future__ import annotations

from asyncio import to_thread
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nicegui import Client, ui

from fsbarrier.page.charts import AXIS, TEXT
from fsbarrier.page.layout import html, page
from fsbarrier.page.open_runs import OpenRun
from fsbarrier.page.render import part
from fsbarrier.view.run_reader import RunReader
from fsbarrier.view.run_status import RunStatus
from fsbarrier.view.timings import Span, wastes
from fsbarrier.wording import duration

#: iterations on the timeline, and the most pieces: the shortest are left out
ITERATIONS, MOST_PIECES = 3, 6000
#: what a piece of the timeline is, by its phase or by waiting, in colours that the colour-blind tell apart
KINDS = {
    "rollouts": "#0072B2",
    "evaluation": "#CC79A7",
    "update": "#D55E00",
    "batch and merge": "#E69F00",
    "engine and weights": "#009E73",
    "other": "#56B4E9",
    "waiting": "#b9bcc2",
}
KIND_OF = {
    "train_rollout": "rollouts",
    "eval_rollout": "evaluation",
    "update": "update",
    "batch_prepare": "batch and merge",
    "train_aggregate": "batch and merge",
    "engine_start": "engine and weights",
    "engine_stop": "engine and weights",
    "weights_publish": "engine and weights",
}
#: draws one piece: [node's line, begin, end, colour]
DRAW = """(params, api) => {
  const begin = api.coord([api.value(1), api.value(0)]), end = api.coord([api.value(2), api.value(0)]);
  const height = Math.max(2, api.size([0, 1])[1] * 0.72), area = params.coordSys;
  const left = Math.max(begin[0], area.x), right = Math.min(end[0], area.x + area.width);
  return right <= left ? null : {type: "rect", shape: {x: left, y: begin[1] - height / 2, width: Math.max(1, right - left), height},
    style: {fill: api.visual("color")}};
}"""


@dataclass(frozen=True, slots=True)
class Timeline:
    """The pieces of some iterations: (node's line, begin, end, kind, what it says); times in seconds since `begin`."""

    nodes: Sequence[int]
    pieces: Sequence[tuple[int, float, float, str, str]]
    advice: Sequence[str]
    iterations: Sequence[int]
    costs: Sequence[str]


def timeline(reader: RunReader, status: RunStatus, last: int | None = None) -> Timeline:
    """The newest iterations up to `last`."""
    spans = reader.spans()
    known = sorted({span.iteration for span in spans})
    shown = [iteration for iteration in known if last is None or iteration <= last][-ITERATIONS:]
    chosen = [span for span in spans if span.iteration in shown]
    nodes = sorted({span.node_rank for span in chosen}, reverse=True)
    begin = min((span.began_at for span in chosen), default=0.0)
    pieces = [piece for span in chosen for piece in _pieces(span, nodes.index(span.node_rank), begin)]
    pieces.sort(key=lambda piece: piece[1] - piece[2])
    costs = [
        f"{duration(lost.cost_s)} were lost before generation {lost.generation}: {lost.reason or 'unknown reason'}"
        for lost in status.interruptions[:5]
    ]
    return Timeline(nodes, pieces[:MOST_PIECES], wastes(chosen, 6), known, costs)


def _pieces(span: Span, line: int, begin: float) -> list[tuple[int, float, float, str, str]]:
    """A node's work in a row, and its wait after that."""
    done = span.ended_at if span.done_at is None else min(max(span.done_at, span.began_at), span.ended_at)
    where = f"node {span.node_rank}, iteration {span.iteration}: {span.phase} {span.phase_name}"
    kind = KIND_OF.get(span.phase_name, "other")
    work = (line, span.began_at - begin, done - begin, kind, f"{where}, {duration(done - span.began_at)}")
    wait_s = span.ended_at - done
    wait = (
        line,
        done - begin,
        span.ended_at - begin,
        "waiting",
        f"{where}: waits {duration(wait_s)} for others",
    )
    return [piece for piece in (work, wait) if piece[2] - piece[1] > 1e-4]


def chart(found: Timeline) -> dict[str, Any]:
    """The options for ECharts: one series of rectangles for each kind."""
    series = [
        {
            "type": "custom",
            "name": kind,
            ":renderItem": DRAW,
            "itemStyle": {"color": colour},
            "encode": {"x": [1, 2], "y": 0},
            "data": [
                {"value": [line, round(begin, 3), round(end, 3)], "name": said}
                for line, begin, end, own, said in found.pieces
                if own == kind
            ],
        }
        for kind, colour in KINDS.items()
    ]
    return {
        "animation": False,
        "aria": {"enabled": True, "label": {"description": "what each node did when"}},
        "legend": {"top": 0, "textStyle": TEXT, "data": [*KINDS]},
        "tooltip": {"confine": True, "renderMode": "richText", ":formatter": "(piece) => piece.name"},
        "grid": {"left": 8, "right": 16, "top": 76, "bottom": 52, "containLabel": True},
        "xAxis": {
            "type": "value",
            "min": 0,
            "max": "dataMax",
            "name": "seconds",
            "nameLocation": "middle",
            "nameGap": 24,
            **AXIS,
        },
        "yAxis": {"type": "category", "data": [f"node {rank}" for rank in found.nodes], "axisLabel": TEXT},
        "dataZoom": [
            {"type": "slider", "height": 16, "bottom": 4, "filterMode": "weakFilter"},
            {"type": "inside", "filterMode": "weakFilter", "zoomOnMouseWheel": "ctrl"},
        ],
        "series": series,
    }


async def show(client: Client, opened: OpenRun) -> None:
    with page(client, f"{opened.name}: time", opened.name, "Time"):
        query = client.request.query_params if client.request is not None else {}
        given = query.get("iteration", "")
        last = int(given) if given.isdecimal() else None
        found = await to_thread(
            lambda: opened.whole().ask(lambda reader, status: timeline(reader, status, last))
        )
        if not found.pieces:
            ui.label("No node of this run has begun an iteration.")
            return
        html(part("advice", [*found.advice, *found.costs]))
        with ui.row().style("gap:14px;align-items:center"):
            chosen = (
                ui.select(
                    [*reversed(found.iterations)], value=last or found.iterations[-1], label="last iteration"
                )
                .props("dense outlined")
                .style("min-width:150px")
            )
            chosen.on_value_change(lambda event: ui.navigate.to(f"?iteration={event.value}"))
            ui.label(
                "Grey: the node is done and waits for others. Zoom with the slider, or ctrl and the wheel."
            ).classes("muted")
        height = 120 + max(180, 18 * len(found.nodes))
        ui.echart(chart(found)).style(f"height:{height}px;width:100%")
