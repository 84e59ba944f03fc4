"""Checks whether the nodes of a session fit together and are large enough for the run, by their fingerprints.

Each node does this once in each era, before its first work (run/job_runner.py), so before anything is loaded. All nodes get the same
result. If the run cannot work like this, a session that starts is refused. The leader logs risks to the journal.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fsbarrier.context import Context
from fsbarrier.engine.model import inspect
from fsbarrier.engine.placement import replicas
from fsbarrier.errors import ProgramFailed, UsageError
from fsbarrier.planning.cluster_plan import bytes_of_a_number, checkpoint_bytes
from fsbarrier.run.fingerprint import PACKAGES, Fingerprint
from fsbarrier.settings.placement import ROLES, Ranges, consecutive
from fsbarrier.settings.sections import FrozenEngineSettings, ServerSettings, Settings
from fsbarrier.store.reading import GIB
from fsbarrier.wording import counted, gib

# Memory in use up to this size is attributed to the driver, not to other programs.
IN_USE_BY_NOBODY = GIB

Nodes = Mapping[int, Fingerprint]


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem, and the values on the nodes (`found`). `refused`: the run cannot work like this; otherwise it is a risk."""

    refused: bool
    what: str
    found: str

    def __str__(self) -> str:
        return f"{'refused' if self.refused else 'warning'}  {self.what:<22} {self.found}"


def problems(context: Context) -> list[Problem]:
    """Find the problems of a generation's nodes."""
    nodes = {
        member.rank: Fingerprint.of(join.fingerprint)
        for member in context.members
        if (join := context.joins.get(member.rank)) is not None and join.fingerprint
    }
    hosts = {member.rank: member.host for member in context.members}
    parameters: int | None = None
    if context.model is not None:
        # The first use of an unreadable model reports the error.
        parameters = 0
        with contextlib.suppress(ProgramFailed, OSError):
            parameters = inspect(context.model).parameters
    return check_nodes(nodes, hosts, context.settings, parameters)


def check_nodes(
    nodes: Nodes, hosts: Mapping[int, str], settings: Settings, parameters: int | None
) -> list[Problem]:
    """The problems, the worst first. `parameters`: of the run's model; None if there is none, 0 if their number is unknown."""
    noticed = [*_missing_accelerators(nodes, hosts, settings), *_misplaced(nodes, settings)]
    noticed += _crowded(nodes, settings) if parameters is not None else ()
    updates = parameters is not None and settings.rl_phase != "rollout"
    used = {
        "deepspeed": settings.trainer.backend == "deepspeed",
        "peft": settings.lora.rank > 0,
    }
    needed = [name for name in PACKAGES if used.get(name, True)]
    noticed += _training_processes(nodes, settings) if updates else ()
    noticed += _differences(nodes, hosts, needed, updates=updates)
    noticed += _in_use(nodes, hosts)
    if parameters and updates:
        noticed += _checkpoint_room(nodes, hosts, settings, parameters)
    return sorted(noticed, key=lambda problem: not problem.refused)


