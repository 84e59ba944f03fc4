"""A trainer that stays between two updates, beside an engine that needs the accelerator's memory.

What of the trainer lies on the accelerator goes into pinned memory of the host, one storage after the other, and comes back into the same
storages. Only the memory behind the tensors changes, so nothing that refers to them has to know: tied weights, the shards of
fully_shard, the optimizer's moments.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, UntypedStorage
from torch.distributed.fsdp import FSDPModule
from torch.nn import Module
from torch.optim import Optimizer

from fsbarrier.settings.sections import Settings


@dataclass(frozen=True, slots=True)
class OnHost:
    """Storages of `device`, each with a copy of its bytes on the host."""

    device: torch.device
    copies: tuple[tuple[UntypedStorage, Tensor], ...]

    @classmethod
    def copied(cls, model: Module, optimizer: Optimizer, device: torch.device) -> Self:
        """All that the parameters, the buffers and the optimizer's state have on `device`. The gradients must be gone.

        Raises RuntimeError where the host has no room.
        """
        for module in model.modules():
            # A forward pass without a backward pass leaves the last units gathered, outside of the storages that are seen here.
            if isinstance(module, FSDPModule):
                module.reshard()
        state = (value for values in optimizer.state.values() for value in values.values())
        # Several tensors may lie in one storage.
        storages = {
            storage._cdata: storage
            for one in _with_memory((*model.parameters(), *model.buffers(), *state))
            if (storage := one.untyped_storage()).device == device and storage.nbytes()
        }
        copies = tuple((storage, _copy_of(storage)) for storage in storages.values())
        _finish(device)
        return cls(device, copies)

    def free(self) -> None:
        """Give the accelerator's memory back."""
        for storage, _ in self.copies:
            storage.resize_(0)

    def move_back(self) -> None:
        """Raises torch.OutOfMemoryError."""
        for storage, copy in self.copies:
            storage.resize_(copy.numel())
            _bytes_of(storage).copy_(copy, non_blocking=True)
        _finish(self.device)


def bytes_for_engine(settings: Settings, total: int) -> int:
    """What the engine takes of an accelerator with `total` bytes when it wakes; 0 where it has kept that, or is not the daemon's."""
    engine = settings.engine
    if not settings.manages_engine or settings.rl_phase == "update" or engine.release == "keep":
        return 0
    return int(engine.gpu_memory_utilization * total)


def _with_memory(tensors: Iterable[object]) -> Iterator[Tensor]:
    """The tensors inside those that only wrap others: DTensors, and torchao's moments of eight bits."""
    for one in tensors:
        inner = getattr(one, "__tensor_flatten__", None)
        if inner is not None:
            yield from _with_memory(getattr(one, name) for name in inner()[0])
        elif isinstance(one, Tensor):
            yield one.detach()


def _copy_of(storage: UntypedStorage) -> Tensor:
    copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
    return copy.copy_(_bytes_of(storage), non_blocking=True)


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _finish(device: torch.device) -> None:
    """Wait for the copies under way."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
