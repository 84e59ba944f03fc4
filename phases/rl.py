"""The default program: one iteration of synchronous RL post-training in fourteen rows.

PROGRAM, at the end, is the table. Each row is a function that calls its node (fsbarrier/node.py) and returns a record; small pure
functions of the facts, a Context (fsbarrier/context.py), make its decisions. The rows hand each other the records of
fsbarrier/decisions.py. To write your own, copy this file and edit it: `./run.sh --program ./mine.py`. The file is longer than others, so
that one copy is enough.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path

from fsbarrier.context import Context
from fsbarrier.data.merge import MergeRequest, Part
from fsbarrier.decisions import (
    NO_EVALUATION,
    BatchDecision,
    EnginesReport,
    MergeDecision,
    NewVersion,
    PartGroups,
    PublishDecision,
    ReachReport,
    RendezvousDecision,
    RolloutDecision,
    RolloutReport,
)
from fsbarrier.errors import UsageError
from fsbarrier.node import Node, Port, Publication, Weights
from fsbarrier.program import RL_SLICES, Phase, Program
from fsbarrier.protocol.assign import draw_rounds, sample_tasks
from fsbarrier.protocol.facts import JsonObject
from fsbarrier.rollouts.rollout_spec import RolloutRound, RolloutSpec
from fsbarrier.rollouts.samples import Sampling
from fsbarrier.rollouts.sharing import file_of, share_out, sharing_events, training_files, training_sets
from fsbarrier.rundir.names import SPLITS
from fsbarrier.settings.sections import EvalSettings, RolloutSettings
from fsbarrier.specs import (
    TRAINER,
    Launch,
    MergeSpec,
    PrepareSpec,
    Resident,
    UpdateSpec,
    fill_placeholders,
)

#: the name of the claims on the next iteration's tasks, which are rolled out while this one's update trains (`rollout.ahead`)
AHEAD = "ahead"
# How many tasks that are never finished the journal names.
MOST_NAMED = 10
# How long the processes of an update wait for each other, in seconds.
COLLECTIVES_TIMEOUT_S = 1800

# --- rollouts (1-6) ---------------------------------------------------------------------------------------------------


def assign_train(node: Node) -> RolloutDecision | None:
    """Leader: decide which tasks this iteration rolls out, and which node begins with which."""
    if node.context.settings.rollout_split == "eval-only":
        return None
    return told(node, assigned(node.context))


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
    """The mean reward of each task's last group, by the task's number; None if draws do not depend on it."""
    merged = ctx.latest("train_aggregate", MergeDecision)
    return ((merged and merged.last_rewards) or {}) if ctx.settings.train.reward_weights else None


def told(node: Node, decision: RolloutDecision) -> RolloutDecision:
    """Write the events of a decision into the journal, and return the decision."""
    for line in sharing_events(decision):
        node.event(line["event"], line)
    return decision


def share_out_train(ctx: Context, rounds: list[list[int]], keep: int | None = None) -> RolloutDecision:
    """Share out the tasks. The merge keeps at most `keep` groups.

    The rounds after the first are refills; fsbarrier/rollouts/claims.py decides whether each takes place.
    """
    decision = share_out(ctx, "train", sampled_how(ctx, "train"), rounds)
    sizes = [len(tasks) for tasks in rounds] if len(rounds) > 1 else None
    return replace(decision, keep=keep, rounds=sizes)


def rollout_train(node: Node) -> RolloutReport | None:
    """Every node that samples: roll out its share of the tasks with the local vLLM, then tasks that slower nodes have not begun."""
    decision = node.context.find_decision("train_assign", RolloutDecision)
    return rollout_share(node, decision) if decision is not None else None


def rollout_share(node: Node, decision: RolloutDecision) -> RolloutReport | None:
    """One node's share of the training tasks."""
    return rollout(node, decision, train_rounds(node.context, decision))


def train_rounds(ctx: Context, decision: RolloutDecision) -> list[RolloutRound]:
    """The training tasks of all nodes in rounds."""
    files, sampling = training_files(ctx.tasks), sampling_of(ctx.settings.rollout)
    left = iter(decision.wanted)
    return [RolloutRound(list(islice(left, size)), files, sampling) for size in decision.round_sizes]


