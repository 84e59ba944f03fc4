"""Makes the parts of the page that are plain HTML. parts.html.jinja has them, and escapes every value that comes from a run.

The browser sanitizes them once more (NiceGUI's `ui.html`).
"""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from fsbarrier.wording import amount, clock_time, duration, one_line, percent, ranks, short, visible

FOLDER = Path(__file__).parent
STYLE = (FOLDER / "style.css").read_text(encoding="utf-8")


def part(name: str, *args: object, **named: object) -> str:
    """The HTML of one of the macros in parts.html.jinja."""
    return str(getattr(_parts(), name)(*args, **named))


def ago(seconds: float | None) -> str:
    """A time span in its largest unit: 5 min ago."""
    return "–" if seconds is None else f"{' '.join(duration(seconds).split()[:2])} ago"


@cache
def _parts() -> Any:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = {
        "amount": amount,
        "duration": duration,
        "line": one_line,
        "percent": percent,
        "ranks": ranks,
        "short": short,
        "visible": visible,
        "clock": clock_time,
        "ago": ago,
    }
    environment.filters.update(filters)
    environment.globals["now"] = time.time
    return environment.get_template("parts.html.jinja").module
