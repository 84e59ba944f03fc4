"""What a run of given settings comes to on given machines, and whether it can be: the arithmetic behind `fsbarrier plan`. Pure.

What cannot be is a problem in one line: what is needed, what there is, and the nearest that works.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from fsbarrier.engine.placement import check_arguments, replicas
from fsbarrier.errors import UsageError
from fsbarrier.planning.memory import EXACT, GIB, Shard, UpdateLoad, choose_shard, shards_of
from fsbarrier.planning.model_shape import ModelShape
from fsbarrier.settings import deepspeed_config
from fsbarrier.settings.sections import Settings, TrainerSettings

# What an engine needs beside weights and cache: activations of one step, graphs, its context.
ENGINE_BYTES = 2 * GIB
# What it keeps on the accelerator while it sleeps and the trainer works.
ASLEEP_BYTES = 2 * GIB
# How far the search for enough nodes goes.
MOST_NODES = 1024


Change = Callable[[TrainerSettings], TrainerSettings]


@dataclass(frozen=True, slots=True)
class Cluster:
    """The machines. `accelerators`: of each node, 0 on CPUs; `memory_bytes`: of each accelerator, on CPUs of the host.

    `host_bytes`: of each node; 0: not known.
    """

    nodes: int
    accelerators: int
    memory_bytes: int
    host_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """The figures of one run. Bytes are of one accelerator where nothing else is said."""

    cluster: Cluster
    parameters: int
    # --- rollouts ---
    replicas: int
    groups_in_flight: int
    sequences_in_flight: int
    engine: Mapping[str, int]
    cache_tokens: int
    # --- the update ---
    world: int
    shard: Shard
    shards: int
    trajectories: int
    minibatch: int
    optimizer_steps: int
    micro_batch_tokens: int
    micro_batches: int
    update_tokens: int
    update: Mapping[str, int]
    available: int
    # --- what stays ---
    model_bytes: int
    trainer_state_bytes: int
    kept_bytes: int
    host: int
    problems: tuple[str, ...]

    @property
    def copies(self) -> int:
        """How many copies of the policy there are in an update."""
        return self.world // self.shards

    @property
    def update_bytes(self) -> int:
        return sum(self.update.values())


def make_plan(shape: ModelShape, settings: Settings, cluster: Cluster) -> Plan:
    """Never raises for a combination that cannot be: its `problems` say so."""
    trainer, rollout = settings.trainer, settings.rollout
    engine, cache_tokens, count, problems = _engine(shape, settings, cluster)
    per_node = processes_per_node(trainer, cluster)
    world = cluster.nodes * per_node
    shard, load = update_load(shape, settings, cluster)
    available = _available(cluster, per_node)
    problems += _update_problems(shape, settings, cluster, load, shard)
    trajectories = rollout.tasks * rollout.samples
    steps = trainer.epochs * max(1, round(trajectories / trainer.minibatch))
    longest = settings.engine.max_model_len
    in_one = max(1, load.tokens // longest)
    serving = EXACT if load.element == EXACT else 2
    exact_copy = 0 if serving == EXACT else EXACT
    model = shape.parameters * serving
    state = load.trained * (2 * EXACT + exact_copy)
    host = load.on_host * per_node
    if cluster.host_bytes and host > cluster.host_bytes:
        problems.append(
            f"trainer.offload={trainer.offload}: needs {_gib(host)} of each node's memory, there are {_gib(cluster.host_bytes)}; "
            "more nodes, or trainer.offload=none"
        )
    return Plan(
        cluster=cluster,
        parameters=shape.parameters,
        replicas=count,
        groups_in_flight=rollout.concurrency * count * cluster.nodes,
        sequences_in_flight=rollout.concurrency * count * cluster.nodes * rollout.samples,
        engine=engine,
        cache_tokens=cache_tokens,
        world=world,
        shard=shard,
        shards=load.shards,
        trajectories=trajectories,
        minibatch=trainer.minibatch,
        optimizer_steps=steps,
        micro_batch_tokens=load.tokens,
        micro_batches=math.ceil(math.ceil(trainer.minibatch / world) / in_one),
        update_tokens=trajectories * trainer.epochs * longest,
        update=load.parts,
        available=available,
        model_bytes=model,
        trainer_state_bytes=state,
        kept_bytes=(model + state) * (settings.checkpoint.keep + 1),
        host=host,
        problems=tuple(problems),
    )


def processes_per_node(trainer: TrainerSettings, cluster: Cluster) -> int:
    """The training processes of a node."""
    return trainer.processes_per_node or max(1, cluster.accelerators)


def update_load(shape: ModelShape, settings: Settings, cluster: Cluster) -> tuple[Shard, UpdateLoad]:
    """How the update is sharded, and what one process of it takes then."""
    trainer, on_cpu = settings.trainer, not cluster.accelerators
    dtype = trainer.dtype if trainer.dtype != "auto" else "float32" if on_cpu else "bfloat16"
    element = EXACT if dtype == "float32" else 2
    load = UpdateLoad.whole(shape, settings, element=element, accelerated=not on_cpu)
    per_node, chosen = processes_per_node(trainer, cluster), trainer.shard
    if trainer.backend == "deepspeed":
        given = deepspeed_config.read(trainer.deepspeed)
        # The first two stages take more than "all" and less than this.
        chosen = "all" if deepspeed_config.stage_of(given) == 3 else "none"
    if chosen == "auto":
        available = _available(cluster, per_node)
        chosen = choose_shard(
            load, nodes=cluster.nodes, per_node=per_node, available=available, host=cluster.host_bytes
        )
    return chosen, replace(load, shards=shards_of(chosen, cluster.nodes, per_node))


def _available(cluster: Cluster, per_node: int) -> int:
    """What one training process may take."""
    if cluster.accelerators:
        return cluster.memory_bytes - ASLEEP_BYTES
    return cluster.memory_bytes // per_node


# --- the engine ---------------------------------------------------------------------------------------------------------------


def _engine(
    shape: ModelShape, settings: Settings, cluster: Cluster
) -> tuple[dict[str, int], int, int, list[str]]:
    """(bytes of each of its accelerators by part, tokens that its cache holds, replicas a node, problems)."""
    engine = settings.engine
    try:
        check_arguments(engine)
        count = replicas(engine, cluster.accelerators)
    except UsageError as error:
        return {}, 0, 0, [str(error)]
    if not cluster.accelerators:
        return {}, 0, count, []
    size = engine.tensor_parallel_size
    parts, tokens = _engine_parts(shape, settings, cluster, size)
    if not parts:
        return (
            {},
            0,
            count,
            [
                f"engine.tensor_parallel_size={size}: the attention of this model cannot be split so; give a divisor of its "
                f"{shape.heads} heads"
            ],
        )
    if tokens >= engine.max_model_len:
        return parts, tokens, count, []
    budget = int(cluster.memory_bytes * engine.gpu_memory_utilization)
    sizes = (more for more in range(size + 1, cluster.accelerators + 1) if cluster.accelerators % more == 0)
    fits = next(
        (more for more in sizes if _engine_parts(shape, settings, cluster, more)[1] >= engine.max_model_len),
        None,
    )
    nearest = (
        f"engine.tensor_parallel_size={fits}" if fits else "a smaller model, or accelerators with more memory"
    )
    problem = (
        f"engine.tensor_parallel_size={size}: weights of {_gib(parts['weights'])} leave room for {tokens:,} tokens in the "
        f"{_gib(budget)} that an engine may take, one sequence has {engine.max_model_len:,} (engine.max_model_len); "
        f"the nearest that works: {nearest}"
    )
    return parts, tokens, count, [problem]


def _engine_parts(
    shape: ModelShape, settings: Settings, cluster: Cluster, size: int
) -> tuple[dict[str, int], int]:
    """What an engine over `size` accelerators takes of each, and how many tokens its cache holds; ({}, 0) where none can be."""
    engine = settings.engine
    if shape.heads % size:
        return {}, 0
    element = EXACT if engine.dtype == "float32" else 2
    weights = shape.parameters * element // size
    budget = int(cluster.memory_bytes * engine.gpu_memory_utilization)
    cache = budget - weights - ENGINE_BYTES
    if engine.kv_cache_mb is not None:
        cache = min(cache, engine.kv_cache_mb << 20)
    # A head of keys that several accelerators need is there on each of them.
    a_token = (
        2 * element * shape.layers * max(shape.key_value // size, shape.key_value // shape.key_value_heads)
    )
    parts = {"weights": weights, "key-value cache": max(0, cache), "overhead": ENGINE_BYTES}
    return parts, max(0, cache) // a_token


# --- the update ---------------------------------------------------------------------------------------------------------------


def _update_problems(
    shape: ModelShape, settings: Settings, cluster: Cluster, load: UpdateLoad, shard: Shard
) -> list[str]:
    if settings.trainer.command is not None:
        return []
    available = _available(cluster, processes_per_node(settings.trainer, cluster))
    if load.total <= available:
        return []
    parts = ", ".join(f"{name} {_gib(amount)}" for name, amount in load.parts.items() if amount)
    nearest = " or ".join(_nearest(settings, shape, cluster)) or "none on machines like these"
    return [
        f"trainer.shard={shard}: the update needs {_gib(load.total)} of each accelerator ({parts}), there are {_gib(available)}; "
        f"the nearest that works: {nearest}"
    ]


def _nearest(settings: Settings, shape: ModelShape, cluster: Cluster) -> Iterator[str]:
    """What would make the update fit: settings, each kept as the next is added, and a number of nodes."""
    trainer, longest = settings.trainer, settings.engine.max_model_len
    changes: tuple[tuple[str, str, Change], ...] = (
        ("shard", "all", lambda t: replace(t, shard="all")),
        ("gradient_checkpointing", "true", lambda t: replace(t, gradient_checkpointing=True)),
        (
            "max_tokens_per_micro_batch",
            str(longest),
            lambda t: replace(t, max_tokens_per_micro_batch=min(longest, t.max_tokens_per_micro_batch)),
        ),
        ("offload", "optimizer", lambda t: replace(t, offload="optimizer")),
        ("offload", "all", lambda t: replace(t, offload="all")),
    )
    per_node = processes_per_node(trainer, cluster)

    def load_with(changed: TrainerSettings, machines: Cluster) -> UpdateLoad:
        return update_load(shape, replace(settings, trainer=changed), machines)[1]

    needed, said = load_with(trainer, cluster).total, dict[str, str]()
    for name, value, change in changes:
        load = load_with(change(trainer), cluster)
        # Some are in effect already.
        if load.total < needed:
            trainer, needed, said[name] = change(trainer), load.total, value
        if needed <= _available(cluster, per_node):
            host = f" ({_gib(load.on_host * per_node)} of each node's memory)" if load.on_host else ""
            yield " ".join(f"trainer.{each}={text}" for each, text in said.items()) + host
            break
    if said.keys() == {"shard"}:
        return
    auto = replace(settings.trainer, shard="auto")
    for nodes in range(cluster.nodes + 1, MOST_NODES + 1):
        machines = replace(cluster, nodes=nodes)
        if load_with(auto, machines).total <= _available(machines, per_node):
            said_so = settings.trainer.shard in ("auto", "all")
            yield f"{nodes} nodes{'' if said_so else ' with trainer.shard=auto'}"
            break


def _gib(amount: int) -> str:
    return f"{amount / GIB:.1f} GiB"
