"""The pieces that the report's sections are made of. Whatever came from a run is escaped here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from fsbarrier.view.amounts import one_line

#: Phases below this share of the time are left out of a legend.
LEAST_SHARE = 0.002


def section(title: str, body: str) -> str:
    """A section of the page; nothing where it would be empty."""
    return f"<section><h2>{escape(title)}</h2>{body}</section>" if body else ""


def table(head: Sequence[str], body: Iterable[Sequence[str]], left: Sequence[int] = ()) -> str:
    """A table of texts; the columns in `left` are no numbers."""

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=left' if index in left else ''}>{escape(one_line(cell))}</{tag}>"
            for index, cell in enumerate(row)
        )

    rows = "".join(f"<tr>{cells('td', row)}</tr>" for row in body)
    return f'<div class="scroll"><table><thead><tr>{cells("th", head)}</tr></thead><tbody>{rows}</tbody></table></div>'


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """What the colours of a chart mean, as (class in the style sheet, name)."""
    listed = "".join(f'<li><i class="{style}"></i>{escape(name)}</li>' for style, name in entries)
    return f'<ul class="legend">{listed}</ul>'


def chart(svg: str, *, newest: bool = False) -> str:
    """A chart in a box that scrolls on a narrower screen. `newest`: its right end is seen first, where the newest iterations are."""
    style = "scroll chart newest" if newest else "scroll chart"
    return f'<div class="{style}">{svg}</div>' if svg else ""
