"""The default program: one iteration of synchronous RL post-training in fourteen rows.

PROGRAM, at the end, is the table. Each row has small pure functions that turn a Context (fsbarrier/program.py) into Work for a node; the
rows hand each other the records of fsbarrier/decisions.py. To write your own, copy this file and edit it: `./run.sh --program ./mine.py`.
The file is longer than others, so that one copy is enough.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from fsbarrier.decisions import (
    NO_EVALUATION,
    BatchDecision,
    MergeDecision,
    PartGroups,
    ReachReport,
    RendezvousDecision,
    RolloutDecision,
    RolloutReport,
    UpdateDecision,
)
from fsbarrier.errors import UsageError
from fsbarrier.program import (
    HELPER,
    RL_SLICES,
    TRAINER,
    Command,
    Context,
    OpenRendezvous,
    Phase,
    ProbeAddresses,
    Program,
    PublishFile,
    PublishWeights,
    ReleaseEngine,
    Resident,
    ServeFrozen,
    ServeWeights,
    Steps,
    Value,
    Work,
    fill_placeholders,
)
from fsbarrier.protocol.assign import draw_rounds, sample_tasks
from fsbarrier.protocol.facts import JsonObject
from fsbarrier.rollouts.sharing import share_out, sharing_events, training_files, training_sets
from fsbarrier.rundir.names import SPLITS
from fsbarrier.settings.sections import EvalSettings, RolloutSettings

NOTHING = Value({})
#: the claims on tasks of the next iteration, while this one's update trains (`rollout.ahead`)
AHEAD = "ahead"
# How long the processes of an update wait for each other, in seconds.
COLLECTIVES_TIMEOUT_S = 1800

# --- rollouts (1-6) ---------------------------------------------------------------------------------------------------


def assign_train(ctx: Context) -> Work:
    """Leader: decide which tasks this iteration rolls out, and which node begins with which."""
    return NOTHING if ctx.settings.rollout_split == "eval-only" else decide_rollout(assigned(ctx))


def assigned(ctx: Context) -> RolloutDecision:
    """Which tasks an iteration rolls out, and which node begins with which."""
    settings, last, weight_after = ctx.settings.rollout, last_rewards(ctx), ctx.settings.train.weigher()
    rounds = draw_rounds(
        training_sets(ctx.settings, ctx.tasks),
        settings.tasks,
        1 + settings.max_refills,
        seed=settings.seed,
        iteration=ctx.iteration,
        weight_of=None if last is None else lambda task: weight_after(last.get(str(task))),
    )
    return share_out_train(ctx, rounds, keep=settings.tasks if settings.max_refills else None)


def last_rewards(ctx: Context) -> Mapping[str, float] | None:
    """The mean reward of each task's last group, by its number; None: no draw depends on it."""
    merged = ctx.latest("train_aggregate") or {}
    return (merged.get("last_rewards") or {}) if ctx.settings.train.reward_weights else None


def decide_rollout(decision: RolloutDecision) -> Value:
    """The decision, with its lines for the journal."""
    return Value(decision.as_json(), sharing_events(decision))


def share_out_train(ctx: Context, rounds: list[list[int]], keep: int | None = None) -> RolloutDecision:
    """Share out the tasks. The merge keeps at most `keep` groups.

    The rounds after the first are refills; fsbarrier/rollouts/claims.py decides whether each takes place.
    """
    decision = share_out(ctx, "train", sampled_how(ctx, "train"), rounds)
    sizes = [len(tasks) for tasks in rounds] if len(rounds) > 1 else None
    return replace(decision, keep=keep, rounds=sizes)


def rollout_train(ctx: Context) -> Work:
    """Every node that samples: roll out its share of the tasks with the local vLLM, then tasks that slower nodes have not begun."""
    decision = ctx.find_decision("train_assign", RolloutDecision)
    return rollout_share(ctx, decision) if decision is not None else NOTHING


def rollout_share(ctx: Context, decision: RolloutDecision) -> Work:
    """One node's share of the training tasks, in rounds."""
    files, sampling = training_files(ctx.tasks), sampling_of(ctx.settings.rollout)
    left = iter(decision.wanted)
    rounds: list[JsonObject] = [
        {"tasks": list(islice(left, size)), "files": files, "sampling": sampling}
        for size in decision.round_sizes
    ]
    return rollout(ctx, decision, rounds)


