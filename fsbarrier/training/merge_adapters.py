"""Merges adapters (LoRA) into the weights of a model, file by file, without PyTorch: a daemon does this for its engines.

Each node rounds its own merge. So two nodes' last bits may differ; that is less than the rounding to the served precision.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from fsbarrier.engine.model import tensors_in, weight_files
from fsbarrier.errors import ProgramFailed, UsageError
from fsbarrier.rundir import checkpoints
from fsbarrier.rundir.hashed_file import HashedFile
from fsbarrier.store import files, reading

if TYPE_CHECKING:
    import numpy

    Array = numpy.ndarray[Any, Any]

#: by the name of each file of weights, where its numbers begin, and its tensors
Headers = Mapping[str, tuple[int, Mapping[str, Any]]]

# How the names of parameters begin in peft's files, which name them in a wrapped model.
PREFIX = "base_model.model."
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
# How the precisions are called in a configuration and in a file of weights. Weights in others are copied.
FLOATS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
SIZES = {"F32": 4, "BF16": 2, "F16": 2}
#: how many numbers are merged at once
BLOCK = 8 << 20


def digest_of(
    model: Path, between_reads: Callable[[], None] = lambda: None, remembered: Path | None = None
) -> str:
    """A digest of the weights of a model folder that has no manifest. It reads them, unless the local file `remembered` has the digest of
    files with these names, sizes and times; otherwise that is written. Raises ProgramFailed, OSError."""
    stats = {path.name: path.stat() for path in weight_files(model)}
    files_now = {name: [stat.st_size, stat.st_mtime_ns, stat.st_ino] for name, stat in stats.items()}
    if remembered is not None and remembered.is_file():
        known = reading.json_object(remembered, ProgramFailed)
        if known["files"] == files_now:
            return str(known["digest"])
    digests: dict[str, str] = {}

    def read(name: str) -> None:
        with reading.open_stream(model / name, links=True) as stream:
            digests[name] = files.sha256_open(stream.fileno(), between_reads)

    checkpoints.for_all(read, files_now)
    digest = of_files(digests)
    if remembered is not None:
        files.write_atomic(remembered, json.dumps({"files": files_now, "digest": digest}).encode())
    return digest


def of_files(digests: Mapping[str, str]) -> str:
    """The digest of a model, by the SHA-256 of each of its files of weights."""
    return hashlib.sha256(json.dumps(sorted(digests.items())).encode()).hexdigest()


def why_not_mergeable(model: Path) -> str:
    """Why adapters cannot be merged into the files of this model, so that the trainer must publish whole versions; "" if they can.
    Raises ProgramFailed."""
    for path in weight_files(model):
        if path.suffix != ".safetensors":
            return f"{path.name} is no safetensors file"
    main = main_precision(headers_of(model))[0]
    return "" if main in SIZES else f"its weights are in {main}"


def headers_of(model: Path) -> Headers:
    """Raises ProgramFailed."""
    return {path.name: tensors_in(path) for path in weight_files(model)}


def main_precision(headers: Headers) -> tuple[str, int]:
    """The precision in which most numbers of a model's files are, and how many numbers those are."""
    amounts: Counter[str] = Counter()
    for _, entries in headers.values():
        for entry in entries.values():
            amounts[entry["dtype"]] += prod(entry["shape"])
    return amounts.most_common(1)[0] if amounts else ("", 0)


def merged_size(model: Path, precision: str) -> int:
    """About how many bytes the merged weights have. Raises ProgramFailed, OSError."""
    main, numbers = main_precision(headers_of(model))
    there = sum(path.stat().st_size for path in weight_files(model))
    return there + numbers * (SIZES[FLOATS[precision]] - SIZES.get(main, 0))


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """Adapters in peft's form, by the weights (in the files of the model) to which each belongs: the products `scaling * up @ down`."""

    scaling: float
    pairs: Mapping[str, tuple[Array, Array]]

    @classmethod
    def read(cls, folder: Path, renamed: Mapping[str, str]) -> AdapterFiles:
        """`renamed`: see checkpoints.Base. Raises ProgramFailed."""
        config = reading.json_object(folder / CONFIG, ProgramFailed)
        path = folder / WEIGHTS
        begin, entries = tensors_in(path)
        pairs, down_name = {}, ".lora_A.weight"
        with reading.open_stream(path) as stream:
            for name in entries:
                module = name.removeprefix(PREFIX).removesuffix(down_name)
                if not name.endswith(down_name):
                    continue
                down, up = (
                    _number(stream, begin, entries[f"{PREFIX}{module}{part}"])
                    for part in (down_name, ".lora_B.weight")
                )
                weight = f"{module}.weight"
                pairs[renamed.get(weight, weight)] = up, down
        return cls(float(config["lora_alpha"]) / int(config["r"]), pairs)


