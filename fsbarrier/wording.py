"""How values are written for people: numbers with their nouns, sizes, durations, shares, and texts that are safe to print. Pure.

Text from files may hold escape sequences and passwords. All commands print it through `printable`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import datetime

#: maximum number of node ranks to list
MOST_RANKS = 6
TICKS = "▁▂▃▄▅▆▇█"
#: terminal escape sequences, introduced by ESC or a C1 control character
_ORDERS = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|(?:\x1b\]|\x9d)[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?|\x1b[@-Z\\^_]"
)
_BREAKS = "\t\n\v\f\r\x1c\x1d\x1e\x1f\x85\u2028\u2029"
#: A user's name and password stand in a URL between `//` and `@`. Their length is limited so that a hostile text cannot slow the search.
_PASSWORD = re.compile(r"(?<=://)([^\s/:@\"']{0,200}):[^\s/@\"']{1,500}@")


def counted(number: int, noun: str, nouns: str = "") -> str:
    """ "1 node", "3 nodes". `nouns`: the plural, where it is not the noun with an s."""
    return f"{number} {noun if number == 1 else nouns or f'{noun}s'}"


def gib(amount: int) -> str:
    """Bytes as "1.5 GiB"."""
    return f"{amount / (1 << 30):.1f} GiB"


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


def setting_text(value: object) -> str:
    """A setting's value as people would type it."""
    if isinstance(value, list | tuple):
        return ",".join(setting_text(item) for item in value)
    if isinstance(value, float):
        return f"{value:g}"
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


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


def without_passwords(text: str) -> str:
    """The text with *** in place of passwords in URLs, as in https://user:password@host."""
    return _PASSWORD.sub(r"\1:***@", text) if "://" in text and "@" in text else text


def printable(text: str) -> str:
    """The text as one line without control characters, escape sequences, bidirectional controls, and passwords in URLs.

    Line breaks and tabs become blanks.
    """
    text = without_passwords(text)
    if text.isprintable():
        return text
    text = _ORDERS.sub("", text)
    return "".join([c if c.isprintable() else " " if c in _BREAKS else "" for c in text])


def visible(text: object) -> str:
    """A text as it is, with the escape (such as `\\x1b`) of every character that would not be seen, or would change how others are shown.

    These are control characters but tabs and line ends, bidirectional controls, and halves of surrogate pairs, which UTF-8 cannot hold.
    """
    said = str(text)
    if said.isprintable():
        return said
    return "".join([c if c.isprintable() or c in "\n\t" else _escaped(c) for c in said])


def _escaped(character: str) -> str:
    number = ord(character)
    if number < 0x100:
        return "\\r" if character == "\r" else f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