def sampled_how(ctx: Context, split: str) -> str:
    """A digest of everything that decides how this iteration's tasks are answered.

    Example: a session ends with an evaluation of one sample a task. The next session asks for eight, and must not adopt those groups.
    """
    settings = ctx.settings
    if split == "train":
        return text_digest([sampling_of(settings.rollout)])
    return text_digest([[name, one.as_json()] for name, one in settings.eval_sets.items()])


def text_digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def sampling_of(settings: RolloutSettings | EvalSettings) -> dict[str, object]:
    """Training samples from the full distribution: otherwise the engine's log-probabilities would not be comparable with the trainer's,
    and their ratio would be below 1 before the first step."""
    common = {name: getattr(settings, name) for name in ("samples", "temperature", "max_tokens")}
    if isinstance(settings, EvalSettings):
        return {**common, "top_p": settings.top_p, "top_k": settings.top_k}
    return {**common, "top_p": 1.0, "top_k": -1}


def rollout(ctx: Context, decision: RolloutDecision, rounds: list[JsonObject]) -> Work:
    """One node's rollouts. `rounds`: the tasks of each round and how to sample them (fsbarrier/rollouts/rounds.py)."""
    frozen = serve_frozen(ctx)
    if not decision.shares.get(ctx.node_rank):
        # Its part of an engine that another node asks.
        asked = ctx.node_rank in ctx.samplers and decision.shares.get(head_of(ctx))
        return Steps((serve(ctx), *frozen) if asked else frozen)
    policy = ctx.policy
    spec, newer = rollout_spec(ctx, decision), in_flight(ctx)
    command = ctx.worker(
        "rollout",
        "rollout.log",
        **spec,
        in_flight=newer is not None,
        rounds=rounds,
        model=str(policy.model),
        engine="{engine}",
        log_dir="{log_dir}",
        engines="{engines}",
    )
    command = replace(command, resident=Resident("rollout"), extra=report_of(spec), in_flight=newer)
    return Steps((serve(ctx), *frozen, command))


def serve(ctx: Context) -> ServeWeights:
    """The node's engines serve the newest published policy."""
    policy, devices = ctx.policy, chosen(ctx, ctx.samplers[ctx.node_rank])
    return ServeWeights(policy.model, policy.version, ctx.threads, ctx.policy_identity, devices, ctx.span)


def head_of(ctx: Context) -> int:
    """The node that rolls out with this node's engine: itself, or the first one of those that share it."""
    return next(group[0] for group in ctx.engine_groups if ctx.node_rank in group)


def in_flight(ctx: Context) -> ServeWeights | None:
    """The policy version that the update makes meanwhile, which the engines take while they roll out ahead (`rollout.in_flight`)."""
    if not ctx.settings.rollout.in_flight or ctx.phase.name != "update":
        return None
    made = updated(ctx)
    folder = ctx.named_in(ctx.paths.checkpoints, made.folder) / "model"
    return replace(serve(ctx), folder=folder, policy_version=made.policy_version, policy="")


def serve_frozen(ctx: Context) -> tuple[ServeFrozen, ...]:
    """The node's servers of the models that judge and teach."""
    return tuple(ServeFrozen(name, ctx.threads, chosen(ctx, devices)) for name, devices in ctx.frozen.items())


def chosen(ctx: Context, devices: tuple[int, ...]) -> tuple[int, ...] | None:
    """These accelerators of the node; None: all."""
    return None if len(devices) == ctx.accelerators else devices


def report_of(spec: Mapping[str, object]) -> dict[str, object]:
    """What a node's report says of its rollouts beside the program's own result."""
    return {"part": Path(str(spec["part"])).name}


