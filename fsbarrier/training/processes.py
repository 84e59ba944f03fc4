"""The process group of an update, started by torchrun: rank, device and collectives.

Uses gloo on CPUs and NCCL on accelerators, where gloo is also available for tensors in host memory.
"""

from __future__ import annotations

import json
import os
import resource
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fsbarrier.errors import ProgramFailed
from fsbarrier.network.this_host import name_interface
from fsbarrier.processes.limits import memory_bytes
from fsbarrier.settings.sections import TrainerSettings

# A collective operation fails if not all processes join it within this time.
TIMEOUT = timedelta(minutes=30)

T = TypeVar("T")


class Processes:
    """The process group of the update. The first instance initializes it; later instances reuse it.

    `processes_by_node`: the number of processes of each node, in rank order; a node's processes have consecutive ranks.
    """

    def __init__(self, settings: TrainerSettings) -> None:
        on_cpu = not torch.cuda.is_available()
        self.rank = int(os.environ.get("RANK", "0"))
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.device = torch.device("cpu") if on_cpu else torch.device("cuda", self.local_rank)
        self.dtype = _dtype(settings.dtype, on_cpu)
        if not on_cpu:
            torch.cuda.set_device(self.device)
        if not dist.is_initialized():
            self._join()
        self.processes_by_node = self._processes_by_node()

    def _join(self) -> None:
        name_interface(os.environ)
        backend = "gloo" if self.device.type == "cpu" else "cpu:gloo,cuda:nccl"
        if "MASTER_ADDR" in os.environ:
            dist.init_process_group(backend, timeout=TIMEOUT)
        else:
            # Started without torchrun: a single process.
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=TIMEOUT)

    def _processes_by_node(self) -> tuple[int, ...]:
        here = [int(os.environ.get(name, "0")) for name in ("GROUP_RANK", "LOCAL_RANK")]
        everyone = self.gather(torch.tensor(here, device=self.device)).tolist()
        nodes = [node for node, _ in everyone]
        return tuple(nodes.count(node) for node in dict.fromkeys(nodes))

    @property
    def is_main(self) -> bool:
        """Whether this process does the work that only one process may do."""
        return self.rank == 0

    @property
    def speaks_for_its_node(self) -> bool:
        """Whether this process reports progress and the result for its node."""
        return self.local_rank == 0

    @property
    def on_this_node(self) -> range:
        """The ranks of this node's processes."""
        first = self.rank - self.local_rank
        return range(first, first + int(os.environ.get("LOCAL_WORLD_SIZE", "1")))

    @property
    def serving_dtype(self) -> torch.dtype:
        """The precision of the served weights."""
        return torch.float32 if self.dtype is torch.float32 else torch.bfloat16

    def sum(self, values: Tensor) -> Tensor:
        """All-reduce `values` in place. This and the following methods are collectives, which every process must call."""
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def from_main(self, values: Tensor) -> Tensor:
        """Replace `values` by those of the first process, in place."""
        if self.world > 1:
            dist.broadcast(values, 0)
        return values

    def gather(self, values: Tensor) -> Tensor:
        """All-gather `values`: [world, ...]."""
        everyone = [torch.empty_like(values) for _ in range(self.world)]
        if self.world == 1:
            return values[None]
        dist.all_gather(everyone, values)
        return torch.stack(everyone)

    def peak_memory_bytes(self) -> int:
        """The peak memory of any process so far, on its accelerator or on the host."""
        if self.device.type == "cuda":
            here = torch.cuda.max_memory_allocated(self.device)
        else:
            # Linux reports KiB.
            here = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        return int(self.gather(torch.tensor([here], device=self.device)).max())

    def accelerator_memory(self) -> tuple[int, int] | None:
        """(free, total) bytes of this process's accelerator; None on a CPU."""
        if self.device.type == "cpu":
            return None
        # Release PyTorch's cache, which is not free for other processes.
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        return int(free), int(total)

    def memory_bytes(self) -> int:
        """The memory available to one process: its accelerator's, or its share of the host's; the minimum over all processes."""
        if self.device.type == "cuda":
            here = int(torch.cuda.get_device_properties(self.device).total_memory)
        else:
            here = memory_bytes()[0] // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return int(self.gather(torch.tensor([here], device=self.device)).min())


def _dtype(wanted: str, on_cpu: bool) -> torch.dtype:
    if wanted == "auto":
        return torch.bfloat16 if not on_cpu and torch.cuda.is_bf16_supported() else torch.float32
    return torch.float32 if wanted == "float32" else torch.bfloat16


#: the most that one process may send to the others in one exchange
GATHER_BYTES = 64 << 20


def gather_json(value: T) -> list[T]:
    """Gather the `value` of each process, by rank, as JSON data; a tuple arrives as a list. Every process must call this.

    Nothing is unpickled: `torch.distributed.all_gather_object` runs any code that a peer sends, and anyone who reaches the ports of an
    update can be a peer. Raises ProgramFailed if a process sends more than 64 MiB, or something that is not JSON.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    # Tensors in host memory go through gloo, whatever the accelerators use.
    own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([own.numel()]))
    longest = int(max(sizes))
    if not 0 < min(sizes) <= longest <= GATHER_BYTES:
        raise ProgramFailed(f"a process of this update sends {longest} bytes, and {GATHER_BYTES} are allowed")
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: own.numel()] = own
    everyone = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(everyone, padded)
    values = []
    for rank, (sent, size) in enumerate(zip(everyone, sizes, strict=True)):
        try:
            values.append(json.loads(sent[: int(size)].numpy().tobytes()))
        except (ValueError, RecursionError):
            raise ProgramFailed(f"process {rank} of this update sent something that is not JSON") from None
    return values
