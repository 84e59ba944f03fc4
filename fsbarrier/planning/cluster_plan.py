"""Computes `fsbarrier plan`: the resources that a run needs on given machines, and whether it fits. Pure.

If it does not fit, each problem is one line with the required and available amounts, and the nearest settings that work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from fsbarrier.engine.placement import check_arguments, replicas
from fsbarrier.engine.server import ASLEEP_BYTES
from fsbarrier.errors import UsageError
from fsbarrier.planning.memory import EXACT, Sharding, UpdateLoad, choose_sharding, shards_of
from fsbarrier.planning.model_shape import ModelShape
from fsbarrier.planning.publication import (
    Publication,
    publication,
    publication_lines,
    publishes_adapters,
    size_text,
)
from fsbarrier.settings.placement import Ranges
from fsbarrier.settings.sections import ServerSettings, Settings, TrainerSettings
from fsbarrier.store.reading import GIB
from fsbarrier.wording import counted, gib

# Memory of an engine other than weights and cache: activations of one step, graphs, context.
ENGINE_BYTES = 2 * GIB


@dataclass(frozen=True, slots=True)
class Cluster:
    """The machines. `accelerators`: per node, 0 for CPUs; `memory_bytes`: per accelerator, or of the host for CPUs."""

    nodes: int
    accelerators: int
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """The engines of one model on `nodes`: `replicas` per node, or per `over` nodes that share one. `parts`: bytes per accelerator;
    `cache_tokens`: the tokens that fit into the cache of each."""

    nodes: int
    accelerators: int
    replicas: int = 0
    tensor_parallel_size: int = 1
    over: int = 1
    parts: Mapping[str, int] = field(default_factory=dict)
    cache_tokens: int = 0


@dataclass(frozen=True, slots=True)
class CheckpointBytes:
    """Sizes of one checkpoint's model, critic and trainer state; `kept`: of all checkpoints on disk while one is being written."""

    model: int
    trainer_state: int
    kept: int
    critic: int


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """The numbers of one run. Bytes are per accelerator unless noted otherwise."""

    cluster: Cluster
    # --- rollouts ---
    rollout: EnginePlan
    # The plan of each frozen engine, by name.
    engines: Mapping[str, EnginePlan]
    # --- the update ---
    world: int
    shard: Sharding
    load: UpdateLoad
    optimizer_steps: int
    available: int
    # --- checkpoints and host memory ---
    checkpoint: CheckpointBytes
    # What an update moves through the run directory.
    publication: Publication
    # Bytes that are offloaded to each node's own memory.
    host: int
    problems: tuple[str, ...]

    @property
    def copies(self) -> int:
        """The number of copies of the policy during an update."""
        return self.world // (self.load.shards if self.load.zero_stage not in (1, 2) else 1)


def make_plan(
    shape: ModelShape,
    settings: Settings,
    machines: Cluster,
    frozen: Mapping[str, ModelShape] | None = None,
) -> ClusterPlan:
    """Compute the plan, each role by itself on the machines that hold it. If the run does not fit, the plan's `problems` say why.

    `frozen`: the shapes of the frozen engines' models. Raises UsageError for a placement that no machine has.
    """
    trainer, rollout = settings.trainer, settings.rollout
    sampling = _held(machines, f"placement.rollout={settings.placement.rollout}")
    engine, problems = _engine(shape, settings.engine, "engine", sampling)
    engines = {}
    for name, own in (frozen or {}).items():
        placed = settings.engines[name].placement
        held = sampling if placed is None else _held(machines, f"placement.{name}={placed}")
        engines[name], more = _engine(own, settings.engines[name], f"engines.{name}", held)
        problems += more
    cluster = _held(machines, f"placement.update={settings.placement.update}")
    per_node = processes_per_node(trainer, cluster)
    world = cluster.nodes * per_node
    shard, load = update_load(shape, settings, cluster)
    available = _available(cluster, per_node)
    problems += _update_problems(shape, settings, cluster, load, shard)
    steps = trainer.epochs * max(1, round(rollout.tasks * rollout.samples / trainer.minibatch))
    critic = load.critic.parameters if load.critic is not None else 0
    checkpoint = checkpoint_bytes(shape.parameters, load.trained, load.element, settings, critic)
    shares = bool(machines.accelerators) and settings.placement.rollout == settings.placement.update
    moved = publication(
        settings,
        model=checkpoint.model,
        state=checkpoint.trainer_state,
        adapters=load.trained * EXACT if settings.lora.rank else 0,
        in_float32=load.element == EXACT,
        processes_end=trainer.keep == "nothing" or (trainer.keep == "auto" and shares),
    )
    return ClusterPlan(
        cluster=machines,
        rollout=engine,
        engines=engines,
        world=world,
        shard=shard,
        load=load,
        optimizer_steps=steps,
        available=available,
        checkpoint=checkpoint,
        publication=moved,
        host=load.on_host * per_node,
        problems=tuple(problems),
    )