def rollout_spec(ctx: Context, decision: RolloutDecision) -> dict[str, object]:
    """The spec of a rollout program (fsbarrier/rollouts/rollout_spec.py): its tasks, when it may end, where its results go."""
    settings, rank, split = ctx.settings.rollout, ctx.node_rank, decision.split
    ends_early = split == "train" and settings.completion_threshold < 1
    refills = {"rounds": decision.rounds, "with_signal": decision.with_signal}
    # What is rolled out ahead has claims of its own: what is left of it is shared out anew.
    claims = AHEAD if ctx.phase.name == "update" else split
    return {
        "split": split,
        "tasks": decision.shares[rank],
        "shares": {str(other): share for other, share in decision.shares.items()},
        "fixed_shares": decision.fixed_shares,
        "claims": str(ctx.paths.claims(ctx.generation, ctx.iteration, claims)),
        "old_claims": [
            str(ctx.paths.claims(ctx.generation, ctx.iteration - 1, name)) for name in (*SPLITS, AHEAD)
        ],
        "completion_threshold": settings.completion_threshold if ends_early else 1.0,
        "grace_s": settings.grace_s,
        "there": sum(len(part.tasks) for part in decision.adopted),
        "expected": decision.wanted,
        "keep": decision.keep,
        "refills": None if decision.rounds is None else refills,
        "part": str(
            ctx.paths.part(split, ctx.iteration, rank, ctx.generation, ctx.incarnation, ctx.policy_version)
        ),
        "checkpoint": str(ctx.paths.rank_checkpoint(split, ctx.iteration, rank)),
        "policy_version": ctx.policy_version,
        "policy": ctx.policy_identity,
        "sampled_how": sampled_how(ctx, split),
    }


def aggregate_train(ctx: Context) -> Work:
    """Leader: merge the parts into one file."""
    return aggregate(ctx, ctx.find_decision("train_assign", RolloutDecision), "train_rollout")


def aggregate(ctx: Context, decision: RolloutDecision | None, rolled_out_in: str) -> Work:
    """Merge the groups of one split: those that were adopted, and those of the nodes' reports about the row `rolled_out_in`."""
    if decision is None:
        return NOTHING
    split, parts = decision.split, [*decision.adopted]
    reports = {rank: RolloutReport.from_json(one) for rank, one in ctx.reports(rolled_out_in).items()}
    for rank, report in reports.items():
        if report.part:
            tasks = decision.shares[rank] if report.tasks is None else report.tasks
            parts.append(PartGroups(report.part, None, tasks))
    begun, wanted = rounds_begun(decision, reports)
    cut_off = tasks_cut_off(ctx, wanted, parts, reports)
    without = set(cut_off)
    out, folder = ctx.paths.merged_by(split, ctx.iteration, ctx.generation), ctx.paths.trajectories(split)
    made = MergeDecision(
        merged=out.name,
        cut_off=cut_off,
        groups_taken_over=sum(report.taken_over for report in reports.values()),
        earlier=earlier_merges(ctx) if split == "train" else (),
        sampled_how=sampled_how(ctx, split) if split == "test" else None,
        rounds=begun if decision.rounds is not None else None,
    )
    origin: dict[str, object] = {
        "split": split,
        "policy_version": ctx.policy_version,
        "policy": ctx.policy_identity,
        **({"final": True} if ctx.phase.name == "iteration_end" else {}),
    }
    command = Command(
        (ctx.python, "-P", "-m", "fsbarrier.aggregate", "--spec", "{spec}"),
        "helper.log",
        resident=Resident(HELPER),
        spec={
            **ctx.identity(),
            "parts": [{**part.as_json(), "path": str(ctx.named_in(folder, part.name))} for part in parts],
            "out": str(out),
            "expected": [task for task in wanted if task not in without],
            "keep": decision.keep,
            "success": success_by_set(ctx) if split == "test" else None,
            **(drawn_from(ctx, frozenset(wanted)) if split == "train" else {}),
            "metadata": {
                "run_id": ctx.run_id,
                "iteration": ctx.iteration,
                "generation": ctx.generation,
                "cut_off": cut_off,
                **origin,
            },
        },
        extra={**made.as_json(), "groups_cut_off": len(cut_off), **origin},
        event="rolled_out" if split == "train" else "evaluated",
    )
    return Steps((command, PublishFile(out, ctx.paths.merged(split, ctx.iteration))))


