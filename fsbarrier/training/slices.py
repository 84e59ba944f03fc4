"""Distributed tensors: the local part of this process, the parts it writes, and gathering a whole tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor: its offset in the whole tensor, and its shape."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    def overlap(self, other: Box) -> Box | None:
        """The intersection; None if it is empty."""
        start = tuple(max(a, b) for a, b in zip(self.start, other.start, strict=True))
        ends = zip(self.start, self.shape, other.start, other.shape, strict=True)
        shape = tuple(min(a + n, b + m) - s for (a, n, b, m), s in zip(ends, start, strict=True))
        return Box(start, shape) if all(size > 0 for size in shape) else None

    def of(self, tensor: Tensor, start: tuple[int, ...]) -> Tensor:
        """The view of this part in `tensor`, whose own offset is `start`."""
        places = zip(self.start, self.shape, start, strict=True)
        return tensor[tuple(slice(own - begin, own - begin + size) for own, size, begin in places)]

    def flat(self, shape: tuple[int, ...]) -> Box:
        """The same part in the flattened tensor; `shape`: of the whole tensor. A multi-dimensional part must consist of whole rows."""
        if len(self.shape) == 1:
            return self
        if any(self.start[1:]) or self.shape[1:] != shape[1:]:
            raise ValueError(f"{self} is not contiguous in a tensor of shape {shape}")
        row = prod(shape[1:])
        return Box((self.start[0] * row if shape else 0,), (prod(self.shape),))


@dataclass(frozen=True, slots=True, eq=False)
class FlatPart:
    """This process's exclusive part of a tensor of `shape` that is split at arbitrary positions, as DeepSpeed does: a range of the
    flattened tensor, from `start` on."""

    shape: tuple[int, ...]
    start: int
    data: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    def numel(self) -> int:
        """The number of elements of the whole tensor."""
        return prod(self.shape)

    def element_size(self) -> int:
        return int(self.data.element_size())

    def is_floating_point(self) -> bool:
        return bool(self.data.is_floating_point())

    def whole(self, dtype: torch.dtype) -> Tensor:
        """Gather the whole tensor. All processes must have parts of equal size, except that the last ones may be shorter."""
        world = torch.distributed.get_world_size()
        own = torch.zeros(-(-self.numel() // world), dtype=dtype, device=self.data.device)
        own[: len(self.data)] = self.data
        found = own.new_empty(world * len(own))
        torch.distributed.all_gather(list(found.chunk(world)), own)
        return found[: self.numel()].view(self.shape)


@dataclass(frozen=True, slots=True)
class LocalPart:
    """This process's part of a tensor. `replicas` processes hold the same part; this one is number `replica`."""

    data: Tensor
    box: Box
    replica: int
    replicas: int


def local_part(tensor: Tensor | FlatPart, rank: int, world: int) -> LocalPart:
    """This process's part of a DTensor, a FlatPart, or a replicated plain tensor. Shares the tensor's memory."""
    if isinstance(tensor, FlatPart):
        return LocalPart(tensor.data, Box((tensor.start,), (len(tensor.data),)), 0, 1)
    whole = tensor.detach()
    if not isinstance(whole, DTensor):
        return LocalPart(whole, Box((0,) * whole.dim(), tuple(whole.shape)), rank, world)
    (chunk,) = whole.__create_chunk_list__()
    replica, replicas = 0, 1
    coordinate = whole.device_mesh.get_coordinate() or []
    for number, placement, size in zip(coordinate, whole.placements, whole.device_mesh.shape, strict=True):
        if placement.is_replicate():
            replica, replicas = replica * size + number, replicas * size
    return LocalPart(whole.to_local(), Box(tuple(chunk.offsets), tuple(chunk.sizes)), replica, replicas)


def whole_tensor(tensor: Tensor | FlatPart, dtype: torch.dtype) -> Tensor:
    """Gather a whole tensor; floating-point tensors are converted to `dtype`. Every process must call this in the same order."""
    if isinstance(tensor, FlatPart):
        return tensor.whole(dtype if tensor.is_floating_point() else tensor.dtype)
    found = tensor.detach()
    if found.is_floating_point():
        found = found.to(dtype)
    return found.full_tensor() if isinstance(found, DTensor) else found


def distinct(tensors: Mapping[str, T]) -> dict[str, T]:
    """Each tensor once, under the first of its names, because a tied head and its embedding are one parameter.

    The result is the same on all processes. It does not compare memory addresses, because a process may hold nothing of a tensor.
    """
    names: dict[int, str] = {}
    for name, one in tensors.items():
        names.setdefault(id(one), name)
    return {name: tensors[name] for name in names.values()}


@dataclass
class Shares:
    """Assigns work to the least loaded process, deterministically and identically on all processes."""

    loads: dict[int, list[int]] = field(default_factory=dict)

    def next(self, processes: int, size: int) -> int:
        load = self.loads.setdefault(processes, [0] * processes)
        chosen = min(range(processes), key=load.__getitem__)
        load[chosen] += size
        return chosen


def parts_to_write(tensors: Mapping[str, Tensor], rank: int, world: int) -> dict[str, LocalPart]:
    """The parts that this process writes: each part is written by exactly one of the processes that hold it."""
    shares, mine = Shares(), {}
    for name, tensor in tensors.items():
        part = local_part(tensor, rank, world)
        writer = shares.next(part.replicas, tensor.numel() * tensor.element_size())
        if part.replica == writer and part.data.numel():
            mine[name] = part
    return mine