def _missing_accelerators(nodes: Nodes, hosts: Mapping[int, str], settings: Settings) -> Iterator[Problem]:
    """`--expect-gpus`: name the nodes that have fewer accelerators than an equal share."""
    expected, present = settings.expect_gpus, sum(len(node.accelerators) for node in nodes.values())
    if expected is None or present >= expected:
        return
    per_node = -(-expected // settings.num_nodes)
    lacking = [
        f"{_node_and_host(rank, hosts)} has {len(nodes[rank].accelerators)} of {per_node}"
        if rank in nodes
        else f"node {rank} is not there"
        for rank in range(settings.num_nodes)
        if rank not in nodes or len(nodes[rank].accelerators) < per_node
    ]
    yield Problem(True, f"--expect-gpus {expected}", f"there are {present}: {', '.join(lacking)}")


def _misplaced(nodes: Nodes, settings: Settings) -> Iterator[Problem]:
    """`placement.*`: find ranges beyond the nodes' accelerators, roles that overlap, and accelerators or nodes without a role."""
    placed = {f"{name}={text}": Ranges.parse(text) for name, text in settings.placed.items()}
    counts = {rank: len(node.accelerators) for rank, node in nodes.items()}
    per_node, num_nodes = max(counts.values(), default=0), settings.num_nodes
    for setting, ranges in placed.items():
        if ranges.everything or ranges.nodes:
            continue
        beyond = ranges.beyond(per_node * num_nodes)
        if len(set(counts.values())) > 1 or not per_node:
            counted_as = ", ".join(f"node {rank} has {count}" for rank, count in counts.items())
            yield Problem(
                True,
                setting,
                f"numbers count accelerators of equal nodes, and {counted_as}; name whole nodes, as node:0-1",
            )
        elif beyond is not None:
            yield Problem(
                True,
                setting,
                f"there is no accelerator {beyond}; {counted(num_nodes, 'node')} with {per_node} each have 0 to {per_node * num_nodes - 1}",
            )
    holders = [ranges.holders(nodes, per_node) for ranges in placed.values()]
    rollout, update = holders[: len(ROLES)]
    in_both = sorted({*rollout} & {*update})
    if settings.rollout.ahead and in_both:
        what = f"rollout.ahead={settings.rollout.ahead}"
        yield Problem(
            True,
            what,
            f"node {in_both[0]} both trains and rolls out; give each node to one of {' and '.join([*placed][: len(ROLES)])}",
        )
    idle = [
        f"{number} of node {rank}"
        for rank, count in counts.items()
        for number in range(count)
        if not any(number in held.get(rank, ()) for held in holders)
    ]
    idle += [
        f"node {rank}"
        for rank, count in counts.items()
        if not count and not any(rank in held for held in holders)
    ]
    if idle:
        advice = "" if settings.allow_idle else "; give them a role or start with --allow-idle"
        yield Problem(not settings.allow_idle, "nothing to do", ", ".join(idle) + advice)
    groups = consecutive(rollout, settings.engine.nodes)
    if left := sorted({*rollout}.difference(*groups)):
        what = ", ".join(f"node {rank}" for rank in left)
        yield Problem(
            not groups, f"engine.nodes={settings.engine.nodes}", f"{what} left over, without an engine"
        )


def _held(placed: str, nodes: Nodes) -> Mapping[int, Sequence[int]]:
    """The accelerators of a role by node."""
    return Ranges.parse(placed).holders(
        nodes, max((len(node.accelerators) for node in nodes.values()), default=0)
    )


def _training_processes(nodes: Nodes, settings: Settings) -> Iterator[Problem]:
    """Find processes of the built-in trainer without an accelerator, and `trainer.shard=node` on nodes that cannot shard."""
    trainer = settings.trainer
    if trainer.command is not None:
        return
    devices_of = _held(settings.placement.update, nodes)
    counts = {
        rank: trainer.processes_per_node or max(1, len(devices)) for rank, devices in devices_of.items()
    }
    for rank, devices in devices_of.items():
        if devices and counts[rank] > len(devices):
            what = f"trainer.processes_per_node={counts[rank]}"
            yield Problem(True, what, f"node {rank} trains on {counted(len(devices), 'accelerator')}")
            break
    differ = len({*counts.values()}) > 1
    if trainer.shard == "node" and len(counts) > 1 and (differ or 1 in counts.values()):
        each = ", ".join(f"node {rank} has {count}" for rank, count in counts.items())
        why = f"nodes need several training processes each, and equally many: {each}; set trainer.shard=all"
        yield Problem(True, "trainer.shard=node", why)


def _crowded(nodes: Nodes, settings: Settings) -> Iterator[Problem]:
    """Find engines that do not fit on their accelerators, or share one with too many, or sleep for the trainer when rollouts need them."""
    update = _held(settings.placement.update, nodes)
    shares: dict[tuple[int, int], dict[str, float]] = {}
    engines: dict[str, ServerSettings] = {"engine": settings.engine} if settings.manages_engine else {}
    for group, engine in {
        **engines,
        **{f"engines.{name}": own for name, own in settings.engines.items()},
    }.items():
        placed = engine.placement if isinstance(engine, FrozenEngineSettings) else None
        for rank, devices in _held(placed or settings.placement.rollout, nodes).items():
            try:
                used = devices[: replicas(engine, len(devices), group) * engine.accelerators]
            except UsageError as error:
                yield Problem(True, group, f"node {rank}: {error}")
                break
            if settings.rollout.ahead and group != "engine" and (both := {*used} & {*update.get(rank, ())}):
                what = f"accelerator {min(both)} of node {rank} trains, while rollouts go on that need the engine there; place them apart"
                yield Problem(True, f"{group} with rollout.ahead=1", what)
            for number in used:
                shares.setdefault((rank, number), {})[group] = engine.gpu_memory_utilization
    full = next((item for item in shares.items() if len(item[1]) > 1 and sum(item[1].values()) > 1), None)
    if full is not None:
        (rank, number), together = full
        what = " and ".join(f"{name}.gpu_memory_utilization={share:g}" for name, share in together.items())
        yield Problem(
            True,
            "engines",
            f"{what} are more than accelerator {number} of node {rank} has; lower them, or place the engines apart",
        )


def _differences(
    nodes: Nodes, hosts: Mapping[int, str], packages: Sequence[str], *, updates: bool
) -> Iterator[Problem]:
    def differ(what: str, values: Mapping[int, str], refused: bool = False) -> Iterator[Problem]:
        if len(set(values.values())) > 1:
            yield Problem(refused, f"{what} differs", _by_value(values, hosts))

    kinds = {rank: "accelerators" if node.accelerators else "a CPU" for rank, node in nodes.items()}
    yield from differ("what computes", kinds, updates)
    for name in packages:
        versions = {rank: str(node.packages.get(name) or "not installed") for rank, node in nodes.items()}
        # The processes of an update communicate through torch, and its minor versions may be incompatible.
        minors = {".".join(text.split(".")[:2]) for text in versions.values()}
        yield from differ(name, versions, updates and name == "torch" and len(minors) > 1)
    yield from differ("Python", {rank: node.python for rank, node in nodes.items()})
    yield from differ("driver", {rank: node.driver or "none" for rank, node in nodes.items()})
    if len(set(kinds.values())) == 1:
        yield from differ("accelerators", {rank: _accelerators_as_text(node) for rank, node in nodes.items()})


def _in_use(nodes: Nodes, hosts: Mapping[int, str]) -> Iterator[Problem]:
    used = [
        f"{_node_and_host(rank, hosts)}: {gib(int(taken))} of accelerator {number}"
        for rank, node in nodes.items()
        for number, (_, _, taken) in enumerate(node.accelerators)
        if int(taken) > IN_USE_BY_NOBODY
    ]
    if used:
        yield Problem(False, "in use by others", ", ".join(used))


def _checkpoint_room(
    nodes: Nodes, hosts: Mapping[int, str], settings: Settings, parameters: int
) -> Iterator[Problem]:
    free = {rank: node.run_disk_free for rank, node in nodes.items() if node.run_disk_free}
    if not free:
        return
    rank, least = min(free.items(), key=lambda item: item[1])
    element = bytes_of_a_number(
        settings.trainer, on_cpu=not any(node.accelerators for node in nodes.values())
    )
    # Adapters are small beside the model.
    trained = 0 if settings.lora.rank else parameters
    critic = parameters if settings.algorithm.has_critic else 0
    needed = checkpoint_bytes(parameters, trained, element, settings, critic)
    size = needed.model + needed.critic + needed.trainer_state
    if least < needed.kept:
        text = f"{gib(least)} free as {_node_and_host(rank, hosts)} sees it; a checkpoint is {gib(size)}, those kept {gib(needed.kept)}"
        yield Problem(least < size, "room for checkpoints", text)


def _by_value(values: Mapping[int, str], hosts: Mapping[int, str]) -> str:
    """The values and the nodes that have them; nodes with the most common value are "the others"."""
    ranks: dict[str, list[int]] = {}
    for rank, value in sorted(values.items()):
        ranks.setdefault(value, []).append(rank)
    *rare, (common, _) = sorted(ranks.items(), key=lambda item: len(item[1]))
    named = [f"{', '.join(_node_and_host(rank, hosts) for rank in some)}: {value}" for value, some in rare]
    return "; ".join([*named, f"the others: {common}"])


def _accelerators_as_text(node: Fingerprint) -> str:
    kinds = [f"{name} ({gib(int(size))})" for name, size, _ in node.accelerators]
    return ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds)) or "none"


def _node_and_host(rank: int, hosts: Mapping[int, str]) -> str:
    return f"node {rank} ({hosts.get(rank, '?')})"