def drawn_from(ctx: Context, wanted: frozenset[int]) -> dict[str, object]:
    """For the merge: the sets of training tasks, of which it tells the rewards, and the rewards so far if a draw depends on them."""
    sets = [one for one in training_sets(ctx.settings, ctx.tasks) if one.name]
    return {
        "sets": {one.name: [*wanted.intersection(one.tasks)] for one in sets},
        "last_rewards": last_rewards(ctx),
    }


def earlier_merges(ctx: Context) -> list[str]:
    """The merged files of earlier iterations, the last one first, as many as an update may draw from beside the new one."""
    last, most = ctx.latest("train_aggregate"), ctx.settings.update.recency - 1
    if last is None:
        return []
    before = MergeDecision.from_json(last)
    return [before.merged, *before.earlier][:most]


def rounds_begun(
    decision: RolloutDecision, reports: Mapping[int, RolloutReport]
) -> tuple[int, Sequence[int]]:
    """How many rounds took place, and their tasks."""
    sizes, told = (
        decision.round_sizes,
        [report.rounds for report in reports.values() if report.rounds is not None],
    )
    # If no node had anything to do, an older generation has done all rounds.
    begun = max(told, default=len(sizes))
    return begun, decision.wanted[: sum(sizes[:begun])]


def tasks_cut_off(
    ctx: Context, wanted: Sequence[int], parts: Sequence[PartGroups], reports: Mapping[int, RolloutReport]
) -> list[int]:
    """The tasks without a group because the phase ended early. If any other task is missing, the merge fails."""
    done = {task for part in parts for task in part.tasks}
    left = [task for task in wanted if task not in done]
    enough = ctx.settings.rollout.completion_threshold * len(wanted)
    ended = any(report.ended_early for report in reports.values())
    return left if ended and len(wanted) - len(left) >= enough else []


def evaluates(ctx: Context) -> bool:
    """Whether this iteration evaluates."""
    interval = ctx.settings.eval_interval
    due = interval == 1 or (interval > 1 and ctx.iteration % interval == 1)
    return due and ctx.settings.rollout_split != "train-only"


def decide_eval(ctx: Context) -> Work:
    """Leader: decide whether this iteration evaluates, and which node begins with which held-out task."""
    return decide_rollout(share_out_eval(ctx)) if evaluates(ctx) else Value(NO_EVALUATION)


def share_out_eval(ctx: Context) -> RolloutDecision:
    """Share out the held-out tasks, each set by itself."""
    rounds = [one["tasks"] for one in eval_rounds(ctx)]
    return share_out(ctx, "test", sampled_how(ctx, "test"), rounds)


def eval_rounds(ctx: Context) -> list[JsonObject]:
    """One round for each set of held-out tasks. The tasks of all sets are numbered as if they stood in one file."""
    rounds: list[JsonObject] = []
    first = 0
    for name, one in ctx.settings.eval_sets.items():
        source = ctx.tasks[name]
        chosen = sample_tasks(source["count"], one.tasks, seed=0, iteration=1)
        rounds.append(
            {
                "tasks": [first + index for index in chosen],
                "files": {source["path"]: first},
                "sampling": sampling_of(one),
                "eval_set": name if ctx.settings.eval.sets else "",
            }
        )
        first += source["count"]
    return rounds


def success_by_set(ctx: Context) -> dict[str, float]:
    """The reward from which a trajectory counts as solved, by the name of the set ("" if there is only one)."""
    named = ctx.settings.eval.sets
    return {name if named else "": one.success for name, one in ctx.settings.eval_sets.items()}


def evaluating(ctx: Context) -> RolloutDecision | None:
    """The decision of eval_decide; None if this iteration does not evaluate."""
    value = ctx.decided("eval_decide")
    return RolloutDecision.from_json(value) if value and value["evaluate"] else None


def rollout_eval(ctx: Context) -> Work:
    """Every node, in an iteration that evaluates: roll out its share of the held-out tasks."""
    decision = evaluating(ctx)
    return rollout(ctx, decision, eval_rounds(ctx)) if decision is not None else NOTHING


def aggregate_eval(ctx: Context) -> Work:
    """Leader, after all nodes: merge the evaluation."""
    return aggregate(ctx, evaluating(ctx), "eval_rollout")


# --- update (7-13) ----------------------------------------------------------------------------------------------------


