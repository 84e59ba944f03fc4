"""The default program: what an iteration of synchronous RL post-training is.

Fourteen rows, and for each row small pure functions that say what a node runs in it. Copy this file and edit it:
`./run.sh --program ./mine.py`. A row's functions see a Context (fsbarrier/program.py) and return Work; they do nothing themselves.
The file is longer than others, so that it can be copied as one.
"""

from __future__ import annotations

import hashlib
import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path

from fsbarrier.errors import UsageError
from fsbarrier.program import (
    RL_SLICES,
    Command,
    Context,
    Keep,
    OpenRendezvous,
    Phase,
    ProbeAddresses,
    Program,
    PublishFile,
    PublishWeights,
    ReleaseEngine,
    ServeWeights,
    Steps,
    Value,
    Work,
    adopt_parts,
    adoption_events,
    fill_placeholders,
)
from fsbarrier.protocol.assign import refill_tasks, sample_tasks, split_by_weight
from fsbarrier.protocol.facts import JsonObject, Payload
from fsbarrier.rundir.names import SPLITS
from fsbarrier.settings.sections import EvalSet, RolloutSettings

NOTHING = Value({})
SAMPLING_SETTINGS = ("samples", "temperature", "top_p", "top_k", "max_tokens")

# --- rollouts (1-6) ---------------------------------------------------------------------------------------------------


def assign_train(ctx: Context) -> Work:
    """Leader: which tasks this iteration rolls out, and who starts with which. What is already on disk is adopted by name."""
    if ctx.settings.rollout_split == "eval-only":
        return NOTHING
    settings = ctx.settings.rollout
    there, wanted = ctx.tasks["train"]["count"], math.ceil(settings.tasks * settings.oversample)
    sampled = sample_tasks(there, wanted, seed=settings.seed, iteration=ctx.iteration)
    more = settings.oversample > 1 or settings.max_refills
    return Value(share_out_train(ctx, sampled, keep=settings.tasks if more else None))


def share_out_train(ctx: Context, sampled: list[int], keep: int | None = None) -> dict[str, object]:
    """Train tasks to ranks, those that the last iteration cut off first. Of more than `keep` groups the merge keeps so many.

    With refills they come in rounds, and `rounds` says how many tasks each has; fsbarrier/rollouts/refills.py says which are done.
    """
    settings = ctx.settings.rollout
    carried = carried_over(ctx) if settings.carry_over else []
    again = set(carried)
    first = carried + [task for task in sampled if task not in again]
    there = ctx.tasks.get("train", {"count": 0})["count"]
    # Where the merge keeps all groups it drops none, so there is nothing to make up for.
    most = settings.max_refills if keep is not None else 0
    refills = refill_tasks(there, first, len(sampled), most=most, seed=settings.seed, iteration=ctx.iteration)
    rounds = [first, *refills]
    decision = share_out(ctx, "train", list(chain.from_iterable(rounds)), rounds)
    decision |= {"keep": keep, "carried": carried}
    return {**decision, "rounds": [len(tasks) for tasks in rounds]} if refills else decision


def carried_over(ctx: Context) -> list[int]:
    """The tasks that were cut off at the end of the iteration before."""
    last = ctx.decisions.get("train_aggregate")
    return last["value"].get("cut_off", []) if last and last["iteration"] == ctx.iteration - 1 else []


