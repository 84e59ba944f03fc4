"""Formats durations, shares, counts and other values for the terminal and the report. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime

from fsbarrier.store.printable import printable

#: maximum number of node ranks to list
MOST_RANKS = 6
TICKS = "▁▂▃▄▅▆▇█"


def one_line(text: str) -> str:
    """The first line of a text, without control characters."""
    first = text.strip().split("\n", 1)[0]
    return printable(first).strip()


def clock_time(at: float) -> str:
    """A wall-clock time of day, in local time."""
    try:
        return f"{datetime.fromtimestamp(at):%H:%M:%S}"
    except (ValueError, OverflowError, OSError):
        return "--:--:--"


def duration(seconds: float) -> str:
    """12 ms, 3.4 s, 83 s, 5 min 12 s, 2 h 05 min, 3 d 4 h."""
    if seconds < 0.0995:
        return f"{seconds * 1000:.{1 if seconds < 0.00995 else 0}f} ms"
    if seconds < 99.5:
        return f"{seconds:.{2 if seconds < 0.995 else 1 if seconds < 9.95 else 0}f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes:02d} min"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h"


def amount(value: float | None) -> str:
    """A reward or similar value with two to three significant digits; – for None."""
    if value is None:
        return "–"
    return f"{value:.3f}" if 0 < abs(value) < 0.1 else f"{value:.2f}"


def short(value: float) -> str:
    """980, 1.5k, 23k, 4.1M."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            scaled = value / limit
            return f"{scaled:.{1 if abs(scaled) < 9.95 else 0}f}{unit}"
    return f"{value:.0f}"


def percent(share: float) -> str:
    """0.04 %, 3.1 %, 42 %."""
    value = 100 * share
    return f"{value:.{2 if value < 0.995 else 1 if value < 9.95 else 0}f} %"


def ranks(values: Iterable[int]) -> str:
    """A list such as 0, 1, 5, shortened to 0, 1, 2, 3, 4, 5 and 12 more."""
    chosen = list(values)
    named = ", ".join(map(str, chosen[:MOST_RANKS]))
    return named if len(chosen) <= MOST_RANKS else f"{named} and {len(chosen) - MOST_RANKS} more"


def sparkline(values: Sequence[float | None], width: int, low: float, high: float) -> str:
    """A sparkline of the newest `width` values, scaled between `low` and `high`."""

    def tick(value: float | None) -> str:
        if value is None:
            return "·"
        share = 0.5 if high <= low else (value - low) / (high - low)
        return TICKS[max(0, min(len(TICKS) - 1, round(share * (len(TICKS) - 1))))]

    return "".join(map(tick, values[-width:]))
