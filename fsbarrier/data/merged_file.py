"""The merged file of an iteration: `{"trajectories": [...], "metadata": {...}}`, as torch.save writes it.

Torch is imported only inside the functions. Reading executes nothing (`weights_only=True`) and verifies the checksums, unlike torch.load.
"""

from __future__ import annotations

import io
import zipfile
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from fsbarrier.data.rank_file import TYPECODES, FormatError, NotOurs, opened
from fsbarrier.data.trajectory import Trajectory, TrajectoryFile
from fsbarrier.errors import first_line
from fsbarrier.store.retry import patiently

#: the first bytes of every zip file, and therefore of every file of torch.save
ZIP = b"PK\3\4"


def types_of_torch() -> dict[str, Any]:
    """torch's type for each of TYPECODES."""
    import torch

    types = (torch.int32, torch.float32, torch.uint8, torch.int64, torch.float64)
    return dict(zip(TYPECODES, types, strict=True))


def as_tensors(group: Sequence[Trajectory]) -> list[Any]:
    """The trajectories of a group with tensors for arrays. All arrays of one type share a storage, which torch.save writes once."""
    import torch

    types = types_of_torch()
    joined = {code: bytearray() for code in TYPECODES}
    for trajectory in group:
        for value in trajectory.values():
            if isinstance(value, array):
                joined[value.typecode] += memoryview(value).cast("B")
    storages = {code: torch.frombuffer(data, dtype=types[code]) for code, data in joined.items() if data}
    ends = dict.fromkeys(TYPECODES, 0)

    def tensor(value: array[Any]) -> torch.Tensor:
        begin = ends[value.typecode]
        ends[value.typecode] = end = begin + len(value)
        return (
            storages[value.typecode][begin:end] if len(value) else torch.zeros(0, dtype=types[value.typecode])
        )

    def converted(value: Any) -> Any:
        # Arrays below the first level are rare, so each gets its own storage.
        if isinstance(value, array):
            return torch.frombuffer(value, dtype=types[value.typecode]) if value else value.tolist()
        if isinstance(value, dict):
            return {name: converted(item) for name, item in value.items()}
        return [converted(item) for item in value] if isinstance(value, list) else value

    return [
        {
            name: tensor(value) if isinstance(value, array) else converted(value)
            for name, value in trajectory.items()
        }
        for trajectory in group
    ]


def encode(groups: Iterable[Sequence[Trajectory]], metadata: dict[str, object]) -> memoryview:
    """The bytes of a merged file. torch writes to memory, because some write errors to a file make it end the process."""
    import torch

    trajectories = [trajectory for group in groups for trajectory in as_tensors(group)]
    made = io.BytesIO()
    torch.save({"trajectories": trajectories, "metadata": metadata}, made)
    return made.getbuffer()


def load_tensors(path: Path) -> dict[str, Any]:
    """Verify the checksums of a merged file, and return the result of torch.load. Raises StoreError, NotOurs, FormatError."""
    with opened(path) as fd, open(fd, "rb", closefd=False) as stream:
        return patiently(lambda: _content(stream))


def _content(stream: BinaryIO) -> dict[str, Any]:
    """The verified content of a merged file. Raises NotOurs, FormatError, OSError."""
    stream.seek(0)
    if stream.read(len(ZIP)) != ZIP:
        raise NotOurs("it was not written by fsbarrier")
    try:
        _check(stream)
        import torch

        stream.seek(0)
        content = torch.load(stream, map_location="cpu", weights_only=True)
    except (FormatError, OSError):
        raise
    # On damaged data torch and zipfile may raise any exception.
    except Exception as error:
        raise FormatError(f"it is damaged: {first_line(error)}") from None
    if not isinstance(content, dict) or not isinstance(content.get("trajectories"), list):
        raise FormatError('expected {"trajectories": [...], "metadata": {...}}')
    return content


def _check(stream: BinaryIO) -> None:
    """Verify all checksums. Raises FormatError if one does not match, and whatever zipfile raises."""
    with zipfile.ZipFile(stream) as archive:
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
            raise FormatError("it is compressed, which fsbarrier does not do")
        if damaged := archive.testzip():
            raise FormatError(f"{damaged} is damaged (checksum)")


def load(path: Path) -> TrajectoryFile:
    """A merged file with array.array for tensors, and a list for those of several dimensions. Raises the errors of `load_tensors`."""
    content = load_tensors(path)
    metadata = content.get("metadata")
    return {
        "trajectories": [as_arrays(trajectory) for trajectory in content["trajectories"]],
        "metadata": metadata if isinstance(metadata, dict) else {},
    }


def as_arrays(value: Any) -> Any:
    """`value` with array.array for tensors of one dimension."""
    import torch

    if isinstance(value, dict):
        return {name: as_arrays(item) for name, item in value.items()}
    if isinstance(value, list):
        return [as_arrays(item) for item in value]
    if not isinstance(value, torch.Tensor):
        return value
    codes = {dtype: code for code, dtype in types_of_torch().items()}
    if value.dim() != 1 or value.dtype not in codes:
        return value.tolist()
    made = array(codes[value.dtype])
    made.frombytes(value.contiguous().numpy().tobytes())
    return made
