"""Exports trajectories as JSON lines or Parquet: one row per trajectory, written as they are read."""

from __future__ import annotations

import contextlib
import json
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fsbarrier.data import rank_files, reader
from fsbarrier.data.rank_file import FormatError
from fsbarrier.data.rank_files import FileState
from fsbarrier.errors import StoreError, UsageError
from fsbarrier.rundir.names import SPLITS, parse_trajectories
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.store import files

SUFFIXES = (".jsonl", ".parquet")
ARRAYS = ("token_ids", "loss_mask", "logprobs")
#: rows per Parquet row group
ROWS = 512
#: Parquet columns (the fields of data/trajectory.py) and their types; fields without a fixed shape are stored as JSON
COLUMNS = {
    **dict.fromkeys(("task_id", "split", "finish_reason", "text"), "string"),
    **dict.fromkeys(
        ("task_index", "sample", "iteration", "generation", "node_rank", "policy_version"), "int64"
    ),
    **dict.fromkeys(("prompt_tokens", "turns"), "int64"),
    "reward": "float64",
    "valid": "bool",
    **dict.fromkeys(("prompt", "messages", "reward_parts", "timings", "metadata"), "json"),
    "token_ids": "list<int32>",
    "loss_mask": "list<uint8>",
    "logprobs": "list<float>",
    "other": "json",
}

# A trajectory, possibly without its arrays.
Row = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Exported:
    """The result of an export, with the source files."""

    path: Path
    trajectories: int
    files: tuple[Path, ...]


class _Writer(Protocol):
    def add(self, row: Row) -> None: ...

    def close(self) -> None: ...


def sources(log_path: Path, split: str, iterations: Sequence[int] | None) -> tuple[list[Path], list[str]]:
    """The trajectory files of a run, and notes about skipped ones: merged files, or the ranks' files of iterations without one.

    Raises UsageError if there are none, or a rank's file is unreadable.
    """
    there = _iterations(log_path, split)
    chosen = sorted(there) if iterations is None else list(iterations)
    found: list[Path] = []
    aside: list[str] = []
    for iteration in chosen:
        merged = RunPaths(log_path).merged(split, iteration)
        if merged.is_file():
            found.append(merged)
            continue
        for item in rank_files.find(log_path, split, iteration):
            if item.state is FileState.DAMAGED:
                raise UsageError(
                    f"{item.path.name}: {item.note}; move it away, or merge by hand (fsbarrier aggregate)"
                )
            if item.mergeable:
                found.append(item.path)
            else:
                aside.append(f"{item.path.name}: {item.state.value} ({item.note})")
    if not found:
        which = "" if iterations is None else f" of iteration {', '.join(map(str, chosen))}"
        raise UsageError(
            f"--log-path {log_path}: no {split} trajectories{which} in {RunPaths(log_path).trajectories(split)}"
        )
    return found, aside


def _iterations(log_path: Path, split: str) -> set[int]:
    assert split in SPLITS
    folder = RunPaths(log_path).trajectories(split)
    found = [parse_trajectories(path.name) for path in folder.iterdir()] if folder.is_dir() else []
    # Skip files named after a generation: they are linked to the plain name too, unless that generation was interrupted.
    return {
        file.iteration
        for file in found
        if file is not None and file.split == split and (file.rank is not None or file.generation is None)
    }


def export(found: Iterable[Path], out: Path, *, tokens: bool = True) -> Exported:
    """Write the trajectories of these files to `out` (.jsonl or .parquet), atomically.

    If several files of one iteration contain a task, the first one is used. `tokens=False` omits token ids, masks and log-probabilities.
    Raises UsageError (wrong suffix, not a trajectory file, `out` exists), StoreError.
    """
    if out.suffix not in SUFFIXES:
        raise UsageError(f"{out}: must end in {' or '.join(SUFFIXES)}")
    if out.exists():
        raise UsageError(f"{out}: already exists; name a new file")
    temporary = files.temporary_beside(out)
    open_writer: Callable[[Path], _Writer] = _JsonLines if out.suffix == ".jsonl" else _Parquet
    used, count, seen = [], 0, set[tuple[object, ...]]()
    try:
        with contextlib.closing(open_writer(temporary)) as writer:
            for path in found:
                used.append(path)
                for row in _rows(path, seen):
                    writer.add(row if tokens else {k: v for k, v in row.items() if k not in ARRAYS})
                    count += 1
        os.replace(temporary, out)
    except FormatError as error:
        raise UsageError(f"{error}; merge the valid groups by hand (fsbarrier aggregate)") from None
    except OSError as error:
        raise StoreError(f"{error.filename or out}: {error.strerror or error}") from None
    finally:
        temporary.unlink(missing_ok=True)
    return Exported(out, count, tuple(used))


def _rows(path: Path, seen: set[tuple[object, ...]]) -> Iterator[Row]:
    """The trajectories of a file whose tasks no earlier file of the same rollout contains."""
    tasks: set[tuple[object, ...]] = set()
    for row in reader.iter_trajectories(path):
        key = tuple(row.get(name) for name in ("split", "iteration", "task_index"))
        if key not in seen:
            tasks.add(key)
            yield row
    seen |= tasks


class _JsonLines:
    """One JSON object per line, with arrays as lists."""

    def __init__(self, path: Path) -> None:
        self._stream = os.fdopen(files.open_new(path), "w", encoding="utf-8")

    def add(self, row: Row) -> None:
        self._stream.write(json.dumps(row, ensure_ascii=False, default=_json_value) + "\n")

    def close(self) -> None:
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()


class _Parquet:
    """Writes COLUMNS, with a row group every ROWS rows."""

    def __init__(self, path: Path) -> None:
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError:
            raise UsageError(
                f"{path.suffix}: writing parquet needs the package pyarrow; export .jsonl instead"
            ) from None
        kinds = {
            **{name: getattr(pyarrow, name)() for name in ("string", "int64", "float64")},
            **{"bool": pyarrow.bool_(), "json": pyarrow.string()},
            "list<int32>": pyarrow.list_(pyarrow.int32()),
            "list<uint8>": pyarrow.list_(pyarrow.uint8()),
            "list<float>": pyarrow.list_(pyarrow.float32()),
        }
        self._schema = pyarrow.schema([(name, kinds[kind]) for name, kind in COLUMNS.items()])
        self._table = pyarrow.Table
        self._stream = os.fdopen(files.open_new(path), "wb")
        self._writer = parquet.ParquetWriter(self._stream, self._schema, compression="zstd")
        self._held: list[dict[str, object]] = []

    def add(self, row: Row) -> None:
        made = {name: _cell(row.get(name), kind) for name, kind in COLUMNS.items() if name != "other"}
        other = {name: value for name, value in row.items() if name not in COLUMNS}
        self._held.append({**made, "other": _cell(other or None, "json")})
        if len(self._held) >= ROWS:
            self._write()

    def _write(self) -> None:
        self._writer.write_table(self._table.from_pylist(self._held, schema=self._schema))
        self._held.clear()

    def close(self) -> None:
        if self._held:
            self._write()
        self._writer.close()
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()


def _cell(value: object, kind: str) -> object:
    if value is None:
        return None
    if kind == "json":
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=_json_value)
    return value.tolist() if isinstance(value, array) else value


def _json_value(value: object) -> object:
    return value.tolist() if isinstance(value, array) else str(value)