def share_out(
    ctx: Context, split: str, wanted: list[int], rounds: Sequence[list[int]] | None = None
) -> dict[str, object]:
    """Tasks to ranks by weight, less those whose groups an earlier attempt at this iteration left whole on disk.

    Groups that could not be judged are shared out too, to be judged again. `fixed_shares` says why each node does its own share
    and no more; "" where those that run out take over from the slowest. `rounds`: where the tasks come in several, these, each shared
    out by itself. `with_signal`: of each round, how many of the groups that need not be done have rewards that differ.
    """
    # An earlier version of this program did not say how.
    ways = ("", sampled_how(ctx, split))
    parts = [
        part
        for part in ctx.inventory(split)
        if part.policy == ctx.policy_identity and part.sampled_how in ways
    ]
    adopted, judge_again = adopt_parts(parts, wanted)
    missing = set(wanted).difference(*(part["tasks"] for part in adopted))
    signal_in = {part.path: part.with_signal for part in parts}
    with_signal = {task for part in adopted for task in part["tasks"] if task in signal_in[part["path"]]}
    rounds = rounds or [wanted]
    each = [split_by_weight([task for task in tasks if task in missing], ctx.weights) for tasks in rounds]
    shares = [list(chain.from_iterable(of_one_node)) for of_one_node in zip(*each, strict=True)]
    fixed = "rollout.take_over is off" if not ctx.settings.rollout.take_over else ctx.claims_unsafe()
    events = [{"event": "shares_fixed", "why": fixed}] if fixed and len(shares) > 1 else []
    events += adoption_events(split, adopted)
    return {
        "wanted": wanted,
        "shares": {str(rank): share for rank, share in zip(ctx.ranks, shares, strict=True)},
        "adopted": adopted,
        "judge_again": judge_again,
        "with_signal": [len(with_signal.intersection(tasks)) for tasks in rounds],
        "fixed_shares": fixed,
        **({"events": events} if events else {}),
    }


def rollout_train(ctx: Context) -> Work:
    """Every node: its share of the tasks against the local vLLM, then what slower nodes have not begun."""
    assigned = ctx.decided("train_assign")
    if not assigned:
        return NOTHING
    source, sampling = ctx.tasks["train"], sampling_of(ctx.settings.rollout)
    left = iter(assigned["wanted"])
    rounds: list[JsonObject] = [
        {"tasks": list(islice(left, count)), "task_file": source["path"], "sampling": sampling}
        for count in assigned.get("rounds", [len(assigned["wanted"])])
    ]
    return rollout(ctx, "train", assigned, rounds)


def sampled_how(ctx: Context, split: str) -> str:
    """Names all that decides how this iteration's tasks are answered. Example: the evaluation that ended a session had one sample a task,
    and the next session, whose first iteration would adopt it, asks for eight."""
    settings = ctx.settings
    if split == "train":
        return text_digest([sampling_of(settings.rollout)])
    return text_digest([[name, one.as_json()] for name, one in settings.eval_sets.items()])


def text_digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def sampling_of(settings: RolloutSettings | EvalSet) -> dict[str, object]:
    return {name: getattr(settings, name) for name in SAMPLING_SETTINGS}


def rollout(ctx: Context, split: str, assigned: Payload, rounds: list[JsonObject]) -> Work:
    """`rounds`: which tasks are sampled how, as fsbarrier/rollouts/rounds.py reads it."""
    if not assigned["shares"][str(ctx.node_rank)]:
        return NOTHING
    policy = ctx.policy
    command = ctx.worker(
        "rollout",
        "rollout.log",
        **share_of(ctx, split, assigned),
        rounds=rounds,
        model=str(policy.model),
        engine="{engine}",
    )
    return Steps((ServeWeights(policy.model, policy.version, ctx.threads, ctx.policy_identity), command))


def share_of(ctx: Context, split: str, assigned: Payload) -> dict[str, object]:
    """What a rollout program is told of its share: where it begins, what it may take over, when it may end, where results go."""
    settings, rank = ctx.settings.rollout, ctx.node_rank
    ends_early = split == "train" and settings.completion_threshold < 1
    return {
        "split": split,
        "tasks": assigned["shares"][str(rank)],
        "shares": assigned["shares"],
        "fixed_shares": assigned["fixed_shares"],
        "claims": str(ctx.paths.claims(ctx.generation, ctx.iteration, split)),
        "old_claims": [str(ctx.paths.claims(ctx.generation, ctx.iteration - 1, name)) for name in SPLITS],
        "completion_threshold": settings.completion_threshold if ends_early else 1.0,
        "grace_s": settings.grace_s,
        "there": sum(len(part["tasks"]) for part in assigned["adopted"]),
        "judge_again": adopted_parts(ctx, split, assigned.get("judge_again", [])),
        "expected": assigned["wanted"],
        "keep": assigned.get("keep"),
        "refills": {name: assigned[name] for name in ("rounds", "with_signal")}
        if "rounds" in assigned
        else None,
        "part": str(ctx.paths.part(split, ctx.iteration, rank, ctx.generation, ctx.incarnation)),
        "prefix": f"{split}-g{ctx.generation:04d}n{rank:04d}i{ctx.incarnation:04d}",
        "checkpoint": str(ctx.paths.rank_checkpoint(split, ctx.iteration, rank)),
        "policy_version": ctx.policy_version,
        "policy": ctx.policy_identity,
        "sampled_how": sampled_how(ctx, split),
    }


