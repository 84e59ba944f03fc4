"""The toy program with the default program's end of a run: its last policy is evaluated, too."""

from __future__ import annotations

from dataclasses import replace

from fsbarrier.loader import load_module
from fsbarrier.program import Command, Context, Phase, Program, Value, Work

rl, toy = load_module("rl"), load_module("toy")


def decide_final(ctx: Context) -> Work:
    following = rl.following(ctx)
    return Value({"evaluate": True, **rl.share_out(following, "test", toy.all_tasks(following))})


def rollout_final(ctx: Context) -> Work:
    work: Work = toy.rollout_eval(rl.following(ctx))
    if isinstance(work, Command) and ctx.generation == 1 and "hold_s" in ctx.settings.custom:
        # There is time to strike a node in it.
        work = replace(work, spec={**work.spec, "seconds": ctx.settings.custom["hold_s"]})
    return work


PROGRAM: Program = replace(
    toy.PROGRAM,
    name="closing",
    closing=(
        Phase(12, "engine_start", each=toy.work_each, leader=decide_final),
        Phase(13, "iteration_end", each=rollout_final, leader=rl.aggregate_final, resume="engine_start"),
    ),
)
