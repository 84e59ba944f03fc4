"""The toy program with one row whose program fails on a node, or on `all`: `custom.fails`, in row `custom.row`, `custom.times` times."""

from __future__ import annotations

import sys
from dataclasses import replace

from fsbarrier.loader import load_module
from fsbarrier.program import Builder, Command, Context, Phase, Work

toy = load_module("toy")
BAD = "import sys; print('row', sys.argv[1], 'comes to its bad end'); sys.exit(3)"


def perhaps_bad(row: Phase, builder: Builder | None) -> Builder | None:
    def build(ctx: Context) -> Work:
        assert builder is not None
        custom = ctx.settings.custom
        here = custom["fails"] in ("all", ctx.node_rank)
        if here and row.index == custom["row"] and ctx.attempt < custom["times"]:
            return Command((sys.executable, "-c", BAD, str(row.index)), "bad.log")
        return builder(ctx)

    return build if builder is not None else None


def row(old: Phase) -> Phase:
    return replace(old, each=perhaps_bad(old, old.each), leader=perhaps_bad(old, old.leader))


PROGRAM = replace(toy.PROGRAM, name="failing", rows=tuple(row(old) for old in toy.PROGRAM.rows))
