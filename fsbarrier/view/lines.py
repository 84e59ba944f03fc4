"""One line of an event journal, checked: whatever lies in a file, what comes out here has the types that it says. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any


@dataclass(frozen=True, slots=True)
class Line:
    """`at`: seconds since 1970 by the writer's wall clock (for display). `mono_s`: seconds by the monotonic clock that `clock`
    names; only lines of one clock can be told apart to the millisecond. `fields`: the event's own fields, unchecked.
    """

    event: str
    at: float
    mono_s: float
    node_rank: int
    generation: int
    iteration: int
    phase: int
    phase_name: str
    clock: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)


def parse(raw: object, clock: str = "") -> Line | None:
    """The line in a journal's JSON value; None for anything that is no event."""
    if not isinstance(raw, Mapping):
        return None
    event, at, mono_s = raw.get("event"), epoch(raw.get("time")), number(raw, "mono_s")
    if not isinstance(event, str) or at is None or mono_s is None:
        return None
    whole = [integer(raw, name) for name in ("node_rank", "generation", "iteration", "phase")]
    if any(value is None or value < 0 for value in whole):
        return None
    rank, generation, iteration, phase = (value or 0 for value in whole)
    return Line(event, at, mono_s, rank, generation, iteration, phase, text(raw, "phase_name"), clock, raw)


def number(fields: Mapping[str, Any], name: str) -> float | None:
    """A finite number among the fields, else None."""
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        result = float(value)
    except OverflowError:
        return None
    return result if math.isfinite(result) else None


def integer(fields: Mapping[str, Any], name: str) -> int | None:
    """A whole number of reasonable size among the fields, else None."""
    value = fields.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53 else None


def text(fields: Mapping[str, Any], name: str) -> str:
    """A text among the fields, else an empty one."""
    value = fields.get(name)
    return value if isinstance(value, str) else ""


def epoch(time: object) -> float | None:
    """Seconds since 1970 of an ISO 8601 time (UTC where it names no zone), else None."""
    if not isinstance(time, str):
        return None
    try:
        parsed = datetime.fromisoformat(time)
        return (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None
