"""The report's charts as inline SVG: lines, stacked bars, timelines. Colours come from the page's style sheet. Pure.

Each chart is drawn twice, for a desk and for a phone, because letters in an SVG shrink with it. The style sheet shows one of the two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from statistics import median

from fsbarrier.view.amounts import duration

#: widths of a chart on a desk, on a phone, and in a grid of small ones, in SVG units
WIDE, NARROW, SMALL = 860, 350, 330
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 14, 34
MOST_POINTS = 600
#: draw a dot for each point up to this many points
FEW = 60
#: mean letter width in the charts' font
LETTER = 6.2
#: A bar this many times as high as the middle one is cut off, so that the others can be seen.
OUTLIER = 3.0


@dataclass(frozen=True, slots=True)
class Series:
    """A curve: its name, its class in the style sheet, its points in order of x."""

    name: str
    style: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class BarPiece:
    """A segment of a stacked bar, in seconds."""

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
    # As many digits as the step needs, also where it is a learning rate's.
    digits = max(0, 2 - math.floor(math.log10(step)))
    return [round(number * step, digits) for number in range(first, last + 1)]


@dataclass
class Plot:
    """The frame of one chart: axes, grid and everything drawn so far."""

    width: int
    height: int
    x_range: tuple[float, float]
    y_ticks: Sequence[float]
    left: float = LEFT
    body: list[str] = field(default_factory=list)

    def x(self, value: float) -> float:
        low, high = self.x_range
        return self.left + (value - low) / (high - low) * (self.width - self.left - RIGHT)

    def y(self, value: float) -> float:
        low, high = self.y_ticks[0], self.y_ticks[-1]
        return TOP + (high - value) / (high - low) * (self.height - TOP - BOTTOM)

    def grid(self, label: Callable[[float], str]) -> None:
        for value in self.y_ticks:
            y = self.y(value)
            at = f'x1="{self.left}" x2="{self.width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"'
            self.body.append(f'<line class="grid" {at}/>')
            self.text(self.left - 6, y + 4, label(value), "end")

    def x_label(self, x: float, text: str) -> None:
        self.text(x, self.height - BOTTOM + 16, text, "middle")

    def x_name(self, name: str) -> None:
        self.text((self.left + self.width - RIGHT) / 2, self.height - 3, name, "middle")

    def text(self, x: float, y: float, text: str, anchor: str, style: str = "") -> None:
        named = f' class="{style}"' if style else ""
        self.body.append(f'<text{named} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>')

    def box(self, x: float, y: float, width: float, height: float, style: str, title: str) -> None:
        at = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.2f}"'
        self.body.append(f'<rect class="{style}" {at}><title>{escape(title)}</title></rect>')

    def svg(self, label: str) -> str:
        head = f'<svg viewBox="0 0 {self.width} {self.height}" role="img" aria-label="{escape(label, quote=True)}">'
        return head + "".join(self.body) + "</svg>"


def line_chart(
    width: int,
    series: Sequence[Series],
    x_name: str,
    *,
    last: str = "",
    marks: Mapping[int, str] | None = None,
) -> str:
    """A line chart over whole numbers; "" without points. `last`: the label of the last one; `marks`: x -> what changed there."""
    points = [point for one in series for point in one.points]
    if not points:
        return ""
    low, high = min(y for _, y in points), max(y for _, y in points)
    if 0 <= low <= 0.6 * high:
        low = 0.0
    x_low, x_high = min(x for x, _ in points), max(x for x, _ in points)
    margin = 0.02 * (x_high - x_low) or 0.5
    height = 260 if width >= WIDE else 190
    plot = Plot(width, height, (x_low - margin, x_high + margin), ticks(low, high, 5 if width >= WIDE else 3))
    plot.grid(lambda value: f"{value:g}")
    for x in ticks(x_low, x_high, width // 90):
        if x == int(x) and x_low <= x <= x_high and not (last and x_high - x < 0.06 * (x_high - x_low)):
            plot.x_label(plot.x(x), f"{x:g}")
    if last:
        plot.x_label(plot.x(x_high), last)
    plot.x_name(x_name)
    for mark, what in (marks or {}).items():
        if x_low <= mark <= x_high:
            at = f'x1="{plot.x(mark):.1f}" x2="{plot.x(mark):.1f}" y1="{TOP}" y2="{height - BOTTOM}"'
            title = escape(f"{x_name} {mark}: {what}")
            plot.body.append(f'<line class="mark" {at}><title>{title}</title></line>')
    for one in series:
        _curve(plot, one)
    return plot.svg(f"{' and '.join(one.name for one in series if one.points)} by {x_name}")


def _curve(plot: Plot, series: Series) -> None:
    points = series.points
    stride = max(1, math.ceil(len(points) / MOST_POINTS))
    kept = [*points[::stride], *([points[-1]] if points and (len(points) - 1) % stride else [])]
    if len(kept) > 1:
        path = " ".join(f"{plot.x(x):.1f},{plot.y(y):.1f}" for x, y in kept)
        plot.body.append(f'<polyline class="curve {series.style}" points="{path}"/>')
    for x, y in points if len(points) <= FEW else ():
        title = f"<title>{escape(series.name)} {y:.4g} ({x:g})</title>"
        at = f'cx="{plot.x(x):.1f}" cy="{plot.y(y):.1f}"'
        plot.body.append(f'<circle class="dot {series.style}" {at} r="3">{title}</circle>')


def stacked_bars(
    width: int, bars: Sequence[tuple[str, Sequence[BarPiece]]], x_name: str, *, cut_off: bool = False
) -> str:
    """A stacked bar chart of seconds, one bar per label. `cut_off`: a bar far above the others ends below its value, which it names."""
    if not bars:
        return ""
    sums = [sum(piece.value for piece in pieces) for _, pieces in bars]
    usual = [value for value in sums if value <= OUTLIER * median(sums) or not cut_off]
    highest = max(sums) if max(sums) in usual else 1.25 * max(usual)
    height = 280
    plot = Plot(width, height, (0.0, float(len(bars))), ticks(0.0, highest or 1.0))
    plot.grid(_seconds)
    top = plot.y_ticks[-1]
    wide = min(56.0, (plot.x(1) - plot.x(0)) * 0.78)
    every = max(1, math.ceil(len(bars) / (width / 45)))
    for number, ((label, pieces), whole) in enumerate(zip(bars, sums, strict=True)):
        x, below = plot.x(number + 0.5) - wide / 2, 0.0
        for piece in pieces:
            above = min(below + piece.value, top)
            high = plot.y(below) - plot.y(above)
            if high >= 0.05:
                title = f"{x_name} {label}: {piece.name} {duration(piece.value)}"
                plot.box(x, plot.y(above), wide, high, piece.style, title)
            below = above
        if whole > top:
            plot.text(x + wide / 2, TOP - 3, f"↑ {duration(whole)}", "middle", "cutoff")
        if number % every == 0:
            plot.x_label(x + wide / 2, label)
    plot.x_name(x_name)
    return plot.svg(f"seconds by {x_name} and phase")


def timeline(width: int, lanes: Sequence[Lane], seconds: float, title: str) -> str:
    """A timeline over `seconds`, one lane per node: coloured for work, pale for waiting, a cross where the node was lost."""
    if not lanes or seconds <= 0:
        return ""
    lane = 26 if len(lanes) <= 12 else 14
    left = max(LEFT, 12 + LETTER * max(len(one.label) for one in lanes))
    height = TOP + lane * len(lanes) + BOTTOM
    plot = Plot(width, height, (0.0, seconds), (0.0, 1.0), left)
    for value in ticks(0.0, seconds, width // 90):
        x = plot.x(value)
        if value <= seconds:
            at = f'x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{height - BOTTOM}"'
            plot.body.append(f'<line class="grid" {at}/>')
            plot.x_label(x, _seconds(value))
    for number, one in enumerate(lanes):
        y = TOP + lane * number
        plot.text(left - 6, y + lane / 2 + 4, one.label, "end")
        for block in one.blocks:
            _draw_block(plot, block, y + 2, lane - 4)
        for at_s, what in one.marks:
            x, middle, arm = plot.x(min(at_s, seconds)), y + lane / 2, lane / 2 - 3
            stroke = f"l{2 * arm:.1f} {2 * arm:.1f} m{-2 * arm:.1f} 0 l{2 * arm:.1f} {-2 * arm:.1f}"
            cross = f"M{x - arm:.1f} {middle - arm:.1f} {stroke}"
            plot.body.append(f'<path class="lost" d="{cross}"><title>{escape(what)}</title></path>')
    return plot.svg(title)


def _draw_block(plot: Plot, block: Block, y: float, high: float) -> None:
    begin, done, end = plot.x(block.begin), plot.x(block.done), plot.x(block.end)
    worked, waited = duration(max(0.0, block.done - block.begin)), duration(max(0.0, block.end - block.done))
    title = f"{block.name}: worked {worked}, waited {waited}" + (", aborted" if block.cut else "")
    cut = " cut" if block.cut else ""
    if end - done >= 0.3:
        plot.box(done, y, end - done, high, f"{block.style} pale{cut}", title)
    if done - begin >= 0.3:
        plot.box(begin, y, done - begin, high, f"{block.style}{cut}", title)
        if high > 12 and done - begin > LETTER * len(block.name) + 6:
            plot.text((begin + done) / 2, y + high / 2 + 4, block.name, "middle", "inside")


def _seconds(value: float) -> str:
    if value >= 7200:
        return f"{value / 3600:g} h" if value % 1800 == 0 else f"{value / 3600:.1f} h"
    if value >= 300:
        return f"{value / 60:g} min" if value % 30 == 0 else f"{value / 60:.1f} min"
    return f"{value:g} s" if value == 0 or value >= 0.1 else f"{value * 1000:g} ms"
