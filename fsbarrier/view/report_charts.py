"""The report's charts as inline SVG: lines, stacked bars, timelines. Colours come from the page's style sheet. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from fsbarrier.view.amounts import duration

WIDTH = 760
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 12, 34
#: right margin of a chart of iterations, where the grid values are repeated
VALUES = 46
MOST_POINTS = 600
#: draw a dot for each point up to this many points
FEW = 60
#: mean letter width in the charts' font
LETTER = 6.2


@dataclass(frozen=True, slots=True)
class Series:
    """A curve: its name, its class in the style sheet, its points in order of x."""

    name: str
    style: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class BarPiece:
    """A segment of a stacked bar."""

    style: str
    name: str
    value: float


@dataclass(frozen=True, slots=True)
class Block:
    """A segment of a lane, in seconds: work until `done`, then waiting. `cut`: it was aborted."""

    begin: float
    done: float
    end: float
    style: str
    name: str
    cut: bool = False


@dataclass(frozen=True, slots=True)
class Lane:
    """One node's row in a timeline. `marks`: (second, event)."""

    label: str
    blocks: Sequence[Block]
    marks: Sequence[tuple[float, str]] = field(default_factory=tuple)


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round axis values that cover `low` to `high`."""
    span = high - low if high > low else abs(high) or 1.0
    raw = span / max(1, about)
    scale = 10.0 ** math.floor(math.log10(raw))
    step = next(scale * factor for factor in (1, 2, 2.5, 5, 10) if scale * factor >= raw * 0.999)
    first = math.floor(low / step + 1e-9)
    last = max(first + 1, math.ceil(high / step - 1e-9))
    return [round(number * step, 10) for number in range(first, last + 1)]


def line_chart(series: Sequence[Series], x_name: str, marks: Mapping[int, str] | None = None) -> str:
    """A line chart over whole numbers; "" without points. `marks`: x -> what changed there."""
    height = 260
    points = [point for one in series for point in one.points]
    if not points:
        return ""
    y_ticks = ticks(min(0.0, *(y for _, y in points)), max(y for _, y in points))
    x_low, x_high = min(x for x, _ in points), max(x for x, _ in points)
    x_high = x_high if x_high > x_low else x_low + 1

    def x_of(x: float) -> float:
        return LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - VALUES - 10) + 5

    def y_of(y: float) -> float:
        return TOP + (y_ticks[-1] - y) / (y_ticks[-1] - y_ticks[0]) * (height - TOP - BOTTOM)

    labels = [f"{value:g}" for value in y_ticks]
    body = _grid(y_ticks, y_of, labels)
    whole = [x for x in ticks(x_low, x_high, 10) if x == int(x) and x_low <= x <= x_high]
    body += [_text(x_of(x), height - BOTTOM + 16, f"{x:g}", "middle") for x in whole]
    body.append(_text((LEFT + WIDTH - VALUES) / 2, height - 3, x_name, "middle"))
    for x, what in (marks or {}).items():
        if x_low <= x <= x_high:
            at = f'x1="{x_of(x):.1f}" x2="{x_of(x):.1f}" y1="{TOP}" y2="{height - BOTTOM}"'
            body.append(f'<line class="mark" {at}><title>{escape(f"{x_name} {x}: {what}")}</title></line>')
    for one in series:
        body += _curve(one, [(x_of(x), y_of(y)) for x, y in one.points])
    body += _again_at_the_right(y_ticks, y_of, labels)
    names = " and ".join(one.name for one in series if one.points)
    return _svg(body, height, f"{names} by {x_name}")


def _curve(series: Series, places: Sequence[tuple[float, float]]) -> list[str]:
    stride = max(1, math.ceil(len(places) / MOST_POINTS))
    kept = [*places[::stride], *([places[-1]] if places and (len(places) - 1) % stride else [])]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in kept)
    found = [f'<polyline class="curve {series.style}" points="{path}"/>'] if len(kept) > 1 else []
    if len(places) <= FEW:
        for (x, y), (px, py) in zip(series.points, places, strict=True):
            title = f"<title>{escape(series.name)} {y:.3f} ({x:g})</title>"
            found.append(
                f'<circle class="dot {series.style}" cx="{px:.1f}" cy="{py:.1f}" r="3.5">{title}</circle>'
            )
    return found


def stacked_bars(bars: Sequence[tuple[str, Sequence[BarPiece]]], x_name: str) -> str:
    """A stacked bar chart of seconds, one bar per label."""
    height = 280
    if not bars:
        return ""
    y_ticks = ticks(0.0, max(sum(part.value for part in parts) for _, parts in bars) or 1.0)
    slot = (WIDTH - LEFT - VALUES) / len(bars)
    wide = min(56.0, slot * 0.78)
    scale = (height - TOP - BOTTOM) / y_ticks[-1]

    def y_of(y: float) -> float:
        return height - BOTTOM - y * scale

    labels = [_seconds(value) for value in y_ticks]
    body = _grid(y_ticks, y_of, labels)
    every = max(1, math.ceil(len(bars) / 20))
    for number, (label, parts) in enumerate(bars):
        x, top = LEFT + slot * (number + 0.5) - wide / 2, 0.0
        for part in parts:
            if part.value * scale >= 0.05:
                title = f"{x_name} {label}: {part.name} {duration(part.value)}"
                body.append(_box(x, y_of(top + part.value), wide, part.value * scale, part.style, title))
            top += part.value
        if number % every == 0:
            body.append(_text(x + wide / 2, height - BOTTOM + 16, label, "middle"))
    body.append(_text((LEFT + WIDTH - VALUES) / 2, height - 3, x_name, "middle"))
    body += _again_at_the_right(y_ticks, y_of, labels)
    return _svg(body, height, f"seconds by {x_name} and phase")


def timeline(lanes: Sequence[Lane], seconds: float, title: str) -> str:
    """A timeline over `seconds`, one lane per node: coloured for work, pale for waiting, a cross where the node was lost."""
    if not lanes or seconds <= 0:
        return ""
    lane = 26 if len(lanes) <= 12 else 14
    left = max(LEFT, 12 + LETTER * max(len(one.label) for one in lanes))
    height = TOP + lane * len(lanes) + BOTTOM
    scale = (WIDTH - left - RIGHT) / seconds
    body = []
    for value in ticks(0.0, seconds, 8):
        x = left + value * scale
        if value <= seconds:
            body.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{height - BOTTOM}"/>')
            body.append(_text(x, height - BOTTOM + 16, _seconds(value), "middle"))
    for number, one in enumerate(lanes):
        y = TOP + lane * number
        body.append(_text(left - 6, y + lane / 2 + 4, one.label, "end"))
        for block in one.blocks:
            body += _block(block, left, scale, y + 2, lane - 4)
        for at, what in one.marks:
            x, mid, arm = left + at * scale, y + lane / 2, lane / 2 - 3
            cross = (
                f"M{x - arm:.1f} {mid - arm:.1f} L{x + arm:.1f} {mid + arm:.1f} "
                f"M{x - arm:.1f} {mid + arm:.1f} L{x + arm:.1f} {mid - arm:.1f}"
            )
            body.append(f'<path class="lost" d="{cross}"><title>{escape(what)}</title></path>')
    return _svg(body, height, title)


def _block(block: Block, left: float, scale: float, y: float, high: float) -> list[str]:
    begin, done, end = (left + value * scale for value in (block.begin, block.done, block.end))
    worked, waited = duration(max(0.0, block.done - block.begin)), duration(max(0.0, block.end - block.done))
    title = f"{block.name}: worked {worked}, waited {waited}" + (", aborted" if block.cut else "")
    cut = " cut" if block.cut else ""
    found = []
    if end - done >= 0.3:
        found.append(_box(done, y, end - done, high, f"{block.style} pale{cut}", title))
    if done - begin >= 0.3:
        found.append(_box(begin, y, done - begin, high, f"{block.style}{cut}", title))
        if high > 12 and done - begin > LETTER * len(block.name) + 6:
            found.append(_text((begin + done) / 2, y + high / 2 + 4, block.name, "middle", "inside"))
    return found


def _grid(values: Sequence[float], y_of: Callable[[float], float], labels: Sequence[str]) -> list[str]:
    found = []
    for value, label in zip(values, labels, strict=True):
        y = y_of(value)
        found.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - VALUES}" y1="{y:.1f}" y2="{y:.1f}"/>')
        found.append(_text(LEFT - 6, y + 4, label, "end"))
    return found


def _again_at_the_right(
    values: Sequence[float], y_of: Callable[[float], float], labels: Sequence[str]
) -> list[str]:
    """The labels of `_grid` repeated at the right end, for a screen that shows only that part."""
    return [
        _text(WIDTH - VALUES + 4, y_of(value) + 4, label, "start", "again")
        for value, label in zip(values, labels, strict=True)
    ]


def _seconds(value: float) -> str:
    if value >= 7200:
        return f"{value / 3600:g} h" if value % 1800 == 0 else f"{value / 3600:.1f} h"
    if value >= 300:
        return f"{value / 60:g} min" if value % 30 == 0 else f"{value / 60:.1f} min"
    return f"{value:g} s" if value == 0 or value >= 0.1 else f"{value * 1000:g} ms"


def _box(x: float, y: float, width: float, height: float, style: str, title: str) -> str:
    return (
        f'<rect class="{style}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.2f}">'
        f"<title>{escape(title)}</title></rect>"
    )


def _text(x: float, y: float, text: str, anchor: str, style: str = "") -> str:
    named = f' class="{style}"' if style else ""
    return f'<text{named} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(body: Sequence[str], height: float, label: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(label, quote=True)}">'
        + "".join(body)
        + "</svg>"
    )
