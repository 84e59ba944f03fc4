"""Writes a safetensors file tensor by tensor and hashes it. The library's writer needs all tensors in memory and does not hash.

Each tensor is divided into blocks of whole rows with a CRC-32 each, so that a process can verify the rows it reads.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping
from functools import cache
from math import prod
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from fsbarrier.rundir.hashed_file import FileDigest, HashedFile
from fsbarrier.store import files

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