def aggregate_train(ctx: Context) -> Work:
    """Leader: merge the shards into one file."""
    return aggregate(ctx, "train", ctx.decided("train_assign"), "train_rollout")


def aggregate(ctx: Context, split: str, assigned: Payload | None, rolled_out_in: str) -> Work:
    if not assigned:
        return NOTHING
    reports, folder = ctx.reports(rolled_out_in), ctx.paths.trajectories(split)
    parts = adopted_parts(ctx, split, assigned["adopted"])
    parts += [
        {
            "path": str(ctx.named_in(folder, report["part"])),
            "valid_bytes": None,
            "tasks": report.get("tasks", assigned["shares"][str(rank)]),
        }
        for rank in ctx.ranks
        if "part" in (report := reports.get(rank, {}))
    ]
    begun, wanted = rounds_begun(assigned, reports)
    cut_off = tasks_cut_off(ctx, wanted, parts, reports)
    without = set(cut_off)
    merged = ctx.paths.merged_by(split, ctx.iteration, ctx.generation)
    event: dict[str, object] = {
        "split": split,
        "policy_version": ctx.policy_version,
        "policy": ctx.policy_identity,
    }
    event |= {"final": True} if ctx.phase.name == "iteration_end" else {}
    known = {
        "merged": str(merged),
        "cut_off": cut_off,
        "groups_cut_off": len(cut_off),
        "groups_taken_over": sum(report.get("taken_over", 0) for report in reports.values()),
        **(
            {"earlier": earlier_merges(ctx)} if split == "train" else {"sampled_how": sampled_how(ctx, split)}
        ),
        **({"rounds": begun} if "rounds" in assigned else {}),
        **event,
    }
    command = Command(
        (ctx.python, "-P", "-m", "fsbarrier.aggregate", "--spec", "{spec}"),
        "aggregate.log",
        spec={
            **ctx.identity(),
            "parts": parts,
            "out": str(merged),
            "expected": [task for task in wanted if task not in without],
            "keep": assigned.get("keep"),
            "success": success_by_set(ctx) if split == "test" else None,
            "metadata": {
                "run_id": ctx.run_id,
                "iteration": ctx.iteration,
                "generation": ctx.generation,
                "cut_off": cut_off,
                "carried": assigned.get("carried", []),
                **event,
            },
        },
        extra=known,
        event="rolled_out" if split == "train" else "evaluated",
    )
    return Steps((command, PublishFile(merged, ctx.paths.merged(split, ctx.iteration))))


def adopted_parts(ctx: Context, split: str, adopted: list[JsonObject]) -> list[JsonObject]:
    """Parts that a decision names, where they lie for this node."""
    folder = ctx.paths.trajectories(split)
    return [{**part, "path": str(ctx.named_in(folder, part["path"]))} for part in adopted]


def earlier_merges(ctx: Context) -> list[str]:
    """The merged files of the iterations before, the last one first, as many as an update may draw from beside the new one."""
    last, most = ctx.latest("train_aggregate"), ctx.settings.update.recency - 1
    return [last["merged"], *last.get("earlier", ())][:most] if last else []


def rounds_begun(assigned: Payload, reports: Mapping[int, Payload]) -> tuple[int, list[int]]:
    """How many rounds the nodes did until there was enough, and the tasks of those."""
    counts = assigned.get("rounds", [len(assigned["wanted"])])
    # Where no node had anything to do, an older generation has left all of it.
    begun = max((report["rounds"] for report in reports.values() if "rounds" in report), default=len(counts))
    return begun, assigned["wanted"][: sum(counts[:begun])]


