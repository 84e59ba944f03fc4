"""Exports trajectories as JSON lines or Parquet: one row per trajectory, written as they are read."""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from fsbarrier.data import rank_files, reader
from fsbarrier.data.rank_file import FormatError
from fsbarrier.data.rank_files import FileState
from fsbarrier.errors import StoreError, UsageError
from fsbarrier.rundir.names import SPLITS, parse_trajectories
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.store import files

SUFFIXES = (".jsonl", ".parquet")
ARRAYS = ("token_ids", "loss_mask", "logprobs", "teacher_logprobs", "policy_versions")
#: rows per Parquet row group
ROWS = 512
#: Parquet columns (the fields of data/trajectory.py) and their types; fields without a fixed shape are stored as JSON
COLUMNS = {
    **dict.fromkeys(("task_id", "split", "finish_reason", "text", "reasoning"), "string"),
    **dict.fromkeys(
        ("task_index", "sample", "iteration", "generation", "node_rank", "policy_version"), "int64"
    ),
    **dict.fromkeys(("prompt_tokens", "turns", "reasoning_tokens", "thoughts_closed"), "int64"),
    "reward": "float64",
    "valid": "bool",
    **dict.fromkeys(("prompt", "messages", "images", "reward_parts", "timings", "metadata"), "json"),
    **dict.fromkeys(("token_ids", "policy_versions"), "list<int32>"),
    "loss_mask": "list<uint8>",
    "logprobs": "list<float>",
    "teacher_logprobs": "list<float>",
    "other": "json",
}

# A trajectory, possibly without its arrays.
Row = Mapping[str, object]


def sources(log_path: Path, split: str, iterations: Sequence[int] | None) -> tuple[list[Path], list[str]]:
    """The trajectory files of a run, and notes about skipped ones: merged files, or the ranks' files of iterations without one.

    Raises UsageError if there are none, or a rank's file is unreadable.
    """
    there = _iterations(log_path, split)
    chosen = sorted(there) if iterations is None else list(iterations)
    sources: list[Path] = []
    aside: list[str] = []
    for iteration in chosen:
        merged = RunPaths(log_path).merged(split, iteration)
        if merged.is_file():
            sources.append(merged)
            continue
        for item in rank_files.find(log_path, split, iteration):
            if item.state is FileState.DAMAGED:
                raise UsageError(
                    f"{item.path.name}: {item.note}; move it away, or merge by hand (fsbarrier aggregate)"
                )
            if item.mergeable:
                sources.append(item.path)
            else:
                aside.append(f"{item.path.name}: {item.state.value} ({item.note})")
    if not sources:
        which = "" if iterations is None else f" of iteration {', '.join(map(str, chosen))}"
        raise UsageError(
            f"--log-path {log_path}: no {split} trajectories{which} in {RunPaths(log_path).trajectories(split)}"
        )
    return sources, aside


def _iterations(log_path: Path, split: str) -> set[int]:
    assert split in SPLITS
    folder = RunPaths(log_path).trajectories(split)
    names = [parse_trajectories(path.name) for path in folder.iterdir()] if folder.is_dir() else []
    # Skip files named after a generation: they are linked to the plain name too, unless that generation was interrupted.
    return {
        file.iteration
        for file in names
        if file is not None and file.split == split and (file.rank is not None or file.generation is None)
    }


def export(paths: Sequence[Path], out: Path, *, tokens: bool = True) -> int:
    """Write the trajectories of these files to `out` (.jsonl or .parquet), atomically; returns their number.

    If several files of one iteration contain a task, the first one is used. `tokens=False` omits token ids, masks and log-probabilities.
    Raises UsageError (wrong suffix, not a trajectory file, `out` exists), StoreError.
    """
    if out.suffix not in SUFFIXES:
        raise UsageError(f"{out}: must end in {' or '.join(SUFFIXES)}")
    if out.exists():
        raise UsageError(f"{out}: already exists; name a new file")
    temporary = files.temporary_beside(out)
    write = _write_json_lines if out.suffix == ".jsonl" else _write_parquet
    try:
        with os.fdopen(files.open_new(temporary), "wb") as stream:
            count = write(stream, _rows(paths, () if tokens else ARRAYS))
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, out)
    except FormatError as error:
        raise UsageError(f"{error}; merge the valid groups by hand (fsbarrier aggregate)") from None
    except OSError as error:
        raise StoreError(f"{error.filename or out}: {error.strerror or error}") from None
    finally:
        temporary.unlink(missing_ok=True)
    return count


def _rows(paths: Sequence[Path], left_out: Sequence[str]) -> Iterator[Row]:
    """The trajectories of these files without the fields `left_out`; those of a task only from the first file of the same rollout."""
    seen = set[tuple[object, ...]]()
    for path in paths:
        tasks = set[tuple[object, ...]]()
        for row in reader.iter_trajectories(path):
            key = tuple(row.get(name) for name in ("split", "iteration", "task_index"))
            if key not in seen:
                tasks.add(key)
                yield {name: value for name, value in row.items() if name not in left_out}
        seen |= tasks


def _write_json_lines(stream: BinaryIO, rows: Iterable[Row]) -> int:
    """Write one JSON object per line, with arrays as lists; returns the number of rows."""
    count = 0
    for row in rows:
        stream.write(json.dumps(row, ensure_ascii=False, default=_json_value).encode() + b"\n")
        count += 1
    return count


def _write_parquet(stream: BinaryIO, rows: Iterable[Row]) -> int:
    """Write COLUMNS, with a row group every ROWS rows; returns the number of rows."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise UsageError(
            "a .parquet file: writing it needs the package pyarrow; export .jsonl instead"
        ) from None
    kinds = {
        **{name: getattr(pyarrow, name)() for name in ("string", "int64", "float64")},
        **{"bool": pyarrow.bool_(), "json": pyarrow.string()},
        "list<int32>": pyarrow.list_(pyarrow.int32()),
        "list<uint8>": pyarrow.list_(pyarrow.uint8()),
        "list<float>": pyarrow.list_(pyarrow.float32()),
    }
    schema = pyarrow.schema([(name, kinds[kind]) for name, kind in COLUMNS.items()])
    cells, count = map(_cells, rows), 0
    with parquet.ParquetWriter(stream, schema, compression="zstd") as writer:
        for first in cells:
            table = pyarrow.Table.from_pylist([first, *islice(cells, ROWS - 1)], schema=schema)
            writer.write_table(table)
            count += table.num_rows
    return count


def _cells(row: Row) -> dict[str, object]:
    """The row of a Parquet table."""
    other = {name: value for name, value in row.items() if name not in COLUMNS}
    return {name: _cell(row.get(name), kind) for name, kind in COLUMNS.items()} | {
        "other": _cell(other or None, "json")
    }


def _cell(value: object, kind: str) -> object:
    if value is None:
        return None
    if kind == "json":
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=_json_value)
    return value.tolist() if isinstance(value, array) else value


def _json_value(value: object) -> object:
    return value.tolist() if isinstance(value, array) else str(value)
