"""The toy program with one row whose program fails on a node, or on `all`: `custom.fails`, in row `custom.row`, `custom.times` times."""

from __future__ import annotations

import sys
from dataclasses import replace

from fsbarrier.loader import load_module
from fsbarrier.node import Node
from fsbarrier.program import Phase, Result, RowFunction
from fsbarrier.specs import Launch

toy = load_module("toy")
BAD = "import sys; print('row', sys.argv[1], 'comes to its bad end'); sys.exit(3)"


def perhaps_bad(row: Phase, function: RowFunction | None) -> RowFunction | None:
    def call(node: Node) -> Result:
        assert function is not None
        ctx, custom = node.context, node.context.settings.custom
        here = custom["fails"] in ("all", ctx.node_rank)
        if here and row.index == custom["row"] and ctx.attempt < custom["times"]:
            node.command(Launch((sys.executable, "-c", BAD, str(row.index)), "bad.log"))
        return function(node)

    return call if function is not None else None


def row(old: Phase) -> Phase:
    return replace(old, each=perhaps_bad(old, old.each), leader=perhaps_bad(old, old.leader))


PROGRAM = replace(toy.PROGRAM, name="failing", rows=tuple(row(old) for old in toy.PROGRAM.rows))