def tasks_cut_off(
    ctx: Context, wanted: list[int], parts: list[JsonObject], reports: Mapping[int, Payload]
) -> list[int]:
    """The tasks that no part holds because the phase ended early. If any other task is missing, the merge fails."""
    done = {task for part in parts for task in part["tasks"]}
    left = [task for task in wanted if task not in done]
    enough = ctx.settings.rollout.completion_threshold * len(wanted)
    ended = any(report.get("ended_early") for report in reports.values())
    return left if ended and len(wanted) - len(left) >= enough else []


def evaluates(ctx: Context) -> bool:
    """Whether this iteration evaluates."""
    interval = ctx.settings.eval_interval
    due = interval == 1 or (interval > 1 and ctx.iteration % interval == 1)
    return due and ctx.settings.rollout_split != "train-only"


def decide_eval(ctx: Context) -> Work:
    """Leader: does this iteration evaluate, and who takes which held-out task. All nodes read this one answer."""
    if not evaluates(ctx):
        return Value({"evaluate": False})
    return Value(share_out_eval(ctx))


def share_out_eval(ctx: Context) -> dict[str, object]:
    """Held-out tasks to ranks, each set by itself. The tasks of all sets are numbered as if they stood in one file."""
    rounds = [one["tasks"] for one in eval_rounds(ctx)]
    return {"evaluate": True, **share_out(ctx, "test", list(chain.from_iterable(rounds)), rounds)}


def eval_rounds(ctx: Context) -> list[JsonObject]:
    """One for each set of held-out tasks."""
    rounds: list[JsonObject] = []
    first = 0
    for name, one in ctx.settings.eval_sets.items():
        source = ctx.tasks[name]
        chosen = sample_tasks(source["count"], one.tasks or 0, seed=0, iteration=1)
        rounds.append(
            {
                "tasks": [first + index for index in chosen],
                "first": first,
                "task_file": source["path"],
                "sampling": sampling_of(one),
                "eval_set": name if ctx.settings.eval.sets else "",
            }
        )
        first += source["count"]
    return rounds


def success_by_set(ctx: Context) -> dict[str, float]:
    """From which reward on a trajectory counts as solved, by the name of the set; "" where there is one."""
    named = ctx.settings.eval.sets
    return {name if named else "": one.success or 0.0 for name, one in ctx.settings.eval_sets.items()}


def evaluating(ctx: Context) -> Payload | None:
    decision = ctx.decided("eval_decide")
    return decision if decision and decision["evaluate"] else None


def rollout_eval(ctx: Context) -> Work:
    """Every node, if decided: its share of the held-out tasks."""
    decided = evaluating(ctx)
    return rollout(ctx, "test", decided, eval_rounds(ctx)) if decided else NOTHING


def aggregate_eval(ctx: Context) -> Work:
    """Leader, once all are done: merge the evaluation."""
    return aggregate(ctx, "test", evaluating(ctx), "eval_rollout")


# --- update (7-13) ----------------------------------------------------------------------------------------------------


def stop_engine(ctx: Context) -> Work:
    """Every node: the accelerator's memory goes to the trainer."""
    return ReleaseEngine()


def prepare_batch(ctx: Context) -> Work:
    """Leader: the training batch; and a port on which the others try the leader's addresses."""
    prepare = ctx.worker(
        "prepare",
        "update.log",
        merged=learned_from(ctx),
        batch=str(ctx.paths.batch(ctx.iteration, ctx.generation)),
        model=str(ctx.policy.model),
        policy_version=ctx.policy_version,
        without_engines="{distrusted}",
    )
    return Steps((replace(prepare, event="batch_prepared"), open_rendezvous(ctx)))


def learned_from(ctx: Context) -> list[str]:
    """What the batch is drawn from, this iteration's merged file first. Earlier ones may be gone: then there is less to draw from.

    Each is the one that a decision names; only where this run has rolled out nothing, it is what lies under the public names.
    """
    elsewhere, aggregated = ctx.settings.update.trajectories, ctx.decided("train_aggregate")
    if elsewhere:
        return [elsewhere]
    if aggregated:
        named = (aggregated["merged"], *aggregated.get("earlier", ()))
        folder = ctx.paths.trajectories("train")
        return [str(ctx.named_in(folder, path)) for path in named]
    first = max(1, ctx.iteration - ctx.settings.update.recency + 1)
    return [str(ctx.paths.merged("train", n)) for n in range(ctx.iteration, first - 1, -1)]


