"""The toy program with one row that takes long in the first generation: there is time to strike a node in it.

`custom.hold` is that row's number. Its work is slowed down where the toy has some, else there is a wait before it. `custom.hold_s` says how
long that takes; with `custom.others_s`, that is how long it takes on all nodes but node 0.
"""

from __future__ import annotations

from dataclasses import replace

from fsbarrier.loader import load_module
from fsbarrier.program import Builder, Command, Context, Phase, Steps, Value, Work

LONG_S = 8.0
toy = load_module("toy")


def held(row: Phase) -> Phase:
    builder = row.each or row.leader
    if row.each is None and row.leader is not None and row.name in ("train_assign", "eval_decide"):
        return replace(row, each=slow(None, row.index))
    if row.each is None and row.leader is not None:
        return replace(row, leader=slow(builder, row.index))
    return replace(row, each=slow(row.each, row.index))


def slow(builder: Builder | None, index: int) -> Builder:
    def build(ctx: Context) -> Work:
        work = builder(ctx) if builder is not None else Value({})
        if (ctx.generation, ctx.settings.custom["hold"]) != (1, index):
            return work
        seconds = float(ctx.settings.custom.get("hold_s", LONG_S))
        if ctx.node_rank:
            seconds = float(ctx.settings.custom.get("others_s", seconds))
        slowed, found = slowed_down(work, seconds)
        return slowed if found else Steps((Command(("sleep", str(seconds)), "hold.log", result=False), work))

    return build


def slowed_down(work: Work, seconds: float) -> tuple[Work, bool]:
    """The work with each of its toy programs taking long, and whether there was any."""
    match work:
        case Command(spec=spec) if "seconds" in spec:
            return replace(work, spec={**spec, "seconds": seconds}), True
        case Steps(works):
            inner = [slowed_down(one, seconds) for one in works]
            return Steps(tuple(one for one, _ in inner)), any(found for _, found in inner)
    return work, False


PROGRAM = replace(toy.PROGRAM, name="held", rows=tuple(held(row) for row in toy.PROGRAM.rows))
