"""Formats a plan as text and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from fsbarrier.planning.cluster_plan import ClusterPlan
from fsbarrier.protocol.wording import counted, gib
from fsbarrier.store.reading import GIB, MIB


def lines(plan: ClusterPlan) -> list[str]:
    """The figures by topic."""
    cluster = plan.cluster
    size = f"{_number(plan.parameters)} parameters"
    if plan.vision:
        size += f", {_number(plan.vision)} of them for images{' and not trained' if plan.frozen else ''},"
    machines = f"{size} on {counted(cluster.nodes, 'node')}"
    if cluster.accelerators:
        machines += f" of {counted(cluster.accelerators, 'accelerator')} with {_size(cluster.memory_bytes)}"
    each = "each accelerator" if cluster.accelerators else "each process"
    said = [machines]
    for what, engine in {"rollouts": plan.rollout, **plan.engines}.items():
        used, there = engine.replicas * engine.tensor_parallel_size, engine.accelerators
        idle = f" over {counted(used, 'accelerator')}, {there - used} idle" if 0 < used < there else ""
        some = f" on {counted(engine.nodes, 'node')}" if engine.nodes < cluster.nodes else ""
        said.append(f"{what:<13} {counted(engine.replicas, 'engine')} a node{some}{idle}")
        if engine.parts:
            said.append(
                f"  {each}: {_parts(engine.parts)}; the cache holds {engine.cache_tokens:,} tokens an engine"
            )
    if plan.copies == plan.world:
        sharded = f"shard={plan.shard}: a copy on each"
    else:
        sharded = f"shard={plan.shard}: {counted(plan.copies, 'copy', 'copies')}, each over {plan.world // plan.copies}"
    if plan.zero_stage is not None:
        sharded = f"DeepSpeed ZeRO-{plan.zero_stage}: {sharded.partition(': ')[2]}"
    critic = f"critic {_size(plan.critic_bytes)}, " if plan.critic_bytes else ""
    said += [
        f"update        {counted(plan.world, 'process', 'processes')}, {sharded}; {counted(plan.optimizer_steps, 'step')}, in "
        f"micro-batches of {plan.micro_batch_tokens:,} tokens",
        f"  {each}: {_parts(plan.update)}; {_size(plan.update_bytes)} of {_size(max(0, plan.available))}",
        f"checkpoint    model {_size(plan.model_bytes)}, {critic}trainer state {_size(plan.trainer_state_bytes)}; "
        f"{_size(plan.kept_bytes)} on disk with those that are kept",
    ]
    if plan.host:
        said.append(f"host memory   of each node {_size(plan.host)} for what is offloaded")
    return said


def as_json(plan: ClusterPlan) -> dict[str, object]:
    """Every figure by its name, in bytes."""
    return {**asdict(plan), "copies": plan.copies, "update_bytes": plan.update_bytes}


def _parts(parts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {_size(amount)}" for name, amount in parts.items() if amount)


def _number(parameters: int) -> str:
    if parameters >= 10**8:
        return f"{parameters / 1e9:.2f} billion"
    return f"{parameters / 1e6:.2f} million"


def _size(amount: int) -> str:
    return gib(amount) if amount >= GIB // 10 else f"{amount / MIB:.1f} MiB"