def open_rendezvous(ctx: Context) -> OpenRendezvous:
    return OpenRendezvous(loopback=on_one_host(ctx))


def on_one_host(ctx: Context) -> bool:
    return len({ctx.joins[rank].boot_id for rank in ctx.ranks if rank in ctx.joins}) == 1


def leaders_addresses(ctx: Context) -> tuple[str, ...]:
    return ("127.0.0.1",) if on_one_host(ctx) else ctx.joins[ctx.leader].addresses


def probe_leader(ctx: Context) -> Work:
    """Every node but the leader: which of the leader's addresses can be reached from here, and which trainer is still here."""
    prepared = ctx.decided("batch_prepare")
    if ctx.node_rank == ctx.leader or not prepared:
        return NOTHING
    return Steps((Value({"trainer": ctx.kept}), ProbeAddresses(leaders_addresses(ctx), prepared["port"])))


def choose_address(ctx: Context) -> Work:
    """Leader: the first of its addresses that every other node has connected to; and the trainer that all nodes still have, if any."""
    prepared = ctx.decided("batch_prepare")
    assert prepared is not None
    reports = {rank: report for rank, report in ctx.reports("update_ready").items() if rank != ctx.leader}
    everywhere = all(report.get("trainer") == ctx.kept for report in reports.values())
    trainer = ctx.kept if everywhere else ""
    for address in leaders_addresses(ctx):
        if all(address in report.get("reached", ()) for report in reports.values()):
            return Value({"master_addr": address, "master_port": prepared["port"], "trainer": trainer})
    tried = "; ".join(
        f"node {rank} reached {report.get('reached') or 'none'}" for rank, report in reports.items()
    )
    raise UsageError(
        f"no address of node {ctx.leader} ({', '.join(leaders_addresses(ctx))}) is reached by all: {tried}"
    )


def update(ctx: Context) -> Work:
    """Every node: one multi-node torchrun, whose processes stay for the next update, or the user's own trainer command."""
    prepared, ready = ctx.decided("batch_prepare"), ctx.decided("update_ready")
    assert prepared is not None and ready is not None
    policy, version = ctx.policy, ctx.policy_version + 1
    out = ctx.paths.checkpoint(version, ctx.generation)
    spec: dict[str, object] = {
        "batch": str(ctx.named_in(ctx.paths.batches, prepared["batch"])),
        "model": str(policy.model),
        "first_model": str(ctx.model),
        "trainer_state": str(policy.trainer) if policy.trainer else None,
        "reference": str(ctx.reference) if ctx.reference else None,
        "out": str(out),
        "policy_version": policy.version,
        "policy": ctx.policy_identity,
        "new_policy_version": version,
    }
    address, port = ready["master_addr"], ready["master_port"]
    node, nodes = ctx.ranks.index(ctx.node_rank), len(ctx.ranks)
    known = {"out": str(out), "policy_version": version}
    env = {} if ctx.accelerators else {"OMP_NUM_THREADS": str(ctx.threads)}
    if address == "127.0.0.1":
        env["GLOO_SOCKET_IFNAME"] = "lo"
    trainer = ctx.settings.trainer
    if trainer.command:
        values = {**spec, "node_rank": node, "num_nodes": nodes, "master_addr": address, "master_port": port}
        argv = tuple(fill_placeholders(word, values) for word in shlex.split(trainer.command))
        return Command(
            argv, "update.log", spec={**ctx.identity(), **spec}, env=env, result=False, extra=known
        )
    processes = trainer.processes_per_node or max(1, ctx.accelerators)
    argv = (
        *(ctx.python, "-P", "-m", "fsbarrier.workers.torchrun"),
        *("--nnodes", str(nodes), "--node-rank", str(node), "--nproc-per-node", str(processes)),
        *("--master-addr", address, "--master-port", str(port)),
        *("--max-restarts", "0", "--rdzv-conf", f"timeout={trainer.timeout_s:.0f}"),
        *("-m", "fsbarrier.workers.update", "--spec", "{spec}"),
    )
    event = "updated" if ctx.node_rank == ctx.leader else ""
    # On accelerators only where it is asked for: nobody has tried how an engine and a trainer that stays share one.
    keeps = trainer.keep == "process" or (trainer.keep == "auto" and not ctx.accelerators)
    keep = Keep(processes, ready.get("trainer", "")) if keeps else None
    spec = {**ctx.identity(), **spec, "weights_dir": "{weights_dir}"}
    return Command(argv, "update.log", spec=spec, env=env, extra=known, event=event, keep=keep)


def publish_weights(ctx: Context) -> Work:
    """Leader: the new checkpoint is verified and becomes what the run serves."""
    updated = ctx.decided("update")
    assert updated is not None
    return publish(ctx, ctx.named_in(ctx.paths.checkpoints, updated["out"]), updated["policy_version"])


def publish(ctx: Context, folder: Path, version: int) -> PublishWeights:
    kept, needed = ctx.settings.checkpoint, ctx.needed_beside(folder, version)
    trajectories = max(kept.keep_trajectories, ctx.settings.update.recency) if kept.keep_trajectories else 0
    return PublishWeights(folder, version, kept.keep, ctx.iteration, trajectories, kept.keep_every, needed)


def start_engine(ctx: Context) -> Work:
    """Every node: vLLM serves the new weights, reloaded in place or started."""
    if ctx.settings.rl_phase == "update":
        return NOTHING
    return ServeWeights(ctx.policy.model, ctx.policy.version, ctx.threads, ctx.policy_identity)


# --- the last policy (12-13 of a session's last iteration) ----------------------------------------------------------------


def following(ctx: Context) -> Context:
    """What the last policy does belongs to the iteration that would begin with it, should the run go on some day. That iteration's
    evaluation is decided in this one's row 12, and done in row 13."""
    iteration, decided = ctx.iteration + 1, ctx.decided("engine_start")
    decision = {"eval_decide": {"iteration": iteration, "value": decided}} if decided else {}
    return replace(
        ctx,
        iteration=iteration,
        decisions={**ctx.decisions, **decision},
        reports=lambda _: ctx.reports("iteration_end"),
    )


def decide_final(ctx: Context) -> Work:
    """Leader: who takes which held-out task."""
    return Value(share_out_eval(following(ctx))) if ctx.settings.eval_interval else NOTHING


def rollout_final(ctx: Context) -> Work:
    """Every node: its share of the held-out tasks."""
    return rollout_eval(following(ctx))


def aggregate_final(ctx: Context) -> Work:
    """Leader, once all are done: merge it. The result says that the run was closed, also where it never evaluates."""
    evaluated = following(ctx)
    return aggregate_eval(evaluated) if evaluating(evaluated) else Value({"evaluate": False})


PROGRAM = Program(
    "rl",
    (
        Phase(0, "iteration_start"),
        Phase(1, "train_assign", leader=assign_train),
        Phase(2, "train_rollout", each=rollout_train, resume="train_assign"),
        Phase(3, "train_shards_ready", resume="train_assign"),
        Phase(4, "train_aggregate", leader=aggregate_train, resume="train_assign"),
        Phase(5, "eval_decide", leader=decide_eval),
        Phase(6, "eval_rollout", each=rollout_eval, leader=aggregate_eval, resume="eval_decide"),
        Phase(7, "engine_stop", each=stop_engine),
        Phase(8, "batch_prepare", leader=prepare_batch, resume="engine_stop"),
        Phase(9, "update_ready", each=probe_leader, leader=choose_address, resume="engine_stop"),
        Phase(10, "update", each=update, resume="engine_stop"),
        Phase(11, "weights_publish", leader=publish_weights),
        Phase(12, "engine_start", each=start_engine),
        Phase(13, "iteration_end"),
    ),
    RL_SLICES,
    closing=(
        Phase(12, "engine_start", each=start_engine, leader=decide_final),
        Phase(13, "iteration_end", each=rollout_final, leader=aggregate_final, resume="engine_start"),
    ),
    needs=frozenset({"model", "data"}),
    imported=("fsbarrier.workers.rollout", "fsbarrier.workers.prepare", "fsbarrier.aggregate"),
    serves_first=frozenset({"both", "rollout"}),
)