def merge(
    model: Path,
    adapters: AdapterFiles,
    precision: str,
    into: Path,
    between_blocks: Callable[[], None] = lambda: None,
) -> str:
    """Write the files of weights of `model` with the adapters merged to the folder `into`; returns the digest of the model (`digest_of`).

    `precision`: of the result, as a configuration names it. Raises ProgramFailed, OSError, and what `between_blocks` raises.
    """
    wanted, digests, merged = FLOATS[precision], dict[str, str](), set[str]()
    headers = headers_of(model)
    main, _ = main_precision(headers)

    def write(name: str) -> None:
        begin, entries = headers[name]
        merged.update(adapters.pairs.keys() & entries.keys())
        made = _MergedFile(model / name, begin, entries, adapters, main, wanted, between_blocks)
        digests[name] = made.write(into / name)

    checkpoints.for_all(write, headers)
    if lacking := adapters.pairs.keys() - merged:
        raise ProgramFailed(f"{model} has no weight {min(lacking)}, to which an adapter belongs")
    return of_files(digests)


@dataclass(frozen=True, slots=True)
class _MergedFile:
    """One file of weights to merge adapters into."""

    path: Path
    begin: int
    entries: Mapping[str, Any]
    adapters: AdapterFiles
    # The precision of most numbers of the model, and the one that they get.
    main: str
    wanted: str
    between_blocks: Callable[[], None]

    def write(self, target: Path) -> str:
        """Returns the SHA-256 of the file of the model."""
        ordered = sorted(self.entries.items(), key=lambda item: item[1]["data_offsets"][0])
        kinds = {name: self._kind(entry) for name, entry in ordered}
        sha256 = hashlib.sha256()
        with reading.open_stream(self.path, links=True) as stream, HashedFile(target) as out:
            sha256.update(stream.read(self.begin))
            out.write(header(ordered, kinds))
            for name, entry in ordered:
                self.between_blocks()
                for block in self._blocks(stream, name, entry, kinds[name], sha256.update):
                    out.write(block)
        return sha256.hexdigest()

    def _kind(self, entry: Mapping[str, Any]) -> str:
        """The precision of a tensor in the result. Vectors are never rounded, since one may be the bias of a router, which an engine and
        the trainer use in float32."""
        narrows = len(entry["shape"]) < 2 and SIZES[self.wanted] < SIZES[self.main]
        return self.wanted if entry["dtype"] == self.main and not narrows else str(entry["dtype"])

    def _blocks(
        self,
        stream: BinaryIO,
        name: str,
        entry: Mapping[str, Any],
        kind: str,
        seen: Callable[[bytes], None],
    ) -> Iterator[bytes]:
        """The bytes of a tensor in the result, some rows at a time."""
        size = entry["data_offsets"][1] - entry["data_offsets"][0]
        pair = self.adapters.pairs.get(name)
        rows, *shape = entry["shape"] or [1]
        of_a_row, step = size // max(1, rows), max(1, BLOCK // max(1, prod(shape)))
        for first in range(0, rows if size else 0, step):
            data = stream.read(of_a_row * (min(rows, first + step) - first))
            seen(data)
            if pair is None and kind == entry["dtype"]:
                yield data
                continue
            numbers = numbers_of(data, entry["dtype"])
            if pair is not None:
                up, down = pair
                # The trainer computes with weights that are rounded to this precision.
                rounded = numbers_of(bytes_of(numbers, kind), kind).reshape(-1, prod(shape))
                numbers = rounded + self.adapters.scaling * (up[first : first + step] @ down)
            yield bytes_of(numbers, kind)


def header(ordered: list[tuple[str, Any]], kinds: Mapping[str, str]) -> bytes:
    """The header of a safetensors file whose tensors follow in this order, in the precisions `kinds`."""
    described: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, entry in ordered:
        kind, (first, last) = kinds[name], entry["data_offsets"]
        size = last - first if kind == entry["dtype"] else prod(entry["shape"]) * SIZES[kind]
        begin, end = end, end + size
        described[name] = {"dtype": kind, "shape": entry["shape"], "data_offsets": [begin, end]}
    encoded = json.dumps(described, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded


def _number(stream: BinaryIO, begin: int, entry: Mapping[str, Any]) -> Array:
    first, last = entry["data_offsets"]
    stream.seek(begin + first)
    return numbers_of(stream.read(last - first), entry["dtype"]).reshape(entry["shape"])


def numbers_of(data: bytes, kind: str) -> Array:
    """The numbers in these bytes, in float32."""
    np = import_numpy()
    if kind == "BF16":
        bits = np.frombuffer(data, "<u2").astype("<u4") << 16
        floats: Array = bits.view("<f4")
    else:
        floats = np.frombuffer(data, "<f2" if kind == "F16" else "<f4").astype("<f4", copy=False)
    return floats


def bytes_of(numbers: Array, kind: str) -> bytes:
    """The bytes of float32 numbers in a precision, rounded to the nearest, and of two nearest to the even one."""
    np = import_numpy()
    if kind == "F32":
        return numbers.astype("<f4", copy=False).tobytes()
    if kind == "F16":
        return numbers.astype("<f2").tobytes()
    bits = np.ascontiguousarray(numbers, "<f4").view("<u4")
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
    # The addition would turn some of these into infinity or a sign.
    rounded[np.isnan(numbers)] = 0x7FC0
    return bytes(rounded.tobytes())


def import_numpy() -> Any:
    """numpy, which the daemon and commands load only where they need it. Raises UsageError if it is not installed."""
    try:
        import numpy
    except ImportError:
        raise UsageError(
            "making the weights of this version needs the package numpy, which is not installed here; use the environment of the run"
        ) from None
    return numpy
