"""The report's curves as inline SVG, and its bars as widths in per cent. Colours come from the page's style sheet. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from fsbarrier.view.amounts import duration

#: A curve's size in SVG units. It is drawn at about this size, on a desk and on a phone, so that its letters can be read.
WIDTH, HEIGHT = 330, 190
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 14, 34
MOST_POINTS = 600
#: draw a dot for each point up to this many points
FEW = 60


@dataclass(frozen=True, slots=True)
class Series:
    """A curve: its name, its class in the style sheet, its points in order of x."""

    name: str
    style: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Piece:
    """A segment of a bar: its class, its tooltip, its beginning and width in per cent of the bar."""

    style: str
    title: str
    begin: float
    width: float


@dataclass(frozen=True, slots=True)
class Bar:
    label: str
    pieces: Sequence[Piece]
    note: str


def piece(style: str, name: str, begin_s: float, seconds: float, whole_s: float) -> Piece:
    """A segment of a bar that stands for `whole_s` seconds and ends with them."""
    begin = min(100.0, 100 * begin_s / whole_s)
    width = min(100.0 - begin, 100 * seconds / whole_s)
    return Piece(style, f"{name} {duration(seconds)}", round(begin, 3), round(width, 3))


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round axis values that cover `low` to `high`."""
    span = high - low if high > low else abs(high) or 1.0
    raw = span / about
    scale = 10.0 ** math.floor(math.log10(raw))
    step = next(scale * factor for factor in (1, 2, 2.5, 5, 10) if scale * factor >= raw * 0.999)
    first = math.floor(low / step + 1e-9)
    last = max(first + 1, math.ceil(high / step - 1e-9))
    # As many digits as the step needs, also where it is a learning rate's.
    digits = max(0, 2 - math.floor(math.log10(step)))
    return [round(number * step, digits) for number in range(first, last + 1)]


def line_chart(series: Sequence[Series]) -> str:
    """A line chart over iterations."""
    points = [point for one in series for point in one.points]
    low, high = min(y for _, y in points), max(y for _, y in points)
    if 0 <= low <= 0.6 * high or low == high > 0:
        low = 0.0
    y_ticks = ticks(low, high, 3)
    x_low, x_high = min(x for x, _ in points), max(x for x, _ in points)
    margin = 0.02 * (x_high - x_low) or 0.5

    def x_of(x: float) -> float:
        return LEFT + (x - x_low + margin) / (x_high - x_low + 2 * margin) * (WIDTH - LEFT - RIGHT)

    def y_of(y: float) -> float:
        return TOP + (y_ticks[-1] - y) / (y_ticks[-1] - y_ticks[0]) * (HEIGHT - TOP - BOTTOM)

    body = []

    def write(x: float, y: float, text: str, anchor: str = "middle") -> None:
        body.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>')

    for y in y_ticks:
        body.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y_of(y):.1f}" y2="{y_of(y):.1f}"/>'
        )
        write(LEFT - 6, y_of(y) + 4, f"{y:g}", "end")
    for x in ticks(x_low, x_high, 4):
        if x == int(x) and x_low <= x <= x_high:
            write(x_of(x), HEIGHT - BOTTOM + 16, f"{x:g}")
    write((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 3, "iteration")
    for one in series:
        stride = max(1, math.ceil(len(one.points) / MOST_POINTS))
        path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in [*one.points[:-1:stride], one.points[-1]])
        body.append(f'<polyline class="curve {one.style}" points="{path}"/>')
        for x, y in one.points if len(one.points) <= FEW else ():
            title = f"<title>{escape(one.name)} {y:.4g} ({x:g})</title>"
            at = f'cx="{x_of(x):.1f}" cy="{y_of(y):.1f}"'
            body.append(f'<circle class="dot {one.style}" {at} r="3">{title}</circle>')
    label = escape(f"{' and '.join(one.name for one in series)} by iteration", quote=True)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(body)}</svg>'
