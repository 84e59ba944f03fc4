"""The default program without a model, for tests and demos: the same rows and storage, one deterministic trajectory for each task.

`./run.sh --program toy --num-nodes 3 ...` needs no vLLM and no model. Settings: `toy.tasks`, `toy.phase_s` (seconds of each working
phase), and `custom.speeds=[1,1,0.33]` (node 2 is three times slower than its weight says).
"""

from __future__ import annotations

from dataclasses import replace

from fsbarrier.decisions import NO_EVALUATION, RolloutDecision, UpdateDecision
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
    work: Work = rl.decide_rollout(rl.share_out_train(ctx, all_tasks(ctx)))
    return work


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
    if decision is None or not decision.shares[ctx.node_rank]:
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
    return Steps((toy(ctx, "wait", "update.log"), rl.open_rendezvous(ctx)))


def update(ctx: Context) -> Work:
    """Every node works; the leader writes a new policy version."""
    version = ctx.policy_version + 1
    out = ctx.paths.checkpoint(version, ctx.generation)
    written = str(out) if ctx.node_rank == ctx.leader else None
    command = toy(ctx, "update", "update.log", out=written, new_policy_version=version)
    return replace(command, extra=UpdateDecision(out.name, version).as_json())


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
    "weights_publish": publish_weights,
}
ROWS: tuple[Phase, ...] = tuple(
    replace(row, each=EACH.get(row.name, row.each), leader=LEADER.get(row.name, row.leader))
    for row in rl.PROGRAM.rows
)
PROGRAM = Program("toy", ROWS, RL_SLICES)
