"""The toy program with the default program's end of a run: its last policy is evaluated, too."""

from __future__ import annotations

from dataclasses import replace

from fsbarrier.loader import load_module
from fsbarrier.program import Command, Context, Phase, Program, Work
from fsbarrier.rollouts.sharing import share_out

rl, toy = load_module("rl"), load_module("toy")


def decide_final(ctx: Context) -> Work:
    following = rl.following(ctx)
    how = rl.sampled_how(following, "test")
    work: Work = rl.decide_rollout(share_out(following, "test", how, [toy.all_tasks(following)]))
    return work


def rollout_final(ctx: Context) -> Work:
    return held(ctx, toy.rollout_eval(rl.following(ctx)))


def end_iteration(ctx: Context) -> Work:
    return held(ctx, toy.work_each(ctx))


def held(ctx: Context, work: Work) -> Work:
    """The work, in which the first generation stays long enough to be struck."""
    if isinstance(work, Command) and ctx.generation == 1 and "hold_s" in ctx.settings.custom:
        return replace(work, spec={**work.spec, "seconds": ctx.settings.custom["hold_s"]})
    return work


PROGRAM: Program = replace(
    toy.PROGRAM,
    name="closing",
    rows=(*toy.PROGRAM.rows[:13], Phase(13, "iteration_end", each=end_iteration)),
    closing=(
        Phase(12, "engine_start", each=toy.work_each, leader=decide_final),
        Phase(13, "iteration_end", each=rollout_final, leader=rl.aggregate_final, resume="engine_start"),
    ),
)
