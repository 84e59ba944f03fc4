"""The options of the charts, for ECharts. Pure.

The colours are those of Okabe and Ito, which people with any colour vision can tell apart. Letters and lines are grey, so that they can be
read on a light and on a dark page.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
GREY, GRID = "#7a7f87", "rgba(128,128,128,0.22)"
TEXT = {"color": GREY, "fontSize": 12}
AXIS = {"axisLabel": TEXT, "splitLine": {"lineStyle": {"color": GRID}}}
#: (x, y) in order of x
Points = Sequence[tuple[float, float]]
#: (x, what happened there)
Marks = Sequence[tuple[float, str]]


def smoothed(points: Points, weight: float) -> list[tuple[float, float]]:
    """The exponential moving average, corrected for its start; `weight`: of the past, 0 to below 1."""
    averages, sum_, norm = [], 0.0, 0.0
    for x, y in points:
        sum_, norm = weight * sum_ + (1 - weight) * y, weight * norm + (1 - weight)
        averages.append((x, sum_ / norm))
    return averages


def curve(
    series: Mapping[str, Points],
    *,
    smooth: float = 0.0,
    log: bool = False,
    marks: Marks = (),
    about: str = "",
) -> dict[str, Any]:
    """Curves over iterations. With `smooth` the measured points stay visible behind the line."""
    drawn: list[dict[str, Any]] = []
    for number, (name, points) in enumerate(series.items()):
        colour = PALETTE[number % len(PALETTE)]
        usable = [(x, y) for x, y in points if not log or y > 0]
        line = {
            "name": name,
            "type": "line",
            "symbol": "circle",
            "symbolSize": 6,
            "color": colour,
            "lineStyle": {"width": 2},
            "data": usable,
        }
        if smooth:
            pale = {
                "lineStyle": {"width": 1, "opacity": 0.3},
                "itemStyle": {"opacity": 0.35},
                "symbolSize": 4,
            }
            drawn.append(line | pale)
            drawn.append(line | {"data": smoothed(usable, smooth), "symbol": "none"})
        else:
            drawn.append(line | {"showSymbol": len(usable) <= 200})
    if drawn and marks:
        drawn[0]["markLine"] = {
            "symbol": "none",
            "silent": False,
            "label": {"show": False},
            "lineStyle": {"color": GREY, "type": "dashed"},
            "data": [{"xAxis": x, "name": text} for x, text in marks],
            "tooltip": {"formatter": "{b}"},
        }
    return {
        "animation": False,
        "aria": {"enabled": True, "label": {"description": about}},
        "grid": {"left": 8, "right": 14, "top": 30, "bottom": 22, "containLabel": True},
        "legend": {"show": len(series) > 1, "top": 0, "textStyle": TEXT, "data": [*series]},
        "tooltip": {"trigger": "axis", "confine": True, "renderMode": "richText"},
        "xAxis": {"type": "value", "minInterval": 1, "min": "dataMin", "max": "dataMax", **AXIS, "splitLine": {"show": False}},
        "yAxis": {"type": "log" if log else "value", "scale": True, **AXIS, **_from_zero(drawn, log)},
        "dataZoom": [{"type": "inside", "filterMode": "none", "zoomOnMouseWheel": "ctrl"}],
        "toolbox": {"right": 0, "top": -6, "itemSize": 11, "feature": {"dataZoom": {"yAxisIndex": "none"}, "restore": {}}},
        "series": drawn,
    }  # fmt: skip


def _from_zero(drawn: Sequence[Mapping[str, Any]], log: bool) -> dict[str, int]:
    """An axis that begins at 0, unless the values fill much less of it than they differ by. Noise must not look like a change."""
    values = [y for line in drawn for _, y in line["data"]]
    low, high = min(values, default=0.0), max(values, default=0.0)
    return {"min": 0} if not log and (0 <= low <= 0.6 * high or 0 <= high - low < 0.02 * low) else {}


def bins(values: Sequence[float], most: int = 24) -> list[tuple[float, float, int]]:
    """(from, to, how many) of equal bins; for a few different values a bin each, from the value to itself."""
    distinct = sorted(set(values))
    if len(distinct) <= most:
        counts = dict.fromkeys(distinct, 0)
        for value in values:
            counts[value] += 1
        return [(value, value, count) for value, count in counts.items()]
    low, high = distinct[0], distinct[-1]
    width = (high - low) / most
    counted = [0] * most
    for value in values:
        counted[min(most - 1, int((value - low) / width))] += 1
    # The bounds are included when they filter, so a bin ends just below the next one.
    edges = [low + index * width for index in range(most)] + [math.nextafter(high, math.inf)]
    return [
        (edges[index], min(high, math.nextafter(edges[index + 1], -math.inf)), counted[index])
        for index in range(most)
    ]


def histogram(
    binned: Sequence[tuple[float, float, int]], chosen: tuple[float | None, float | None]
) -> dict[str, Any]:
    """Bars whose names are their bounds. Those outside of `chosen` are pale."""
    low = -math.inf if chosen[0] is None else chosen[0]
    high = math.inf if chosen[1] is None else chosen[1]
    data = [
        {"value": count, "itemStyle": {"opacity": 1.0 if begin >= low and end <= high else 0.3}}
        for begin, end, count in binned
    ]
    names = [f"{begin:.4g}" if begin == end else f"{begin:.3g} to {end:.3g}" for begin, end, _ in binned]
    return {
        "animation": False,
        "aria": {"enabled": True, "label": {"description": "histogram of the rewards; a click on a bar filters"}},
        "grid": {"left": 8, "right": 8, "top": 10, "bottom": 4, "containLabel": True},
        "tooltip": {"trigger": "axis", "confine": True, "renderMode": "richText"},
        "xAxis": {"type": "category", "data": names, "axisLabel": TEXT, "axisTick": {"show": False}},
        "yAxis": {"type": "value", "minInterval": 1, **AXIS},
        "series": [{"type": "bar", "name": "answers", "data": data, "color": PALETTE[0]}],
    }  # fmt: skip
