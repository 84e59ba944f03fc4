"""The toy program with the default program's end of a run: its last policy is evaluated, too."""

from __future__ import annotations

from dataclasses import replace

from fsbarrier.decisions import RolloutDecision, RolloutReport
from fsbarrier.loader import load_module
from fsbarrier.node import Node
from fsbarrier.program import Phase, Program
from fsbarrier.rollouts.sharing import share_out

rl, toy = load_module("rl"), load_module("toy")


def decide_final(node: Node) -> RolloutDecision:
    following = rl.following(node.context)
    how = rl.sampled_how(following, "test")
    decision: RolloutDecision = rl.told(node, share_out(following, "test", how, [toy.all_tasks(following)]))
    return decision


def rollout_final(node: Node) -> RolloutReport | None:
    report: RolloutReport | None = toy.rollout_eval(held(node.seeing(rl.following(node.context))))
    return report


def end_iteration(node: Node) -> None:
    toy.work(held(node))


def held(node: Node) -> Node:
    """The node, on which the first generation's work takes long enough to be struck."""
    ctx, settings = node.context, node.context.settings
    if ctx.generation != 1 or "hold_s" not in settings.custom:
        return node
    slow = replace(settings.toy, phase_s=settings.custom["hold_s"])
    return node.seeing(replace(ctx, settings=replace(settings, toy=slow)))


PROGRAM: Program = replace(
    toy.PROGRAM,
    name="closing",
    rows=(*toy.PROGRAM.rows[:13], Phase(13, "iteration_end", each=end_iteration)),
    closing=(
        Phase(12, "engine_start", each=toy.work, leader=decide_final),
        Phase(13, "iteration_end", each=rollout_final, leader=rl.aggregate_final, resume="engine_start"),
    ),
)