def checkpoint_bytes(
    parameters: int, trained: int, element: int, settings: Settings, critic: int
) -> CheckpointBytes:
    """Estimate the sizes. `trained`: the parameters that have gradients; `element`: bytes per element of the compute dtype; `critic`: the
    parameters of a critic."""
    serving = EXACT if element == EXACT else 2
    # The served weights do not contain the adapters separately.
    exact_copy = 0 if serving == EXACT and not settings.lora.rank else EXACT
    model, state = parameters * serving, trained * (2 * EXACT + exact_copy)
    # A critic has no adapters.
    state += critic * (2 * EXACT + (0 if serving == EXACT else EXACT))
    versions = _versions_on_disk(settings)
    kept = (model + critic * serving + state) * versions
    if publishes_adapters(settings):
        # A session's last version is whole.
        kept = model + (trained * EXACT + state) * versions
    return CheckpointBytes(model, state, kept, critic * serving)


def bytes_of_a_number(trainer: TrainerSettings, *, on_cpu: bool) -> int:
    """Bytes per element of the compute dtype."""
    dtype = trainer.dtype if trainer.dtype != "auto" else "float32" if on_cpu else "bfloat16"
    return EXACT if dtype == "float32" else 2


def _versions_on_disk(settings: Settings) -> int:
    """The maximum number of policy versions on disk while one is being written (see retention.py)."""
    checkpoint, iterations = settings.checkpoint, settings.iterations
    kept_for_good = (iterations or 0) // checkpoint.keep_every if checkpoint.keep_every else 0
    # Evaluations decide which version is the best one, which is kept too.
    best = 1 if settings.eval_interval > 0 else 0
    # The newest version and the one before it are always kept, and one more is being written.
    at_most = max(checkpoint.keep, 2) + 1 + best + kept_for_good
    return min(at_most, iterations) if iterations else at_most


def processes_per_node(trainer: TrainerSettings, cluster: Cluster) -> int:
    """The number of training processes per node."""
    return trainer.processes_per_node or max(1, cluster.accelerators)


def update_load(shape: ModelShape, settings: Settings, cluster: Cluster) -> tuple[Sharding, UpdateLoad]:
    """The sharding of the update, and the load of one process."""
    trainer, on_cpu = settings.trainer, not cluster.accelerators
    element = bytes_of_a_number(trainer, on_cpu=on_cpu)
    load = UpdateLoad.whole(shape, settings, element=element, accelerated=not on_cpu)
    per_node, chosen = processes_per_node(trainer, cluster), trainer.shard
    if load.zero_stage is not None:
        # Every ZeRO stage shards something over all processes.
        chosen = "all"
    if chosen == "auto":
        available = _available(cluster, per_node)
        chosen = choose_sharding(load, nodes=cluster.nodes, per_node=per_node, available=available)
    return chosen, replace(load, shards=shards_of(chosen, cluster.nodes, per_node))


def _available(cluster: Cluster, per_node: int) -> int:
    """The memory available to one training process."""
    if cluster.accelerators:
        return cluster.memory_bytes - ASLEEP_BYTES
    return cluster.memory_bytes // per_node


# --- the engine ---------------------------------------------------------------------------------------------------------------


