"""The process group of an update, started by torchrun: rank, device and collectives.

Uses gloo on CPUs and NCCL on accelerators, where gloo is also available for tensors in host memory.
"""

from __future__ import annotations

import os
import resource
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fsbarrier.host.addresses import name_interface
from fsbarrier.settings.sections import TrainerSettings

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
            self._join(timedelta(seconds=settings.timeout_s))
        self.processes_by_node = self._processes_by_node()

    def _join(self, timeout: timedelta) -> None:
        name_interface(os.environ)
        backend = "gloo" if self.device.type == "cpu" else "cpu:gloo,cuda:nccl"
        if "MASTER_ADDR" in os.environ:
            dist.init_process_group(backend, timeout=timeout)
        else:
            # Started without torchrun: a single process.
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)

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
    def serving_dtype(self) -> torch.dtype:
        """The precision of the served weights."""
        return torch.float32 if self.dtype is torch.float32 else torch.bfloat16

    def sum(self, values: Tensor) -> Tensor:
        """All-reduce `values` in place. This and the following methods are collectives, which every process must call."""
        if self.world > 1:
            dist.all_reduce(values)
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
            host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            here = host // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return int(self.gather(torch.tensor([here], device=self.device)).min())


def _dtype(wanted: str, on_cpu: bool) -> torch.dtype:
    if wanted == "auto":
        return torch.bfloat16 if not on_cpu and torch.cuda.is_bf16_supported() else torch.float32
    return torch.float32 if wanted == "float32" else torch.bfloat16


def gather_objects(value: T) -> list[T]:
    """What each process gave, by rank; any object that can be pickled. Every process must call this."""
    if not dist.is_initialized():
        return [value]
    gathered: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered
