"""Distributed tensors: the local part of this process, the parts it writes, and gathering a whole tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
        """The view of this part in `tensor`, which is itself a part, with the offset `start` in the whole."""
        firsts = [own - outer for own, outer in zip(self.start, start, strict=True)]
        return tensor[
            tuple(slice(first, first + size) for first, size in zip(firsts, self.shape, strict=True))
        ]


@dataclass(frozen=True, slots=True, eq=False)
class Partitioned:
    """A tensor whose parts only its library can find (DeepSpeed). `gather` returns the whole; every process must call it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    gather: Callable[[], Tensor]

    def numel(self) -> int:
        return prod(self.shape)

    def element_size(self) -> int:
        return int(self.dtype.itemsize)

    def is_floating_point(self) -> bool:
        return bool(self.dtype.is_floating_point)


@dataclass(frozen=True, slots=True)
class LocalPart:
    """This process's part of a tensor. `replicas` processes hold the same part; this one is number `replica`."""

    data: Tensor
    box: Box
    replica: int
    replicas: int


def local_part(tensor: Tensor | Partitioned, rank: int, world: int) -> LocalPart:
    """This process's part of a DTensor, or a whole tensor, which all processes have. Shares the tensor's memory, unless that is
    Partitioned; then every process must call this."""
    whole = tensor.gather() if isinstance(tensor, Partitioned) else tensor.detach()
    if not isinstance(whole, DTensor):
        return LocalPart(whole, Box((0,) * whole.dim(), tuple(whole.shape)), rank, world)
    (chunk,) = whole.__create_chunk_list__()
    replica, replicas = 0, 1
    coordinate: Sequence[int] = whole.device_mesh.get_coordinate() or []
    for number, placement, size in zip(coordinate, whole.placements, whole.device_mesh.shape, strict=True):
        if placement.is_replicate():
            replica, replicas = replica * size + number, replicas * size
    return LocalPart(whole.to_local(), Box(tuple(chunk.offsets), tuple(chunk.sizes)), replica, replicas)


def whole_tensor(tensor: Tensor | Partitioned, dtype: torch.dtype) -> Tensor:
    """Gather a whole tensor; floating-point tensors are converted to `dtype`. Every process must call this in the same order."""
    whole = tensor.gather() if isinstance(tensor, Partitioned) else tensor.detach()
    if whole.is_floating_point():
        whole = whole.to(dtype)
    return whole.full_tensor() if isinstance(whole, DTensor) else whole


def distinct(tensors: Mapping[str, T]) -> dict[str, T]:
    """Each tensor once, under the first of its names, because a tied head and its embedding are one parameter.

    The result is the same on all processes. It does not compare memory addresses, because a process may hold no part of a tensor.
    """
    names: dict[int, str] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), name)
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


def parts_to_write(
    tensors: Mapping[str, Tensor | Partitioned], rank: int, world: int
) -> dict[str, LocalPart]:
    """The parts that this process writes: each is written by exactly one of the processes that hold it. Every process must call this."""
    shares, mine = Shares(), {}
    for name, tensor in tensors.items():
        part = local_part(tensor, rank, world)
        writer = shares.next(part.replicas, tensor.numel() * tensor.element_size())
        if part.replica == writer and part.data.numel():
            # A gathered tensor waits in host memory until it is written.
            gathered = isinstance(tensor, Partitioned)
            mine[name] = replace(part, data=part.data.cpu()) if gathered else part
    return mine
