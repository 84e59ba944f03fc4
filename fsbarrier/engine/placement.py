"""Assigns accelerators or cores to a node's engine replicas. Pure: all inputs are parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fsbarrier.engine.accelerators import Accelerator
from fsbarrier.errors import UsageError
from fsbarrier.settings.sections import ServerSettings

# Variable with the cores that workers/vllm_server.py pins itself to, such as "0,1".
CPUS = "FSBARRIER_CPUS"
# Device selection variables. A replica sees only its own devices, so all of these are replaced.
_SELECTORS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
# vLLM options that conflict with this assignment, or would use other nodes.
_NOT_OURS = (
    *("--nnodes", "--node-rank", "--headless", "--data-parallel-address", "--data-parallel-size", "-dp"),
    *("--pipeline-parallel-size", "-pp", "--tensor-parallel-size", "-tp"),
)


#: where a replica is, as environment variables; none: anywhere, on all devices and cores of this process
Placement = Mapping[str, str]
ANYWHERE: Placement = {}


def placed(environ: Mapping[str, str], placement: Placement) -> dict[str, str]:
    """`environ` for a replica with this placement."""
    # A placement that selects devices replaces all variables that select some.
    replaced = _SELECTORS if placement.keys() & set(_SELECTORS) else ()
    return {name: value for name, value in environ.items() if name not in replaced} | {**placement}


def placements(
    settings: ServerSettings,
    devices: Sequence[Accelerator],
    environ: Mapping[str, str],
    cpus: Sequence[int],
    group: str = "engine",
) -> list[Placement]:
    """A placement per replica. `devices`, `cpus`: those that this node may use. Raises UsageError if they are insufficient.

    `group`: how the names of the settings begin."""
    count = replicas(settings, len(devices), group)
    size = settings.accelerators
    if not devices:
        return _on_cpus(count, cpus)
    # A MIG instance has no device number; the single server uses the instance in the variable.
    if "MIG-" in environ.get("CUDA_VISIBLE_DEVICES", ""):
        if count > 1 and settings.replicas:
            raise UsageError(
                f"{group}.replicas={count}: only one replica is supported on a MIG instance; set it to 1"
            )
        return [{}]
    same = [device for device in devices if device.kind == devices[0].kind]
    return [visible(same[size * number : size * (number + 1)]) for number in range(count)]


def visible(devices: Sequence[Accelerator]) -> dict[str, str]:
    """The variables with which a program sees only these devices, of one kind."""
    numbers = ",".join(str(device.index) for device in devices)
    if devices and devices[0].kind == "nvidia":
        # The device numbers are in PCI order; CUDA's default order differs.
        return {"CUDA_VISIBLE_DEVICES": numbers, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    return {"HIP_VISIBLE_DEVICES": numbers}


def replicas(settings: ServerSettings, accelerators: int, group: str = "engine") -> int:
    """The number of servers on a node with this many accelerators. Raises UsageError if more are requested than fit."""
    size, over = settings.tensor_parallel_size, settings.over
    if not accelerators:
        return settings.replicas or 1
    most = accelerators // settings.accelerators
    if most == 0:
        times, wider = (f" times engine.nodes={over}" if over > 1 else ""), ", or a larger engine.nodes"
        raise UsageError(
            f"{group}.tensor_parallel_size={size}: exceeds this node's {accelerators} accelerators{times}; use {accelerators * over} or "
            f"fewer{wider if group == 'engine' else ''}"
        )
    if over > 1:
        return 1
    if settings.replicas > most:
        raise UsageError(
            f"{group}.replicas={settings.replicas}: with {group}.tensor_parallel_size={size} they need {settings.replicas * size} "
            f"accelerators, but this node has {accelerators}; use {most} or fewer"
        )
    return settings.replicas or most


def check_arguments(settings: ServerSettings, group: str = "engine") -> None:
    """Raises UsageError for a vLLM argument that conflicts with the placement."""
    for word in settings.extra_args:
        if (name := word.partition("=")[0]) in _NOT_OURS:
            raise UsageError(
                f"{group}.extra_args: {name}: not supported; use {group}.tensor_parallel_size for the accelerators of a server, "
                f"{group}.replicas for the number of servers, and engine.nodes for one over several nodes"
            )


def _on_cpus(count: int, cpus: Sequence[int]) -> list[Placement]:
    """Distribute the cores evenly. A single replica, or more replicas than cores, may use all cores."""
    if not 1 < count <= len(cpus):
        return [{}] * count
    return [{CPUS: ",".join(map(str, cpus[number::count]))} for number in range(count)]
