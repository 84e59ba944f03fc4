"""Writes a safetensors file tensor by tensor and hashes it. The library's writer needs all tensors in memory and does not hash.

Each tensor is divided into blocks of whole rows with a CRC-32 each, so that a process can verify the rows it reads.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fsbarrier.errors import ProgramFailed, first_line
from fsbarrier.rundir.hashed_file import FileDigest, HashedFile
from fsbarrier.store import files
from fsbarrier.training.slices import Box, local_part

BLOCK_BYTES = 16 << 20


def write(path: Path, tensors: Mapping[str, Tensor]) -> tuple[FileDigest, dict[str, list[int]]]:
    """Write and fsync a new file; returns its digest, and the checksums of each tensor's blocks. Raises OSError."""
    checks: dict[str, list[int]] = {}
    with HashedFile(path) as file:
        file.write(_header(tensors))
        for name, tensor in tensors.items():
            checks[name] = []
            for block in _blocks(tensor):
                view = bytes_of(block)
                checks[name].append(zlib.crc32(view))
                file.write(view)
    return file.digest, checks


def write_unhashed(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write the same file without fsync, for comparison with another file's digest. Raises OSError."""
    with os.fdopen(files.open_new(path), "wb") as file:
        file.write(_header(tensors))
        for tensor in tensors.values():
            for block in _blocks(tensor):
                file.write(bytes_of(block))


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    """The file's header; the tensors follow it consecutively."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        place = {"shape": list(tensor.shape), "data_offsets": [begin, end]}
        header[name] = {"dtype": _name_of(tensor.dtype), **place}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    # Align the tensors to eight bytes.
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded


@cache
def _name_of(dtype: torch.dtype) -> str:
    """The name of a dtype in the format."""
    data = save({"none": torch.empty(0, dtype=dtype)})
    name: str = json.loads(data[8:])["none"]["dtype"]
    return name


def rows_of_a_block(shape: tuple[int, ...], element_size: int) -> int:
    """The number of rows of a tensor in one block; a scalar has one row."""
    return max(1, BLOCK_BYTES // max(1, element_size * prod(shape[1:])))


def _blocks(tensor: Tensor) -> Iterator[Tensor]:
    numbers = tensor.detach()
    rows = numbers if numbers.dim() else numbers.reshape(1)
    size = rows_of_a_block(tuple(rows.shape), rows.element_size())
    for first in range(0, rows.shape[0], size):
        yield rows[first : first + size]


def bytes_of(tensor: Tensor) -> memoryview:
    """A tensor's bytes, from any device."""
    flat = tensor.to("cpu").contiguous().reshape(-1).view(torch.uint8)
    return memoryview(flat.numpy().data)


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A part of a tensor, stored in a file under the tensor's name. `checks`: the CRC-32 of its blocks."""

    file: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    checks: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.start) != len(self.shape):
            raise ValueError(f"a part has {len(self.shape)} dimensions and begins in {len(self.start)}")
        if Path(self.file).name != self.file:
            raise ValueError(f"{self.file!r} is no name of a file in this folder")

    @property
    def box(self) -> Box:
        return Box(self.start, self.shape)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A whole tensor, in parts."""

    shape: tuple[int, ...]
    parts: list[StoredPart]


@dataclass
class StoredTensors:
    """The tensors of one folder, by name. A context manager that opens files on demand and closes them at the end."""

    folder: Path
    tensors: Mapping[str, StoredTensor]
    _open: dict[str, Any] = field(default_factory=dict)
    _stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def fill(self, name: str, target: Tensor) -> None:
        """Fill `target` with this process's part (all of a plain tensor). Raises ProgramFailed."""
        own = local_part(target, rank=0, world=1)
        shape = self.tensors[name].shape if name in self.tensors else None
        if shape != tuple(target.shape):
            raise ProgramFailed(
                f"{self.folder}: {name} has the shape {shape}, the model's is {tuple(target.shape)}"
            )
        missing = prod(own.box.shape)
        for part in self.tensors[name].parts:
            common = part.box.overlap(own.box)
            for box, block in self._blocks(part, name, common) if common else ():
                wanted = box.overlap(own.box)
                if wanted:
                    wanted.of(own.data, own.box.start).copy_(wanted.of(block, box.start))
                    missing -= prod(wanted.shape)
        if missing:
            raise ProgramFailed(f"{self.folder}: {missing} values of {name} are missing")

    def _blocks(self, part: StoredPart, name: str, common: Box) -> Iterator[tuple[Box, Tensor]]:
        """The blocks of a part that overlap `common`, each with its place in the whole tensor."""
        path = self.folder / part.file
        with naming_the_file(path):
            file = self._file(part.file)
            rows = file.get_slice(name)
            shape = part.box.shape
            if tuple(rows.get_shape()) != shape:
                raise ProgramFailed(
                    f"{path}: {name} has the shape {tuple(rows.get_shape())}, {shape} was written"
                )
            if not shape:
                yield common, self._checked(part, name, 0, file.get_tensor(name))
                return
            first = common.start[0] - part.box.start[0]
            step = rows_of_a_block(shape, rows[:0].element_size())
            for number in range(first // step, -(-(first + common.shape[0]) // step)):
                begin, end = number * step, min(shape[0], (number + 1) * step)
                place = Box((part.box.start[0] + begin, *part.box.start[1:]), (end - begin, *shape[1:]))
                yield place, self._checked(part, name, number, rows[begin:end])

    def _checked(self, part: StoredPart, name: str, number: int, block: Tensor) -> Tensor:
        if zlib.crc32(bytes_of(block)) != part.checks[number]:
            raise ProgramFailed(
                f"{self.folder / part.file}: checksum mismatch in {name}: the file was modified or damaged"
            )
        return block

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = self._stack.enter_context(safe_open(self.folder / name, framework="pt"))
        return self._open[name]


@contextmanager
def naming_the_file(path: Path) -> Iterator[None]:
    """Convert errors of a safetensors file to ProgramFailed with its path."""
    try:
        yield
    except (OSError, SafetensorError, LookupError, ValueError) as error:
        raise ProgramFailed(f"{path}: cannot read the file: {first_line(error)}") from None
