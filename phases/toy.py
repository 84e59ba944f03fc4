"""The default program without a model, for tests and demos: the same rows and storage, one deterministic trajectory for each task.

`./run.sh --program toy --num-nodes 3 ...` needs no vLLM and no model. Settings: `toy.tasks`, `toy.phase_s` (seconds of each working
phase), and `custom.speeds=[1,1,0.33]` (node 2 is three times slower than its weight says).
"""

from __future__ import annotations

from dataclasses import replace

from fsbarrier.decisions import NO_EVALUATION, RendezvousDecision, RolloutDecision
from fsbarrier.loader import load_module
from fsbarrier.program import RL_SLICES, Command, Context, Phase, Program, Steps, Value, Work
from fsbarrier.rollouts.sharing import share_out

# What this program does not define, it takes from the default one.
rl = load_module("rl")


def all_tasks(ctx: Context) -> list[int]:
    return list(range(ctx.settings.toy.tasks))


def assign_train(ctx: Context) -> Work:
    if ctx.settings.rollout_split == "eval-only":
        return Value({})
    work: Work = rl.decide_rollout(assigned(ctx))
    return work


def assigned(ctx: Context) -> RolloutDecision:
    decision: RolloutDecision = rl.share_out_train(ctx, [all_tasks(ctx)])
    return decision


def rollout_train(ctx: Context) -> Work:
    return rollout(ctx, ctx.find_decision("train_assign", RolloutDecision))


def decide_eval(ctx: Context) -> Work:
    if not rl.evaluates(ctx):
        return Value(NO_EVALUATION)
    work: Work = rl.decide_rollout(share_out(ctx, "test", rl.sampled_how(ctx, "test"), [all_tasks(ctx)]))
    return work


def rollout_eval(ctx: Context) -> Work:
    return rollout(ctx, rl.evaluating(ctx))


def rollout(ctx: Context, decision: RolloutDecision | None) -> Work:
    if decision is None or not decision.shares.get(ctx.node_rank):
        return Value({})
    speeds = ctx.settings.custom.get("speeds", ())
    speed = speeds[ctx.node_rank] if ctx.node_rank < len(speeds) else 1.0
    spec = rl.rollout_spec(ctx, decision)
    command = toy(ctx, "rollout", "rollout.log", **spec, speed=speed)
    return replace(command, extra=rl.report_of(spec))


def toy(ctx: Context, do: str, log: str, **fields: object) -> Command:
    return ctx.worker("toy", log, do=do, seconds=ctx.settings.toy.phase_s, **fields)


def aggregate_train(ctx: Context) -> Work:
    return Steps((toy(ctx, "wait", "aggregate.log"), rl.aggregate_train(ctx)))


def work_each(ctx: Context) -> Work:
    """Every node: a working phase without a result."""
    return toy(ctx, "wait", "work.log")


def prepare_batch(ctx: Context) -> Work:
    return Steps((toy(ctx, "wait", "update.log"), rl.meet(ctx)))


def choose_address(ctx: Context) -> Work:
    work: Work = rl.choose_address(ctx, assigned)
    return work


def update(ctx: Context) -> Work:
    """Every node that trains works, and the first one writes a new policy version; the others roll out ahead."""
    made, ahead = rl.updated(ctx), ctx.decision("update_ready", RendezvousDecision).ahead
    if ctx.node_rank not in ctx.trainers:
        return Steps((rollout(rl.of_next_iteration(ctx), ahead), Value(made.as_json())))
    out = ctx.paths.checkpoint(made.policy_version, ctx.generation)
    written = str(out) if ctx.node_rank == rl.meeting_at(ctx) else None
    command = toy(ctx, "update", "update.log", out=written, new_policy_version=made.policy_version)
    return replace(command, extra=made.as_json())


def publish_weights(ctx: Context) -> Work:
    return Steps((toy(ctx, "wait", "publish.log"), rl.publish_weights(ctx)))


#: what this program does otherwise than the default one, by the row's name
EACH = {
    "train_rollout": rollout_train,
    "eval_rollout": rollout_eval,
    "engine_stop": work_each,
    "update": update,
    "engine_start": work_each,
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
PROGRAM = Program("toy", ROWS, RL_SLICES)