def stop_engine(ctx: Context) -> Work:
    """Every node that samples and trains: free the accelerators' memory for the trainer. A frozen engine on other accelerators stays."""
    if ctx.node_rank not in ctx.trainers:
        return NOTHING
    trains_on = set(ctx.trainers[ctx.node_rank])
    frozen = tuple(name for name, devices in ctx.frozen.items() if trains_on.intersection(devices))
    return ReleaseEngine(frozen) if frozen or ctx.node_rank in ctx.samplers else NOTHING


def prepare_batch(ctx: Context) -> Work:
    """Leader: prepare the training batch; if it trains first, open a port on which the others test its addresses."""
    return prepared(ctx, "prepare", merged=learned_from(ctx))


def prepared(ctx: Context, program: str, **fields: object) -> Work:
    """The batch that a program writes, and where the update's processes meet."""
    batch, policy = ctx.paths.batch(ctx.iteration, ctx.generation), ctx.policy
    fields |= {"batch": str(batch), "model": str(policy.model), "policy_version": ctx.policy_version}
    prepare = ctx.worker(program, "helper.log", **fields)
    prepare = replace(prepare, event="batch_prepared", resident=Resident(HELPER), extra={"batch": batch.name})
    return Steps((prepare, meet(ctx)))


def meet(ctx: Context) -> Work:
    """Leader: the port where the update's processes meet, its own or that of the node that has opened one."""
    if ctx.node_rank == meeting_at(ctx):
        return open_rendezvous(ctx)
    return Value({"port": ctx.reports("batch_prepare")[meeting_at(ctx)]["port"]})


def open_port(ctx: Context) -> Work:
    """The node where the update's processes meet, if it is not the leader: open a port on which the others test its addresses."""
    meets = ctx.node_rank == meeting_at(ctx) and ctx.node_rank != ctx.leader
    return open_rendezvous(ctx) if meets else NOTHING


def learned_from(ctx: Context) -> list[str]:
    """The merged files that the batch is drawn from, this iteration's first. Earlier ones may be gone: then there is less to draw from.

    They are those that the decision names. In a run that has rolled out nothing, they are the files under the public names.
    """
    merge = ctx.find_decision("train_aggregate", MergeDecision)
    if merge is not None:
        folder = ctx.paths.trajectories("train")
        return [str(ctx.named_in(folder, name)) for name in (merge.merged, *merge.earlier)]
    first = max(1, ctx.iteration - ctx.settings.update.recency + 1)
    return [str(ctx.paths.merged("train", n)) for n in range(ctx.iteration, first - 1, -1)]


def open_rendezvous(ctx: Context) -> OpenRendezvous:
    return OpenRendezvous(meeting_addresses(ctx))


def meeting_at(ctx: Context) -> int:
    """The node where the update's processes meet: the leader, or where it does not train, the first node that does."""
    return ctx.leader if ctx.leader in ctx.trainers else min(ctx.trainers)


def on_one_host(ctx: Context) -> bool:
    return len({ctx.joins[rank].boot_id for rank in ctx.trainers if rank in ctx.joins}) == 1


def meeting_addresses(ctx: Context) -> tuple[str, ...]:
    return ("127.0.0.1",) if on_one_host(ctx) else ctx.joins[meeting_at(ctx)].addresses


def probe_addresses(ctx: Context) -> Work:
    """Every node that trains: report the trainer that it has kept, and which addresses of the node where they meet it can reach."""
    prepared = ctx.find_decision("batch_prepare", BatchDecision)
    if ctx.node_rank not in ctx.trainers or prepared is None:
        return NOTHING
    kept = Value({"trainer": ctx.kept})
    if ctx.node_rank == meeting_at(ctx):
        return kept
    return Steps((kept, ProbeAddresses(meeting_addresses(ctx), prepared.port)))


