"""Which accelerators, or which cores, each of a node's engine replicas computes on. Pure: everything it depends on is handed in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fsbarrier.errors import UsageError
from fsbarrier.host.accelerators import Accelerator
from fsbarrier.settings.sections import EngineSettings

# Names the cores that workers/vllm_server.py keeps to: "0,1".
CPUS = "FSBARRIER_CPUS"
# What programs read to learn which devices they may see. A replica sees its own and no others, whatever chose among them before.
_SELECTORS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
# Options of vLLM that would give a replica other devices than it has here, or processes on other nodes.
_NOT_OURS = (
    *("--nnodes", "--node-rank", "--headless", "--data-parallel-address", "--data-parallel-size", "-dp"),
    *("--pipeline-parallel-size", "-pp", "--tensor-parallel-size", "-tp"),
)


@dataclass(frozen=True, slots=True)
class ReplicaPlacement:
    """Where one replica computes: the environment variables that tell it so."""

    chosen: Mapping[str, str] = field(default_factory=dict)

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """`environ` as this replica is to see it."""
        selects = self.chosen.keys() & set(_SELECTORS)
        kept = {name: value for name, value in environ.items() if not (selects and name in _SELECTORS)}
        return kept | dict(self.chosen)


# All that this process may use.
ANYWHERE = ReplicaPlacement()


def placements(
    settings: EngineSettings,
    devices: Sequence[Accelerator],
    environ: Mapping[str, str],
    cpus: Sequence[int],
) -> list[ReplicaPlacement]:
    """One for each replica. `devices`: those that this node may use, `cpus` likewise. Raises UsageError where they do not suffice."""
    count = replicas(settings, len(devices))
    size = settings.tensor_parallel_size
    if not devices:
        return _on_cpus(count, cpus)
    # A part of a device has no number of its own: the one server computes on what the variable says.
    if "MIG-" in environ.get("CUDA_VISIBLE_DEVICES", ""):
        if count > 1 and settings.replicas:
            raise UsageError(f"engine.replicas={count}: on a part of a device (MIG) there is one")
        return [ANYWHERE]
    kind = devices[0].kind
    numbers = [str(device.index) for device in devices if device.kind == kind]
    own = [",".join(numbers[size * number : size * (number + 1)]) for number in range(count)]
    if kind == "nvidia":
        # The numbers are the driver's. CUDA counts otherwise where it is not told to count alike.
        order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        return [ReplicaPlacement({"CUDA_VISIBLE_DEVICES": some, **order}) for some in own]
    return [ReplicaPlacement({"HIP_VISIBLE_DEVICES": some}) for some in own]


def replicas(settings: EngineSettings, accelerators: int) -> int:
    """How many servers a node with so many accelerators has. Raises UsageError where it cannot have as many as are asked for."""
    size = settings.tensor_parallel_size
    if not accelerators:
        return settings.replicas or 1
    most = accelerators // size
    if most == 0:
        raise UsageError(
            f"engine.tensor_parallel_size={size}: a replica would need more than this node's {accelerators} accelerators, and one "
            f"replica over several nodes is not supported; give {accelerators} or fewer"
        )
    if settings.replicas > most:
        raise UsageError(
            f"engine.replicas={settings.replicas}: with engine.tensor_parallel_size={size} they need {settings.replicas * size} "
            f"accelerators, this node has {accelerators}; give {most} or fewer"
        )
    return settings.replicas or most


def check_arguments(settings: EngineSettings) -> None:
    """Raises UsageError for an argument of the user's that would give a replica other devices, or other nodes."""
    for word in settings.extra_args:
        if (name := word.partition("=")[0]) in _NOT_OURS:
            raise UsageError(
                f"engine.extra_args: {name}: a replica has engine.tensor_parallel_size accelerators of one node; for more servers "
                "there is engine.replicas"
            )


def _on_cpus(count: int, cpus: Sequence[int]) -> list[ReplicaPlacement]:
    """Each has cores of its own, as evenly as they go. A single one, and more of them than there are cores, may use all."""
    if not 1 < count <= len(cpus):
        return [ANYWHERE] * count
    return [ReplicaPlacement({CPUS: ",".join(map(str, cpus[number::count]))}) for number in range(count)]