def sampled_how(ctx: Context, split: str) -> str:
    """A digest of everything that decides how this iteration's tasks are answered.

    Example: a session ends with an evaluation of one sample a task. The next session asks for eight, and must not adopt those groups.
    """
    settings = ctx.settings
    if split == "train":
        return text_digest([asdict(sampling_of(settings.rollout))])
    return text_digest([[name, eval_set.as_json()] for name, eval_set in settings.eval_sets.items()])


def text_digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def sampling_of(settings: RolloutSettings | EvalSettings) -> Sampling:
    """How answers are sampled. Training uses the full distribution: otherwise the engine's log-probabilities would not be comparable with
    the trainer's, and their ratio would be below 1 before the first step."""
    # An evaluation's max_tokens is filled in by `Settings.eval_sets`.
    assert settings.max_tokens is not None
    top_p, top_k = (settings.top_p, settings.top_k) if isinstance(settings, EvalSettings) else (1.0, -1)
    return Sampling(settings.samples, settings.temperature, top_p, top_k, settings.max_tokens)


def rollout(node: Node, decision: RolloutDecision, rounds: Sequence[RolloutRound]) -> RolloutReport | None:
    """One node's rollouts. `rounds`: the tasks of each round and how to sample them (fsbarrier/rollouts/rollout_spec.py)."""
    ctx = node.context
    if not decision.shares.get(ctx.node_rank):
        if ctx.node_rank in ctx.samplers and decision.shares.get(head_of(ctx)):
            # This node runs a part of an engine to which another node sends the requests.
            node.serve(served(ctx))
        serve_frozen(node)
        return None
    engine = node.serve(served(ctx))
    serve_frozen(node)
    newer = in_flight(ctx)
    spec = replace(
        rollout_spec(ctx, decision, rounds),
        model=ctx.policy.model,
        engine=engine,
        engines=node.frozen_engines(),
        in_flight=newer is not None,
        log_dir=node.log_dir,
    )
    done = node.run(spec, in_flight=newer, calls_engines=True)
    for line in done.events:
        node.event(line["event"], line)
    return done.report


def served(ctx: Context) -> Weights:
    """What the node's engines serve: the newest published policy."""
    policy, devices = ctx.policy, chosen(ctx, ctx.samplers[ctx.node_rank])
    return Weights(
        policy.model, policy.version, ctx.threads, ctx.policy_identity, devices, ctx.span, ctx.model
    )


def head_of(ctx: Context) -> int:
    """The node that rolls out with this node's engine: itself, or the first one of those that share it."""
    return next(group[0] for group in ctx.engine_groups if ctx.node_rank in group)


def in_flight(ctx: Context) -> Weights | None:
    """The policy version that the update is making, which engines load while they roll out ahead (`rollout.in_flight`)."""
    if not ctx.settings.rollout.in_flight or ctx.phase.name != "update":
        return None
    # What is rolled out ahead has the context of the next iteration, in which nothing is decided yet.
    decided = ctx.latest("update_ready", RendezvousDecision)
    assert decided is not None
    made = decided.makes
    folder = ctx.named_in(ctx.paths.checkpoints, made.folder) / "model"
    return replace(served(ctx), folder=folder, policy_version=made.policy_version, policy="")


def serve_frozen(node: Node) -> None:
    """Serve the frozen models (judges, teachers) that have accelerators on this node."""
    ctx = node.context
    for name, devices in ctx.frozen.items():
        node.serve_frozen(name, threads=ctx.threads, devices=chosen(ctx, devices))


def chosen(ctx: Context, devices: tuple[int, ...]) -> tuple[int, ...] | None:
    """These accelerators of the node; None: all."""
    return None if len(devices) == ctx.accelerators else devices


def rollout_spec(ctx: Context, decision: RolloutDecision, rounds: Sequence[RolloutRound]) -> RolloutSpec:
    """The spec of a rollout program: its tasks, when it may end, and where its results go."""
    settings, rank, split = ctx.settings.rollout, ctx.node_rank, decision.split
    ends_early = split == "train" and settings.completion_threshold < 1
    # Tasks that are rolled out ahead have their own claims, because those that are left are shared out anew.
    claims = AHEAD if ctx.phase.name == "update" else split
    return RolloutSpec(
        ctx.identity,
        split=split,
        policy_version=ctx.policy_version,
        policy=ctx.policy_identity,
        shares=decision.shares,
        fixed_shares=decision.fixed_shares,
        claims=ctx.paths.claims(ctx.generation, ctx.iteration, claims),
        old_claims=[ctx.paths.claims(ctx.generation, ctx.iteration - 1, name) for name in (*SPLITS, AHEAD)],
        completion_threshold=settings.completion_threshold if ends_early else 1.0,
        grace_s=settings.grace_s,
        there=sum(len(part.tasks) for part in decision.adopted),
        keep=decision.keep,
        refills=None if decision.rounds is None else decision.with_signal,
        part=ctx.paths.part(split, ctx.iteration, rank, ctx.generation, ctx.incarnation, ctx.policy_version),
        checkpoint=ctx.paths.rank_checkpoint(split, ctx.iteration, rank),
        sampled_how=sampled_how(ctx, split),
        rounds=rounds,
    )


def aggregate_train(node: Node) -> MergeDecision | None:
    """Leader: merge the parts into one file."""
    decision = node.context.find_decision("train_assign", RolloutDecision)
    return aggregate(node, decision, "train_rollout") if decision is not None else None


def aggregate(node: Node, decision: RolloutDecision, rolled_out_in: str) -> MergeDecision:
    """Merge the groups of one split: those that were adopted, and those of the nodes' reports about the row `rolled_out_in`."""
    ctx, split = node.context, decision.split
    reports = ctx.reports_of(rolled_out_in, RolloutReport)
    made, spec = merge_of(ctx, decision, reports)
    merged = node.run(spec)
    made = replace(made, bytes=merged.bytes, reward_mean=merged.reward_mean, last_rewards=merged.last_rewards)
    fields = {
        "split": split,
        "groups_cut_off": len(made.cut_off),
        **({"final": True} if is_final(ctx) else {}),
        **draws_event(ctx, made.draws),
    }
    node.event("rolled_out" if split == "train" else "evaluated", made, fields, merged, merged.figures)
    node.publish_file(spec.request.out, ctx.paths.merged(split, ctx.iteration))
    return made


def is_final(ctx: Context) -> bool:
    """Whether this evaluation ends a session."""
    return ctx.phase.name == "iteration_end"


def merge_of(
    ctx: Context, decision: RolloutDecision, reports: Mapping[int, RolloutReport]
) -> tuple[MergeDecision, MergeSpec]:
    """The decision about a merge, as far as it is known before it, and the spec of the program that merges."""
    split, parts = decision.split, [*decision.adopted]
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
        draws=draw_counts(ctx, wanted, without) if split == "train" else None,
        sampled_how=sampled_how(ctx, split) if split == "test" else None,
        rounds=begun if decision.rounds is not None else None,
        policy_version=ctx.policy_version,
        policy=ctx.policy_identity,
    )
    request = MergeRequest(
        parts=tuple(
            Part(ctx.named_in(folder, part.name), part.valid_bytes, frozenset(part.tasks)) for part in parts
        ),
        out=out,
        metadata={
            "run_id": ctx.run_id,
            "iteration": ctx.iteration,
            "generation": ctx.generation,
            "cut_off": cut_off,
            "split": split,
            "policy_version": ctx.policy_version,
            "policy": ctx.policy_identity,
            **({"final": True} if is_final(ctx) else {}),
        },
        expected=tuple(task for task in wanted if task not in without),
        keep=decision.keep,
    )
    if split == "test":
        return made, MergeSpec(ctx.identity, request, success=success_by_set(ctx))
    return made, MergeSpec(
        ctx.identity, request, sets=tasks_by_set(ctx, frozenset(wanted)), last_rewards=last_rewards(ctx)
    )


