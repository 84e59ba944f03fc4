"""HTML building blocks of the report. They escape all values that come from the run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from fsbarrier.view.amounts import one_line

#: Phases below this share of the time are not listed in a legend.
LEAST_SHARE = 0.002


def section(title: str, body: str) -> str:
    """A section of the page; "" if its body is empty."""
    return f"<section><h2>{escape(title)}</h2>{body}</section>" if body else ""


def table(head: Sequence[str], body: Iterable[Sequence[str]], left: Sequence[int] = ()) -> str:
    """A table of texts; the columns in `left` are left-aligned."""

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=left' if index in left else ''}>{escape(one_line(cell))}</{tag}>"
            for index, cell in enumerate(row)
        )

    rows = "".join(f"<tr>{cells('td', row)}</tr>" for row in body)
    return f'<div class="scroll"><table><thead><tr>{cells("th", head)}</tr></thead><tbody>{rows}</tbody></table></div>'


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """A chart's legend; entries are (class in the style sheet, name)."""
    listed = "".join(f'<li><i class="{style}"></i>{escape(name)}</li>' for style, name in entries)
    return f'<ul class="legend">{listed}</ul>'


def chart(svg: str, *, newest: bool = False) -> str:
    """A chart in a box that scrolls on a narrow screen. `newest`: scroll to its right end, which shows the newest iterations."""
    style = "scroll chart newest" if newest else "scroll chart"
    return f'<div class="{style}">{svg}</div>' if svg else ""
