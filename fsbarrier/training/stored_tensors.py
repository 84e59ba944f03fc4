"""Reads parts of tensors from safetensors files: a process reads only its rows, and verifies each block."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Self

from safetensors import SafetensorError, safe_open
from torch import Tensor

from fsbarrier.errors import ProgramFailed, first_line
from fsbarrier.training.safetensors_file import bytes_of, rows_of_a_block
from fsbarrier.training.slices import Box, local_part


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