def tasks_by_set(ctx: Context, wanted: frozenset[int]) -> dict[str, Sequence[int]]:
    """The sets of training tasks, if there are several, and which of the wanted tasks each has."""
    sets = training_sets(ctx.settings, ctx.tasks)
    return {task_set.name: [*wanted.intersection(task_set.tasks)] for task_set in sets if task_set.name}


def earlier_merges(ctx: Context) -> list[str]:
    """The merged files of earlier iterations, the last one first, as many as an update may draw from beside the new one."""
    before, most = ctx.latest("train_aggregate", MergeDecision), ctx.settings.update.recency - 1
    return [before.merged, *before.earlier][:most] if before is not None else []


def rounds_begun(
    decision: RolloutDecision, reports: Mapping[int, RolloutReport]
) -> tuple[int, Sequence[int]]:
    """How many rounds took place, and their tasks."""
    sizes = decision.round_sizes
    counts = [report.rounds for report in reports.values() if report.rounds is not None]
    # If no node had anything to do, an older generation has done all rounds.
    begun = max(counts, default=len(sizes))
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


def draw_counts(
    ctx: Context, wanted: Sequence[int], cut_off: Collection[int]
) -> dict[str, Sequence[int]] | None:
    """How often each task was drawn and finished so far; None if rollouts wait for all tasks."""
    if ctx.settings.rollout.completion_threshold == 1:
        return None
    before = ctx.latest("train_aggregate", MergeDecision)
    counts = dict((before and before.draws) or {})
    for task in wanted:
        drawn, finished = counts.get(str(task), (0, 0))
        counts[str(task)] = (drawn + 1, finished + (task not in cut_off))
    return counts


def draws_event(ctx: Context, draws: Mapping[str, Sequence[int]] | None) -> JsonObject:
    """For the journal: how many tasks were drawn and finished how often, and the tasks that were drawn most often and never finished."""
    if draws is None:
        return {}
    never = sorted((-drawn, int(task)) for task, (drawn, finished) in draws.items() if not finished)
    # The toy program has no task files.
    files = training_files(ctx.tasks) or {"train": 0}
    named = [(Path(path).stem, task - first) for _, task in never for path, first in [file_of(task, files)]]
    return {
        "draws": [[*pair, tasks] for pair, tasks in sorted(Counter(map(tuple, draws.values())).items())],
        "never_finished": [f"{name}-{index}" for name, index in named[:MOST_NAMED]],
    }


def evaluates(ctx: Context) -> bool:
    """Whether this iteration evaluates."""
    interval = ctx.settings.eval_interval
    due = interval == 1 or (interval > 1 and ctx.iteration % interval == 1)
    return due and ctx.settings.rollout_split != "train-only"


def decide_eval(node: Node) -> RolloutDecision:
    """Leader: decide whether this iteration evaluates, and which node begins with which held-out task."""
    ctx = node.context
    return told(node, share_out_eval(ctx)) if evaluates(ctx) else NO_EVALUATION


def share_out_eval(ctx: Context) -> RolloutDecision:
    """Share out the held-out tasks, each set by itself."""
    rounds = [rollout_round.tasks for rollout_round in eval_rounds(ctx)]
    return share_out(ctx, "test", sampled_how(ctx, "test"), rounds)


def eval_rounds(ctx: Context) -> list[RolloutRound]:
    """One round for each set of held-out tasks. The tasks of all sets are numbered as if they stood in one file."""
    rounds: list[RolloutRound] = []
    first = 0
    for name, settings in ctx.settings.eval_sets.items():
        source = ctx.tasks[name]
        tasks = [
            first + index for index in sample_tasks(source["count"], settings.tasks, seed=0, iteration=1)
        ]
        files, eval_set = {source["path"]: first}, name if ctx.settings.eval.sets else ""
        rounds.append(RolloutRound(tasks, files, sampling_of(settings), eval_set))
        first += source["count"]
    return rounds


def success_by_set(ctx: Context) -> dict[str, float]:
    """The reward from which a trajectory counts as solved, by the name of the set ("" if there is only one)."""
    named = ctx.settings.eval.sets
    return {name if named else "": eval_set.success for name, eval_set in ctx.settings.eval_sets.items()}


