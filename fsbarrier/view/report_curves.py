"""The report's charts: the rewards, and each metric of the table of iterations, as inline SVG whose colours come from the page's style
sheet. A second run that is compared has dashed curves."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from fsbarrier.view.metric_names import importance, metric_name
from fsbarrier.view.report_formats import Row
from fsbarrier.wording import amount, short

#: prefixes of the table columns that get curves: metrics of rollouts, evaluations, batches and updates
MEASURED = ("rollout_", "eval_", "batch_", "update_")
#: A curve's size in SVG units. It is drawn at about this size, on a desk and on a phone, so that its letters can be read.
WIDTH, HEIGHT = 330, 190
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 14, 34
MOST_POINTS = 600
#: draw a dot for each point up to this many points
FEW = 60

#: the values by iteration
Rows = Mapping[int, Row]
#: title, newest value, SVG
Chart = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class Series:
    """A curve: its name, its class in the style sheet, its points in order of x, and whether it is of the second run."""

    name: str
    style: str
    points: Sequence[tuple[float, float]]
    second: bool = False


def curves(runs: Mapping[str, Rows]) -> list[Chart]:
    """The charts of one run or two, by their names: of the rewards, and of each metric that is not always 0.

    The evaluation of a session's last policy counts for the iteration that would begin with it.
    """
    columns = dict.fromkeys(column for rows in runs.values() for column in next(iter(rows.values()), {}))
    metrics = [name for name in columns if name.startswith(MEASURED) and not name.endswith(("_se", "_s"))]
    charts = {"reward": {"train": "train_reward", "held-out": "test_reward"}}
    charts |= {metric_name(metric): {"": metric} for metric in sorted(metrics, key=importance)}
    charts_drawn = []
    for title, named in charts.items():
        series = [*_series(runs, named)]
        if any(value for drawn in series for _, value in drawn.points):
            charts_drawn.append((title, _newest_values(runs, named, series), line_chart(series)))
    return charts_drawn


def _series(runs: Mapping[str, Rows], named: Mapping[str, str]) -> Iterator[Series]:
    for number, (run, rows) in enumerate(runs.items()):
        for name, column in named.items():
            style = "test" if column.startswith(("test", "eval")) else "train"
            if points := _points(rows, column):
                # With one run, a chart of a single metric has its name as title.
                yield Series(
                    f"{run if len(runs) > 1 else ''} {name}".strip(), style, points, second=number > 0
                )


def _newest_values(runs: Mapping[str, Rows], named: Mapping[str, str], series: Sequence[Series]) -> str:
    newest = ", ".join(
        f"{drawn.name} " * (len(series) > 1) + _newest(drawn.points[-1][1]) for drawn in series
    )
    error = f"{next(iter(named.values()))}_se" if len(named) == 1 else "eval_reward_se"
    deviations = _points(next(iter(runs.values())), error) if len(runs) == 1 else []
    return f"{newest} ± {amount(deviations[-1][1])}" if deviations else newest


def _newest(value: float) -> str:
    """Format with three digits, and large numbers in full: 0.123, 15,500."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _points(rows: Rows, column: str) -> list[tuple[float, float]]:
    values = ((float(iteration), row.get(column)) for iteration, row in rows.items())
    return [(iteration, value) for iteration, value in values if isinstance(value, int | float)]


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round axis values that cover `low` to `high`."""
    span = high - low if high > low else abs(high) or 1.0
    raw = span / about
    scale = 10.0 ** math.floor(math.log10(raw))
    step = next(scale * factor for factor in (1, 2, 2.5, 5, 10) if scale * factor >= raw * 0.999)
    first = math.floor(low / step + 1e-9)
    last = max(first + 1, math.ceil(high / step - 1e-9))
    # Use as many digits as the step needs, which may be as small as a learning rate.
    digits = max(0, 2 - math.floor(math.log10(step)))
    return [round(number * step, digits) for number in range(first, last + 1)]


def line_chart(series: Sequence[Series]) -> str:
    """A line chart over iterations."""
    points = [point for drawn in series for point in drawn.points]
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
        write(LEFT - 6, y_of(y) + 4, short(y) if abs(y) >= 1000 else f"{y:g}", "end")
    for x in ticks(x_low, x_high, 4):
        if x == int(x) and x_low <= x <= x_high:
            write(x_of(x), HEIGHT - BOTTOM + 16, f"{x:g}")
    write((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 3, "iteration")
    for drawn in series:
        own = drawn.points
        stride = max(1, math.ceil(len(own) / MOST_POINTS))
        path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in [*own[:-1:stride], own[-1]])
        style = f"{drawn.style}{' second' if drawn.second else ''}"
        body.append(f'<polyline class="curve {style}" points="{path}"/>')
        # A second run has dashed lines and no dots.
        for x, y in own if len(own) <= FEW and not drawn.second else ():
            title = f"<title>{escape(drawn.name)} {_newest(y)} ({x:g})</title>"
            at = f'cx="{x_of(x):.1f}" cy="{y_of(y):.1f}"'
            body.append(f'<circle class="dot {drawn.style}" {at} r="3">{title}</circle>')
    names = " and ".join(filter(None, (drawn.name for drawn in series)))
    label = escape(f"{names or 'this metric'} by iteration", quote=True)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(body)}</svg>'
