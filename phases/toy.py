"""The default program without a model, for tests and demos: the same rows and storage, one deterministic trajectory for each task.

`./run.sh --program toy --num-nodes 3 ...` needs no vLLM and no model. Settings: `toy.tasks`, `toy.phase_s` (seconds of each working
phase), and `custom.speeds=[1,1,0.33]` (node 2 is three times slower than its weight says).
"""

from __future__ import annotations

from dataclasses import replace

from fsbarrier.context import Context
from fsbarrier.decisions import (
    NO_EVALUATION,
    BatchDecision,
    MergeDecision,
    PublishDecision,
    RendezvousDecision,
    RolloutDecision,
    RolloutReport,
)
from fsbarrier.loader import load_module
from fsbarrier.node import Node
from fsbarrier.program import RL_SLICES, Phase, Program
from fsbarrier.rollouts.rollout_spec import RolloutRound
from fsbarrier.rollouts.sharing import share_out
from fsbarrier.workers.toy import ToyRollout, ToyUpdate, ToyWait

# This program takes everything that it does not define from the default one.
rl = load_module("rl")


def all_tasks(ctx: Context) -> list[int]:
    return list(range(ctx.settings.toy.tasks))


def assign_train(node: Node) -> RolloutDecision | None:
    if node.context.settings.rollout_split == "eval-only":
        return None
    decision: RolloutDecision = rl.told(node, assigned(node.context))
    return decision


def assigned(ctx: Context) -> RolloutDecision:
    decision: RolloutDecision = rl.share_out_train(ctx, [all_tasks(ctx)])
    return decision


def rollout_train(node: Node) -> RolloutReport | None:
    return rollout(node, node.context.find_decision("train_assign", RolloutDecision))


def decide_eval(node: Node) -> RolloutDecision:
    ctx = node.context
    if not rl.evaluates(ctx):
        return NO_EVALUATION
    shared: RolloutDecision = share_out(ctx, "test", rl.sampled_how(ctx, "test"), [all_tasks(ctx)])
    decision: RolloutDecision = rl.told(node, shared)
    return decision


def rollout_eval(node: Node) -> RolloutReport | None:
    return rollout(node, rl.evaluating(node.context))


def rollout(node: Node, decision: RolloutDecision | None) -> RolloutReport | None:
    ctx = node.context
    if decision is None or not decision.shares.get(ctx.node_rank):
        return None
    speeds = ctx.settings.custom.get("speeds", ())
    speed = speeds[ctx.node_rank] if ctx.node_rank < len(speeds) else 1.0
    whole = RolloutRound(decision.wanted, {}, rl.sampling_of(ctx.settings.rollout))
    rollout_spec = rl.rollout_spec(ctx, decision, [whole])
    spec = ToyRollout(ctx.identity, rollout_spec, ctx.settings.toy.phase_s, speed)
    return node.run(spec).report


def work(node: Node) -> None:
    """Every node: a working phase without a result."""
    node.run(ToyWait(node.context.identity, node.context.settings.toy.phase_s))


def aggregate_train(node: Node) -> MergeDecision | None:
    work(node)
    merged: MergeDecision | None = rl.aggregate_train(node)
    return merged


def prepare_batch(node: Node) -> BatchDecision:
    work(node)
    decision: BatchDecision = rl.with_port(node)
    return decision


def choose_address(node: Node) -> RendezvousDecision:
    chosen: RendezvousDecision = rl.choose_address(node, assigned)
    return chosen


def update(node: Node) -> None:
    """Every node that trains works, and the first one writes a new policy version; the others roll out ahead."""
    ctx = node.context
    rendezvous = ctx.decision("update_ready", RendezvousDecision)
    made = rendezvous.makes
    if ctx.node_rank in ctx.trainers:
        out = ctx.named_in(ctx.paths.checkpoints, made.folder)
        written = out if ctx.node_rank == rl.meeting_at(ctx) else None
        node.run(ToyUpdate(ctx.identity, ctx.settings.toy.phase_s, written, made.policy_version))
    else:
        rollout(node.seeing(rl.of_next_iteration(ctx)), rendezvous.ahead)


def publish_weights(node: Node) -> PublishDecision:
    work(node)
    published: PublishDecision = rl.publish_weights(node)
    return published


#: the rows that differ from the default program's, by name
EACH = {
    "train_rollout": rollout_train,
    "eval_rollout": rollout_eval,
    "engine_stop": work,
    "update": update,
    "engine_start": work,
}
LEADER = {
    "train_assign": assign_train,
    "train_aggregate": aggregate_train,
    "eval_decide": decide_eval,
    "batch_prepare": prepare_batch,
    "update_ready": choose_address,
    "weights_publish": publish_weights,
}
ROWS: tuple[Phase, ...] = tuple(
    replace(row, each=EACH.get(row.name, row.each), leader=LEADER.get(row.name, row.leader))
    for row in rl.PROGRAM.rows
)
PROGRAM = Program("toy", ROWS, RL_SLICES, needs=frozenset({"merge"}))