def evaluating(ctx: Context) -> RolloutDecision | None:
    """The decision of eval_decide; None if this iteration does not evaluate."""
    decision = ctx.find_decision("eval_decide", RolloutDecision)
    return decision if decision is not None and decision.evaluate else None


def rollout_eval(node: Node) -> RolloutReport | None:
    """Every node, in an iteration that evaluates: roll out its share of the held-out tasks."""
    decision = evaluating(node.context)
    return rollout(node, decision, eval_rounds(node.context)) if decision is not None else None


def aggregate_eval(node: Node) -> MergeDecision | None:
    """Leader, after all nodes: merge the evaluation."""
    decision = evaluating(node.context)
    return aggregate(node, decision, "eval_rollout") if decision is not None else None


# --- update (7-13) ----------------------------------------------------------------------------------------------------


def stop_engine(node: Node) -> JsonObject | None:
    """Every node that samples and trains: free the accelerators' memory for the trainer. A frozen engine on other accelerators stays."""
    ctx = node.context
    if ctx.node_rank not in ctx.trainers:
        return None
    trains_on = set(ctx.trainers[ctx.node_rank])
    frozen = [name for name, devices in ctx.frozen.items() if trains_on.intersection(devices)]
    return node.release_engines(frozen) if frozen or ctx.node_rank in ctx.samplers else None


def prepare_batch(node: Node) -> BatchDecision:
    """Leader: prepare the training batch; if it trains first, open a port on which the others test its addresses."""
    ctx = node.context
    batch = ctx.paths.batch(ctx.iteration, ctx.generation)
    spec = PrepareSpec(ctx.identity, ctx.policy_version, ctx.policy.model, batch, learned_from(ctx))
    node.event("batch_prepared", {"batch": batch.name}, node.run(spec))
    return with_port(node, batch.name)


def with_port(node: Node, batch: str = "") -> BatchDecision:
    """The decision about a batch, with the port where the update's processes meet: the leader's own, or the one that another node has
    opened (`open_port`)."""
    ctx = node.context
    meets = meeting_at(ctx)
    if meets == ctx.leader:
        return BatchDecision(open_rendezvous(node), batch)
    return BatchDecision(ctx.reports_of("batch_prepare", BatchDecision)[meets].port, batch)


def open_port(node: Node) -> BatchDecision | None:
    """The node where the update's processes meet, if it is not the leader: open a port on which the others test its addresses."""
    ctx = node.context
    meets = ctx.node_rank == meeting_at(ctx) and ctx.node_rank != ctx.leader
    return BatchDecision(open_rendezvous(node)) if meets else None


def learned_from(ctx: Context) -> list[Path]:
    """The merged files that the batch is drawn from, this iteration's first. Earlier ones may be missing; then fewer are drawn from.

    The decision names them. In a run that has rolled out nothing, they are the files with the public names.
    """
    merge = ctx.find_decision("train_aggregate", MergeDecision)
    if merge is not None:
        folder = ctx.paths.trajectories("train")
        return [ctx.named_in(folder, name) for name in (merge.merged, *merge.earlier)]
    first = max(1, ctx.iteration - ctx.settings.update.recency + 1)
    return [ctx.paths.merged("train", n) for n in range(ctx.iteration, first - 1, -1)]


def open_rendezvous(node: Node) -> Port:
    """A port on which the others test this node's addresses; 0: the processes of one node choose one among themselves."""
    return 0 if meets_within_a_node(node.context) else node.listen(meeting_addresses(node.context))


def meets_within_a_node(ctx: Context) -> bool:
    """Whether all processes of the update are one node's, and the built-in trainer's."""
    return len(ctx.trainers) == 1 and not ctx.settings.trainer.command


def meeting_at(ctx: Context) -> int:
    """The node where the update's processes meet: the leader, or where it does not train, the first node that does."""
    return ctx.leader if ctx.leader in ctx.trainers else min(ctx.trainers)


def on_one_host(ctx: Context) -> bool:
    return len({ctx.joins[rank].boot_id for rank in ctx.trainers if rank in ctx.joins}) == 1