def choose_address(ctx: Context, assign: Callable[[Context], RolloutDecision] = assigned) -> Work:
    """Leader: choose the first address that all nodes that train have reached, and the trainer that all have kept, if any; and share out
    what the others roll out meanwhile."""
    prepared = ctx.decision("batch_prepare", BatchDecision)
    reports = {rank: ReachReport.from_json(report) for rank, report in ctx.reports("update_ready").items()}
    reports[ctx.leader] = ReachReport(trainer=ctx.kept)
    trainers = {reports[rank].trainer for rank in ctx.trainers}
    trainer = trainers.pop() if len(trainers) == 1 else ""
    reached = {rank: reports[rank].reached for rank in ctx.trainers if rank != meeting_at(ctx)}
    for address in meeting_addresses(ctx):
        if all(address in of_one for of_one in reached.values()):
            meeting = RendezvousDecision(address, prepared.port, trainer)
            if not rolls_ahead(ctx):
                return Value(meeting.as_json())
            ahead = assign(of_next_iteration(ctx))
            return Value(replace(meeting, ahead=ahead).as_json(), sharing_events(ahead))
    tried = "; ".join(f"node {rank} reached {of_one or 'none'}" for rank, of_one in reached.items())
    raise UsageError(
        f"no address of node {meeting_at(ctx)} ({', '.join(meeting_addresses(ctx))}) is reached by all: {tried}"
    )


def rolls_ahead(ctx: Context) -> bool:
    """Whether the nodes that do not train roll out the next iteration's tasks meanwhile."""
    settings = ctx.settings
    last = settings.iterations is not None and ctx.iteration >= settings.iterations
    return settings.rollout.ahead > 0 and settings.rl_phase == "both" and not last


def of_next_iteration(ctx: Context) -> Context:
    """The context in which the next iteration's tasks are rolled out ahead, by the policy that is served now."""
    return replace(ctx, iteration=ctx.iteration + 1)


def update(ctx: Context) -> Work:
    """Every node that trains: run one multi-node torchrun, whose processes stay for the next update, or the user's own trainer command.
    The others roll out ahead."""
    rendezvous = ctx.decision("update_ready", RendezvousDecision)
    if ctx.node_rank in ctx.trainers:
        return train(ctx, rendezvous)
    known = Value(updated(ctx).as_json())
    if rendezvous.ahead is None:
        return known
    return Steps((rollout_share(of_next_iteration(ctx), rendezvous.ahead), known))


def updated(ctx: Context) -> UpdateDecision:
    """The policy version that this iteration's update makes."""
    version = ctx.policy_version + 1
    return UpdateDecision(ctx.paths.checkpoint(version, ctx.generation).name, version)


def train(ctx: Context, rendezvous: RendezvousDecision) -> Command:
    """This node's part of the update."""
    prepared = ctx.decision("batch_prepare", BatchDecision)
    policy, version = ctx.policy, ctx.policy_version + 1
    out = ctx.paths.checkpoint(version, ctx.generation)
    spec: dict[str, object] = {
        "batch": str(ctx.named_in(ctx.paths.batches, prepared.batch)),
        "model": str(policy.model),
        "first_model": str(ctx.model),
        "trainer_state": str(policy.trainer) if policy.trainer else None,
        "reference": str(ctx.reference) if ctx.reference else None,
        "out": str(out),
        "policy_version": policy.version,
        "policy": ctx.policy_identity,
        "new_policy_version": version,
    }
    address, port = rendezvous.master_addr, rendezvous.master_port
    # The node where they meet is torchrun's first.
    order = sorted(ctx.trainers, key=lambda rank: (rank != meeting_at(ctx), rank))
    node, nodes = order.index(ctx.node_rank), len(order)
    devices = ctx.trainers[ctx.node_rank]
    known = updated(ctx).as_json()
    env = {} if devices else {"OMP_NUM_THREADS": str(ctx.threads)}
    if address == "127.0.0.1":
        env["GLOO_SOCKET_IFNAME"] = "lo"
    trainer = ctx.settings.trainer
    if trainer.command:
        values = {**spec, "node_rank": node, "num_nodes": nodes, "master_addr": address, "master_port": port}
        argv = tuple(fill_placeholders(word, values) for word in shlex.split(trainer.command))
        return Command(
            argv,
            "update.log",
            spec={**ctx.identity(), **spec},
            env=env,
            result=False,
            extra=known,
            devices=devices,
        )
    processes = trainer.processes_per_node or max(1, len(devices))
    argv = (
        *(ctx.python, "-P", "-m", "fsbarrier.workers.torchrun"),
        *("--nnodes", str(nodes), "--node-rank", str(node), "--nproc-per-node", str(processes)),
        *("--master-addr", address, "--master-port", str(port)),
        *("--max-restarts", "0", "--rdzv-conf", f"timeout={COLLECTIVES_TIMEOUT_S}"),
        *("-m", "fsbarrier.workers.update", "--spec", "{spec}"),
    )
    leads = ctx.node_rank == meeting_at(ctx)
    event = "updated" if leads else ""
    # On accelerators only on request: sharing one between an engine and a kept trainer is untested.
    shares = bool(devices) and ctx.node_rank in ctx.samplers
    keeps = trainer.keep == "process" or (trainer.keep == "auto" and not shares)
    resident = Resident(TRAINER, processes, rendezvous.trainer) if keeps else None
    spec = {**ctx.identity(), **spec, "weights_dir": "{weights_dir}"}
    return Command(
        argv,
        "update.log",
        spec=spec,
        env=env,
        extra=known,
        event=event,
        listens=leads,
        resident=resident,
        devices=devices,
    )


