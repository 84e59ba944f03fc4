"""A plain table for the terminal: `fsbarrier runs`, `fsbarrier jobs`."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fsbarrier.view.amounts import one_line

#: of a pipe, which has no width: programs and grep want whole names
PIPE_WIDTH = 400
#: what is left of the column that gives way
NARROWEST = 12


def print_listing(
    names: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    right: Collection[str],
    shortened: str,
    styles: Mapping[str, str],
) -> None:
    """Print `rows` under `names`. `right`: the columns of numbers; `shortened`: the one column that gives way on a narrow terminal;
    `styles`: of cells, by what they say."""
    texts = [[one_line(str(cell)) for cell in row] for row in rows]
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_edge=False)
    for name, *cells in zip(names, *texts, strict=True):
        widest = max(map(cell_len, (name, *cells)))
        gives_way = name == shortened
        table.add_column(
            name,
            justify="right" if name in right else "left",
            # rich narrows the columns whose text may be wrapped before all others.
            no_wrap=not gives_way,
            min_width=min(widest, NARROWEST) if gives_way else widest,
        )
    for row in texts:
        table.add_row(*(Text(cell, styles.get(cell, ""), no_wrap=True, overflow="ellipsis") for cell in row))
    Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False).print(table)