def meeting_addresses(ctx: Context) -> tuple[str, ...]:
    return ("127.0.0.1",) if on_one_host(ctx) else ctx.joins[meeting_at(ctx)].addresses


def probe_addresses(node: Node) -> ReachReport | None:
    """Every node that trains: report the trainer that it has kept, and which addresses of the meeting node it can reach."""
    ctx = node.context
    prepared = ctx.find_decision("batch_prepare", BatchDecision)
    if ctx.node_rank not in ctx.trainers or prepared is None:
        return None
    meets_here = ctx.node_rank == meeting_at(ctx)
    reached = () if meets_here else node.reachable(meeting_addresses(ctx), prepared.port)
    return ReachReport(reached, ctx.kept)


def choose_address(node: Node, assign: Callable[[Context], RolloutDecision] = assigned) -> RendezvousDecision:
    """Leader: decide what the update makes, choose the first address that all nodes that train have reached, and the trainer that all have
    kept, if any; and share out what the others roll out meanwhile."""
    ctx = node.context
    version = ctx.policy_version + 1
    makes = NewVersion(ctx.paths.checkpoint(version, ctx.generation).name, version)
    prepared = ctx.decision("batch_prepare", BatchDecision)
    reports = ctx.reports_of("update_ready", ReachReport)
    reports[ctx.leader] = ReachReport(trainer=ctx.kept)
    trainers = {reports[rank].trainer for rank in ctx.trainers}
    trainer = trainers.pop() if len(trainers) == 1 else ""
    reached = {rank: reports[rank].reached for rank in ctx.trainers if rank != meeting_at(ctx)}
    for address in meeting_addresses(ctx):
        if all(address in addresses for addresses in reached.values()):
            meeting = RendezvousDecision(makes, address, prepared.port, trainer)
            if not rolls_ahead(ctx):
                return meeting
            return replace(meeting, ahead=told(node, assign(of_next_iteration(ctx))))
    tried = "; ".join(f"node {rank} reached {addresses or 'none'}" for rank, addresses in reached.items())
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


def update(node: Node) -> None:
    """Every node that trains: run one multi-node torchrun, whose processes stay for the next update, or the user's own trainer command.
    The others roll out ahead. Once all nodes that train are done, nobody else can make the update begin again (`Phase.made_by`)."""
    ctx = node.context
    rendezvous = ctx.decision("update_ready", RendezvousDecision)
    if ctx.node_rank in ctx.trainers:
        train(node, rendezvous)
    elif rendezvous.ahead is not None:
        rollout_share(node.seeing(of_next_iteration(ctx)), rendezvous.ahead)


def made_by_the_update(ctx: Context) -> NewVersion:
    """The policy version that this iteration's update makes."""
    return ctx.decision("update_ready", RendezvousDecision).makes


def train(node: Node, rendezvous: RendezvousDecision) -> None:
    """Run this node's part of the update."""
    ctx = node.context
    spec = update_spec(ctx, node.weights_dir)
    # torchrun's first node must be the one where the processes meet.
    order = sorted(ctx.trainers, key=lambda rank: (rank != meeting_at(ctx), rank))
    number, devices, address = order.index(ctx.node_rank), ctx.trainers[ctx.node_rank], rendezvous.master_addr
    env = {} if devices else {"OMP_NUM_THREADS": str(ctx.threads)}
    if address == "127.0.0.1":
        env |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    trainer = ctx.settings.trainer
    if trainer.command:
        values = {
            **spec.as_json(),
            "node_rank": number,
            "num_nodes": len(order),
            "master_addr": address,
            "master_port": rendezvous.master_port,
        }
        argv = tuple(fill_placeholders(word, values) for word in shlex.split(trainer.command))
        node.command(Launch(argv, spec.launch.log, env, devices=devices), spec)
        return
    processes = trainer.processes_per_node or max(1, len(devices))
    leads = ctx.node_rank == meeting_at(ctx)
    # On accelerators only on request: sharing one between an engine and a kept trainer is untested.
    shares = bool(devices) and ctx.node_rank in ctx.samplers
    keeps = trainer.keep == "process" or (trainer.keep == "auto" and not shares)
    launch = Launch.module(
        "fsbarrier.workers.torchrun",
        spec.launch.log,
        *("--nnodes", str(len(order)), "--node-rank", str(number), "--nproc-per-node", str(processes)),
        *("--master-addr", address, "--master-port", str(rendezvous.master_port)),
        *("--max-restarts", "0", "--rdzv-conf", f"timeout={COLLECTIVES_TIMEOUT_S}"),
        *("-m", "fsbarrier.workers.update"),
        resident=Resident(TRAINER, processes, rendezvous.trainer) if keeps else None,
    )
    within = meets_within_a_node(ctx)
    launch = replace(launch, env=env, listens=leads and not within, devices=devices)
    report = node.run(spec, replace(launch, private_network=within and trainer.private_network))
    if leads:
        node.event("updated", rendezvous.makes, report, report.metrics)


