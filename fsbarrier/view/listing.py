"""A plain table for the terminal: `fsbarrier runs`, `fsbarrier jobs`."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fsbarrier.wording import one_line

#: width for a pipe, so that names are not shortened
PIPE_WIDTH = 400


def print_listing(
    names: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    right: Collection[str],
    shortened: str,
    styles: Mapping[str, str],
) -> None:
    """Print `rows` under `names`. `right`: right-aligned columns; `shortened`: the column to shorten on a narrow terminal;
    `styles`: cell text -> style."""
    texts = [[one_line(str(cell)) for cell in row] for row in rows]
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_edge=False)
    for name in names:
        # rich narrows only columns whose text may wrap.
        table.add_column(name, justify="right" if name in right else "left", no_wrap=name != shortened)
    for row in texts:
        table.add_row(*(Text(cell, styles.get(cell, ""), no_wrap=True, overflow="ellipsis") for cell in row))
    Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False).print(table)
