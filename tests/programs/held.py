"""The toy program with one row that takes long in the first generation: there is time to strike a node in it.

`custom.hold` is that row's number. Its work is slowed down where the toy has some, else there is a wait before it. `custom.hold_s` says how
long that takes; with `custom.others_s`, that is how long it takes on all nodes but node 0.
"""

from __future__ import annotations

from dataclasses import replace

from fsbarrier.loader import load_module
from fsbarrier.node import Node
from fsbarrier.program import Phase, Result, RowFunction
from fsbarrier.specs import Launch

LONG_S = 8.0
toy = load_module("toy")


def held(row: Phase) -> Phase:
    if row.each is None and row.leader is not None:
        if row.name in ("train_assign", "eval_decide"):
            return replace(row, each=slow(None, row))
        return replace(row, leader=slow(row.leader, row))
    return replace(row, each=slow(row.each, row))


def works(node: Node, row: Phase) -> bool:
    """Whether the toy has a program in this row, which takes as long as the settings say."""
    if row.name in ("train_rollout", "eval_rollout"):
        name = {"train_rollout": "train_assign", "eval_rollout": "eval_decide"}[row.name]
        return bool((node.context.decided(name) or {}).get("shares", {}).get(str(node.context.node_rank)))
    return row.name in (
        "train_aggregate",
        "engine_stop",
        "batch_prepare",
        "update",
        "weights_publish",
        "engine_start",
    )


def slow(function: RowFunction | None, row: Phase) -> RowFunction:
    def call(node: Node) -> Result:
        ctx, settings = node.context, node.context.settings
        if (ctx.generation, settings.custom["hold"]) == (1, row.index):
            seconds = float(settings.custom.get("hold_s", LONG_S))
            if ctx.node_rank:
                seconds = float(settings.custom.get("others_s", seconds))
            if works(node, row):
                longer = replace(settings, toy=replace(settings.toy, phase_s=seconds))
                node = node.seeing(replace(ctx, settings=longer))
            else:
                node.command(Launch(("sleep", str(seconds)), "hold.log"))
        return function(node) if function is not None else None

    return call


PROGRAM = replace(toy.PROGRAM, name="held", rows=tuple(held(row) for row in toy.PROGRAM.rows))
