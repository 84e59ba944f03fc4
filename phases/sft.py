"""Supervised fine-tuning: the default program's rows without rollouts. An iteration trains on the next examples of `train`.

`./run.sh --program sft --model M --data-path D ...`. The loss is the cross-entropy of what the assistant says (docs/fine_tuning.md).
`rollout.tasks` is the number of examples of an iteration, `rollout.seed` decides their order, and `--eval-interval` in which iterations
the new policy is tried on the examples of `test`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fsbarrier.decisions import BatchDecision, JsonRecord
from fsbarrier.loader import load_module
from fsbarrier.node import Node
from fsbarrier.program import Phase, Program
from fsbarrier.protocol.assign import sample_tasks
from fsbarrier.specs import ExamplesSpec

# This program takes everything that it does not define from the default one.
rl = load_module("rl")


@dataclass(frozen=True, slots=True)
class ExamplesDecision(JsonRecord):
    """Which examples an iteration takes (train_assign, eval_decide)."""

    examples: Sequence[int] = ()


def assign_train(node: Node) -> ExamplesDecision:
    """Leader: decide which examples this iteration trains on. Each pass over the file has an order of its own."""
    ctx, settings = node.context, node.context.settings.rollout
    count = ctx.tasks["train"]["count"]
    return ExamplesDecision(sample_tasks(count, settings.tasks, seed=settings.seed, iteration=ctx.iteration))


def decide_eval(node: Node) -> ExamplesDecision:
    """Leader: decide on which held-out examples the update tries its new policy; a session's last policy is always tried."""
    ctx, settings = node.context, node.context.settings
    last = settings.eval_interval > 0 and ctx.iteration == settings.iterations
    if not (last or rl.evaluates(ctx)):
        return ExamplesDecision()
    count = ctx.tasks["test"]["count"]
    return ExamplesDecision(sample_tasks(count, settings.eval.tasks, seed=0, iteration=1))


def prepare_batch(node: Node) -> BatchDecision:
    """Leader: have the examples tokenized, and the tokens that are trained on marked."""
    ctx = node.context
    batch = ctx.paths.batch(ctx.iteration, ctx.generation)
    rows = {"train": "train_assign", "test": "eval_decide"}
    decided = {split: ctx.find_decision(row, ExamplesDecision) for split, row in rows.items()}
    spec = ExamplesSpec(
        ctx.identity,
        policy_version=ctx.policy_version,
        model=ctx.policy.model,
        batch=batch,
        files={split: Path(source["path"]) for split, source in ctx.tasks.items()},
        examples={split: item.examples if item is not None else () for split, item in decided.items()},
    )
    node.event("batch_prepared", {"batch": batch.name}, node.run(spec))
    decision: BatchDecision = rl.with_port(node, batch.name)
    return decision


#: what each row does; the others are barriers
EACH = {"batch_prepare": rl.open_port, "update_ready": rl.probe_addresses, "update": rl.update}
LEADER = {
    "train_assign": assign_train,
    "eval_decide": decide_eval,
    "batch_prepare": prepare_batch,
    "update_ready": rl.choose_address,
    "weights_publish": rl.publish_weights,
}
ROWS: tuple[Phase, ...] = tuple(
    replace(row, each=EACH.get(row.name), leader=LEADER.get(row.name)) for row in rl.PROGRAM.rows
)
PROGRAM = Program(
    "sft",
    ROWS,
    needs=frozenset({"model", "examples"}),
    defaults={
        "rollout.tasks": 1024,
        # Answers are given, not sampled, so they need no room in engine.max_model_len.
        "rollout.max_tokens": 1,
        "trainer.minibatch": 128,
        "trainer.epochs": 1,
        "trainer.keep": "process",
        "optimizer.lr": 1e-5,
    },
    fixed={
        # The loss is the likelihood of an answer, with the weight 1.
        "algorithm.loss": "rft",
        "algorithm.kl_coef": 0.0,
        "algorithm.kl_in_reward": 0.0,
        "algorithm.mismatch": "none",
        "rollout.temperature": 1.0,
        "rollout.ahead": 0,
        # There is no engine.
        "debug_mode": True,
        "engine.url": None,
        "eval.sets": {},
        "train.sets": {},
        "train.reward_weights": (),
    },
)