def _held(machines: Cluster, placed: str) -> Cluster:
    """The part of the machines that holds a role; `accelerators` is the smallest number that a node gives to it. Raises UsageError."""
    ranges = Ranges.parse(placed.partition("=")[2])
    held = ranges.holders(range(machines.nodes), machines.accelerators)
    beyond = None if ranges.nodes else ranges.beyond(machines.nodes * machines.accelerators)
    if not held or beyond is not None:
        existing = (
            f"there are {machines.nodes * machines.accelerators}"
            if beyond is None
            else f"there is no accelerator {beyond}"
        )
        raise UsageError(
            f"{placed}: {existing} on {machines.nodes} nodes with {machines.accelerators} accelerators each"
        )
    return replace(machines, nodes=len(held), accelerators=min(map(len, held.values())))


def _engine(
    shape: ModelShape, engine: ServerSettings, group: str, cluster: Cluster
) -> tuple[EnginePlan, list[str]]:
    """Plan the engines of one model; also returns the problems. `group`: how the names of their settings begin."""
    size, over = engine.tensor_parallel_size, engine.over
    plan = EnginePlan(cluster.nodes, cluster.accelerators, tensor_parallel_size=size, over=over)
    try:
        check_arguments(engine, group)
        plan = replace(plan, replicas=replicas(engine, cluster.accelerators, group))
    except UsageError as error:
        return plan, [str(error)]
    if not cluster.accelerators:
        return plan, []
    longest, most = engine.max_model_len, cluster.accelerators * over
    parts, tokens = _engine_parts(shape, engine, cluster, size)
    plan = replace(plan, parts=parts, cache_tokens=tokens)
    if tokens >= longest:
        return plan, []
    # Prefer sizes that leave no accelerator idle.
    sizes = sorted(range(over, most + 1, over), key=lambda size: most % size > 0)
    fits = [n for n in sizes if _engine_parts(shape, engine, cluster, n)[1] >= longest]
    nearest = f"{group}.tensor_parallel_size={fits[0]}" if fits else "more memory, or a smaller model"
    why = (
        f"there is room for {tokens:,} tokens beside the weights, but one sequence may have {longest:,} ({group}.max_model_len)"
        if parts
        else f"{shape.heads} attention heads and {shape.key_value_heads} KV heads cannot be split so"
    )
    problem = f"{group}.tensor_parallel_size={size}: {why}; the nearest that works: {nearest}"
    return plan, [problem]


def _splits(shape: ModelShape, size: int) -> bool:
    """Whether vLLM can split the model over `size` accelerators: heads must divide evenly; KV heads may be replicated."""
    keys = shape.key_value_heads
    return not shape.heads % size and (keys % size == 0 or size % keys == 0)