def update_spec(ctx: Context, weights_dir: Path | None) -> UpdateSpec:
    """The spec of the trainer."""
    prepared, policy = ctx.decision("batch_prepare", BatchDecision), ctx.policy
    made = made_by_the_update(ctx)
    return UpdateSpec(
        ctx.identity,
        batch=ctx.named_in(ctx.paths.batches, prepared.batch),
        model=policy.model,
        trainer_state=policy.trainer,
        first_model=Path(str(ctx.model)),
        reference=ctx.reference,
        out=ctx.named_in(ctx.paths.checkpoints, made.folder),
        policy_version=policy.version,
        policy=ctx.policy_identity,
        new_policy_version=made.policy_version,
        weights_dir=weights_dir,
    )


def publish_weights(node: Node) -> PublishDecision:
    """Leader: verify the new checkpoint and publish it."""
    return node.publish_weights(publication(node.context))


def publication(ctx: Context) -> Publication:
    """What is published: the version that the update has made, and which others are kept."""
    made, kept = made_by_the_update(ctx), ctx.settings.checkpoint
    trajectories = max(kept.keep_trajectories, ctx.settings.update.recency) if kept.keep_trajectories else 0
    return Publication(
        folder=ctx.named_in(ctx.paths.checkpoints, made.folder),
        policy_version=made.policy_version,
        keep=kept.keep,
        trained_on=ctx.iteration,
        # If the trainer's processes are lost, an update continues from their last saved state, and needs these batches again.
        keep_batches=max(kept.keep, kept.trainer_every or kept.whole_every),
        keep_trajectories=trajectories,
        keep_every=kept.keep_every,
        best=ctx.best_evaluated,
        previous=ctx.policy_identity,
    )


def start_engine(node: Node) -> EnginesReport | None:
    """Every node that samples: have vLLM serve the new weights, by reloading them or by starting it."""
    ctx = node.context
    if ctx.settings.rl_phase == "update" or ctx.node_rank not in ctx.samplers:
        return None
    # A node that gets ready before it joins has no decisions, and is alone. An engine over several nodes starts once all are there.
    if ctx.settings.engine.nodes > 1 and not ctx.decisions:
        return None
    return EnginesReport(len(node.serve(served(ctx))))


# --- the last policy (12-13 of a session's last iteration) ----------------------------------------------------------------


def following(ctx: Context) -> Context:
    """The context of the next iteration. Row 12 of this iteration decides its evaluation, and row 13 does it.

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


def decide_final(node: Node) -> RolloutDecision:
    """Leader: decide which node begins with which held-out task."""
    ctx = node.context
    return told(node, share_out_eval(following(ctx))) if ctx.settings.eval_interval > 0 else NO_EVALUATION


def rollout_final(node: Node) -> RolloutReport | None:
    """Every node: roll out its share of the held-out tasks."""
    return rollout_eval(node.seeing(following(node.context)))


def aggregate_final(node: Node) -> MergeDecision:
    """Leader, after all nodes: merge the evaluation. Without an evaluation the empty decision still shows that the iteration was closed."""
    return aggregate_eval(node.seeing(following(node.context))) or MergeDecision()


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
        Phase(10, "update", each=update, resume="engine_stop", made_by="placement.update"),
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
