"""Moves a kept trainer to pinned host memory while the engine needs the accelerator.

Each storage on the accelerator is copied to pinned host memory, and later back into the same storage. Only the memory behind the tensors
changes, so all references remain valid: tied weights, fully_shard's shards, the optimizer's moments.
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
    """Storages of `device`, each with a host copy of its bytes."""

    device: torch.device
    copies: tuple[tuple[UntypedStorage, Tensor], ...]

    @classmethod
    def copied(cls, model: Module, optimizer: Optimizer, device: torch.device) -> Self:
        """Copy all storages of parameters, buffers and optimizer state on `device`. Gradients must have been freed.

        Raises RuntimeError if the host has not enough memory.
        """
        for module in model.modules():
            # After a forward pass without a backward pass the last units are still gathered, in storages not visible here.
            if isinstance(module, FSDPModule):
                module.reshard()
        state = (value for values in optimizer.state.values() for value in values.values())
        # Several tensors may share a storage.
        storages = {
            storage._cdata: storage
            for one in _with_memory((*model.parameters(), *model.buffers(), *state))
            if (storage := one.untyped_storage()).device == device and storage.nbytes()
        }
        copies = tuple((storage, _copy_of(storage)) for storage in storages.values())
        _finish(device)
        return cls(device, copies)

    def free(self) -> None:
        """Free the accelerator's memory."""
        for storage, _ in self.copies:
            storage.resize_(0)

    def move_back(self) -> None:
        """Raises torch.OutOfMemoryError."""
        for storage, copy in self.copies:
            storage.resize_(copy.numel())
            _bytes_of(storage).copy_(copy, non_blocking=True)
        _finish(self.device)


def bytes_for_engine(settings: Settings, total: int) -> int:
    """The memory that the engine allocates on an accelerator with `total` bytes when it wakes; 0 if it kept it, or is external."""
    engine = settings.engine
    if not settings.manages_engine or settings.rl_phase == "update" or engine.release == "keep":
        return 0
    return int(engine.gpu_memory_utilization * total)


def _with_memory(tensors: Iterable[object]) -> Iterator[Tensor]:
    """The inner tensors of wrappers: DTensors, and torchao's 8-bit moments."""
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
    """Wait for pending copies."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