def _engine_parts(
    shape: ModelShape, engine: ServerSettings, cluster: Cluster, size: int
) -> tuple[dict[str, int], int]:
    """The memory per accelerator of an engine over `size` accelerators, and the tokens in its cache; ({}, 0) if impossible."""
    if not _splits(shape, size):
        return {}, 0
    element = EXACT if engine.dtype == "float32" else 2
    weights = shape.parameters * element // size
    budget = int(cluster.memory_bytes * engine.gpu_memory_utilization)
    cache = budget - weights - ENGINE_BYTES
    # A KV head needed by several accelerators is replicated.
    a_token = element * shape.layers * max(shape.cached // size, shape.cached // shape.key_value_heads)
    parts = {"weights": weights, "key-value cache": max(0, cache), "overhead": ENGINE_BYTES}
    return parts, max(0, cache) // a_token


# --- the update ---------------------------------------------------------------------------------------------------------------


def _update_problems(
    shape: ModelShape, settings: Settings, cluster: Cluster, load: UpdateLoad, shard: Sharding
) -> list[str]:
    available = _available(cluster, processes_per_node(settings.trainer, cluster))
    if settings.trainer.command is not None or load.total <= available:
        return []
    how = f"trainer.shard={shard}" if load.zero_stage is None else f"DeepSpeed ZeRO-{load.zero_stage}"
    parts = ", ".join(f"{name} {gib(amount)}" for name, amount in load.parts.items() if amount)
    each = "accelerator" if cluster.accelerators else "process"
    return [
        f"{how}: the update needs {gib(load.total)} of each {each} ({parts}), but only {gib(available)} are available; the nearest that "
        f"works: {_nearest(shape, settings, cluster)}"
    ]


def _nearest(shape: ModelShape, settings: Settings, cluster: Cluster) -> str:
    """Settings with which the update would fit on these machines; changes are added one after the other, the cheapest first."""
    per_node = processes_per_node(settings.trainer, cluster)
    load, shown = update_load(shape, settings, cluster)[1], dict[str, str]()
    changes: tuple[tuple[str, Any], ...] = (
        ("shard", "all"),
        ("gradient_checkpointing", True),
        ("max_tokens_per_micro_batch", settings.engine.max_model_len),
        ("offload", "optimizer"),
        ("offload", "all"),
    )
    for name, value in changes:
        changed = replace(settings, trainer=replace(settings.trainer, **{name: value}))
        smaller = update_load(shape, changed, cluster)[1]
        if smaller.total >= load.total:
            continue
        settings, load, shown[name] = changed, smaller, f"trainer.{name}={str(value).lower()}"
        if load.total <= _available(cluster, per_node):
            host = f" ({gib(load.on_host * per_node)} of each node's memory)" if load.on_host else ""
            return " ".join(shown.values()) + host
    return "more nodes, or accelerators with more memory"


# --- the plan as text and JSON --------------------------------------------------------------------------------------------------------


def lines(plan: ClusterPlan) -> list[str]:
    """The plan for people, a line or two per topic."""
    cluster, load, checkpoint = plan.cluster, plan.load, plan.checkpoint
    parts = load.parts
    size = f"{_number(load.shape.parameters)} parameters"
    if load.shape.vision:
        size += (
            f", {_number(load.shape.vision)} of them for images{' and not trained' if load.frozen else ''},"
        )
    machines = f"{size} on {counted(cluster.nodes, 'node')}"
    if cluster.accelerators:
        machines += (
            f" of {counted(cluster.accelerators, 'accelerator')} with {size_text(cluster.memory_bytes)}"
        )
    each = "each accelerator" if cluster.accelerators else "each process"
    text = [machines]
    for what, engine in {"rollouts": plan.rollout, **plan.engines}.items():
        used, available = engine.replicas * engine.tensor_parallel_size // engine.over, engine.accelerators
        idle = (
            f" over {counted(used, 'accelerator')}, {available - used} idle" if 0 < used < available else ""
        )
        some = f" on {counted(engine.nodes, 'node')}" if engine.nodes < cluster.nodes else ""
        share = "a node" if engine.over == 1 else f"for each {engine.over} nodes"
        text.append(f"{what:<13} {counted(engine.replicas, 'engine')} {share}{some}{idle}")
        if engine.parts:
            text.append(
                f"  {each}: {_parts(engine.parts)}; the cache holds {engine.cache_tokens:,} tokens an engine"
            )
    if plan.copies == plan.world:
        sharded = f"shard={plan.shard}: a copy on each"
    else:
        sharded = f"shard={plan.shard}: {counted(plan.copies, 'copy', 'copies')}, each over {plan.world // plan.copies}"
    if load.zero_stage is not None:
        sharded = f"DeepSpeed ZeRO-{load.zero_stage}: {sharded.partition(': ')[2]}"
    critic = f"critic {size_text(checkpoint.critic)}, " if checkpoint.critic else ""
    text += [
        f"update        {counted(plan.world, 'process', 'processes')}, {sharded}; {counted(plan.optimizer_steps, 'step')}, in "
        f"micro-batches of {load.tokens:,} tokens",
        f"  {each}: {_parts(parts)}; {size_text(sum(parts.values()))} of {size_text(max(0, plan.available))}",
        f"checkpoint    model {size_text(checkpoint.model)}, {critic}trainer state {size_text(checkpoint.trainer_state)}; "
        f"{size_text(checkpoint.kept)} on disk with those that are kept",
    ]
    text += publication_lines(plan.publication)
    if plan.host:
        text.append(f"host memory   of each node {size_text(plan.host)} for what is offloaded")
    return text


def as_json(plan: ClusterPlan) -> dict[str, object]:
    """Every figure by its name, in bytes."""
    return {**asdict(plan), "copies": plan.copies, "update": plan.load.parts}


def _parts(parts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size_text(amount)}" for name, amount in parts.items() if amount)


def _number(parameters: int) -> str:
    if parameters >= 10**8:
        return f"{parameters / 1e9:.2f} billion"
    return f"{parameters / 1e6:.2f} million"