def publish_weights(ctx: Context) -> Work:
    """Leader: verify the new checkpoint and publish it."""
    updated = ctx.decision("update", UpdateDecision)
    return publish(ctx, ctx.named_in(ctx.paths.checkpoints, updated.folder), updated.policy_version)


def publish(ctx: Context, folder: Path, version: int) -> PublishWeights:
    kept, best = ctx.settings.checkpoint, ctx.best_evaluated
    trajectories = max(kept.keep_trajectories, ctx.settings.update.recency) if kept.keep_trajectories else 0
    made = folder, version, kept.keep, ctx.iteration, trajectories, kept.keep_every, best
    return PublishWeights(*made, previous=ctx.policy_identity)


def start_engine(ctx: Context) -> Work:
    """Every node that samples: vLLM serves the new weights, reloaded in place or started."""
    if ctx.settings.rl_phase == "update" or ctx.node_rank not in ctx.samplers:
        return NOTHING
    # Without decisions: a node that gets ready before it joins, alone. An engine over several nodes starts with the others.
    if ctx.settings.engine.nodes > 1 and not ctx.decisions:
        return NOTHING
    return serve(ctx)


# --- the last policy (12-13 of a session's last iteration) ----------------------------------------------------------------


def following(ctx: Context) -> Context:
    """The context of the next iteration, whose evaluation row 12 of this one decides and row 13 carries out.

    If the run goes on some day, that iteration adopts the results and does not evaluate the same policy twice.
    """
    iteration, decided = ctx.iteration + 1, ctx.decided("engine_start")
    decision = {"eval_decide": {"iteration": iteration, "value": decided}} if decided else {}
    return replace(
        ctx,
        iteration=iteration,
        decisions={**ctx.decisions, **decision},
        reports=lambda _: ctx.reports("iteration_end"),
    )


def decide_final(ctx: Context) -> Work:
    """Leader: decide which node begins with which held-out task."""
    wanted = ctx.settings.eval_interval > 0
    return decide_rollout(share_out_eval(following(ctx))) if wanted else Value(NO_EVALUATION)


def rollout_final(ctx: Context) -> Work:
    """Every node: roll out its share of the held-out tasks."""
    return rollout_eval(following(ctx))


def aggregate_final(ctx: Context) -> Work:
    """Leader, after all nodes: merge the evaluation. Without one there is a result too, which shows that the iteration was closed."""
    evaluated = following(ctx)
    return aggregate_eval(evaluated) if evaluating(evaluated) else Value(NO_EVALUATION)


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
        Phase(8, "batch_prepare", each=open_port, leader=prepare_batch, resume="engine_stop"),
        Phase(9, "update_ready", each=probe_addresses, leader=choose_address, resume="engine_stop"),
        Phase(10, "update", each=update, resume="engine_stop"),
        Phase(11, "weights_publish", leader=publish_weights),
        Phase(12, "engine_start", each=start_engine, ready=True),
        Phase(13, "iteration_end"),
    ),
    RL_SLICES,
    closing=(
        Phase(12, "engine_start", each=start_engine, leader=decide_final),
        Phase(13, "iteration_end", each=rollout_final, leader=aggregate_final, resume="engine_start"),
    ),
    needs=frozenset({"model", "data"}),
)
