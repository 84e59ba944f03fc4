"""Trajectories as tables: everything that is in the files, from merged files or from what the ranks left."""

from __future__ import annotations

import json
import tracemalloc
from array import array
from pathlib import Path
from typing import Any

import pytest
from commands import Said, typed

from fsbarrier.aggregate import Part, aggregate
from fsbarrier.data import tables
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.trajectories import RankFileWriter


def one(task: int, sample: int, iteration: int, tokens: int = 4, **fields: Any) -> dict[str, Any]:
    return {
        "task_id": f"t{task}",
        "task_index": task,
        "sample": sample,
        "reward": sample / 4,
        "reward_parts": {"exact": 1.0},
        "policy_version": iteration - 1,
        "node_rank": 0,
        "generation": 1,
        "iteration": iteration,
        "split": "train",
        "prompt": "dcba=",
        "messages": [{"role": "user", "content": "dcba="}, {"role": "assistant", "content": "äbc"}],
        "text": "äbc",
        "token_ids": array("i", range(tokens)),
        "prompt_tokens": 2,
        "loss_mask": array("B", bytes(2) + b"\1" * (tokens - 2)),
        "logprobs": array("f", [0.0, 0.0] + [-0.5] * (tokens - 2)),
        "finish_reason": "stop",
        "valid": True,
        "timings": {"generate_s": 0.5},
        "metadata": {"answer": "abcd"},
        **fields,
    }


def write(
    path: Path, iteration: int, tasks: list[int], *, rank: int = 0, finish: bool = True, tokens: int = 4
) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    header = {"run_id": "run", "split": "train", "iteration": iteration, "generation": 1, "node_rank": rank}
    with RankFileWriter(path, header=header) as writer:
        for task in tasks:
            writer.append_group(task, [one(task, sample, iteration, tokens) for sample in range(2)])
        if finish:
            writer.finish()
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with a merged first iteration, and of the second what two ranks left: one whole, one cut off in the middle."""
    paths = RunPaths(tmp_path / "run")
    parts = [write(paths.part("train", 1, rank, 1, 1), 1, [rank, rank + 2], rank=rank) for rank in (0, 1)]
    aggregate([Part(part, None) for part in parts], paths.merged("train", 1), metadata={}, expected=None)
    write(paths.rank_checkpoint("train", 2, 0), 2, [4, 5])
    torn = write(paths.part("train", 2, 1, 1, 1), 2, [5, 6, 7], rank=1, finish=False)
    torn.write_bytes(torn.read_bytes()[:-100])
    return paths.root


def export(run: Path, out: Path, *words: str, code: int = 0) -> Said:
    return typed("export", out, "--log-path", run, *words, code=code)


def test_json_lines_hold_everything(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out" / "all.jsonl"
    export(run, out)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["task_index"] for row in rows] == [task for task in range(7) for _ in range(2)]
    whole = {
        name: value.tolist() if isinstance(value, array) else value for name, value in one(0, 1, 1).items()
    }
    assert rows[1] == whole
    assert out.stat().st_mode & 0o777 == 0o600 and [path.name for path in out.parent.iterdir()] == [
        "all.jsonl"
    ]


def test_parquet_has_typed_columns(run: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    said = export(run, tmp_path / "two.parquet", "--iteration", "2", "--json")
    told = json.loads(said.out)
    assert told["trajectories"] == 6 and len(told["from"]) == 2
    rows = parquet.read_table(tmp_path / "two.parquet").to_pylist()
    assert [row["task_index"] for row in rows] == [4, 4, 5, 5, 6, 6]
    row = rows[1]
    assert (row["token_ids"], row["loss_mask"], row["logprobs"]) == (
        [0, 1, 2, 3],
        [0, 0, 1, 1],
        [0.0, 0.0, -0.5, -0.5],
    )
    assert json.loads(row["messages"])[1]["content"] == row["text"] == "äbc"
    assert (row["prompt"], row["reward"], row["valid"]) == ("dcba=", 0.25, True)
    assert json.loads(row["metadata"]) == {"answer": "abcd"} and row["turns"] is None


def memory(path: Path, out: Path) -> int:
    """The most that writing `out` takes, in bytes."""
    tracemalloc.start()
    tables.export([path], out)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return most


@pytest.mark.parametrize("suffix", tables.SUFFIXES)
def test_a_file_takes_no_more_memory_than_a_group(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pyarrow")
    monkeypatch.setattr(tables, "ROWS", 4)
    few = write(tmp_path / "few", 1, list(range(2)), tokens=5_000)
    many = write(tmp_path / "many", 2, list(range(16)), tokens=5_000)
    memory(few, tmp_path / f"first{suffix}")  # what is imported and kept
    assert memory(many, tmp_path / f"many{suffix}") < 1.5 * memory(few, tmp_path / f"few{suffix}")


def test_what_is_wrong_is_one_line_and_leaves_nothing(run: Path, tmp_path: Path) -> None:
    (tmp_path / "there.jsonl").write_text("x")
    other = tmp_path / "other"
    other.write_bytes(b"PK")
    for out, words, said in (
        ("there.jsonl", [], "already exists; name a new file"),
        ("a.jsonl", ["--iteration", "9"], "no train trajectories of iteration 9"),
        ("a.jsonl", ["--split", "test"], "no test trajectories"),
        ("a.jsonl", ["--policy-version", "1"], "--policy-version: only for exporting a policy"),
        ("folder", ["--no-tokens"], "--no-tokens: only for exporting trajectories"),
        ("other/a.jsonl", [], "cannot create its folder"),
    ):
        assert said in export(run, tmp_path / out, *words, code=2).err
    damaged = RunPaths(run).merged("train", 1)
    content = bytearray(damaged.read_bytes())
    content[content.index(b"\x00\x00\x00\xbf")] ^= 1
    damaged.write_bytes(content)
    said = export(run, tmp_path / "a.jsonl", "--iteration", "1", code=2)
    assert "merge the valid groups by hand" in said.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "run", "there.jsonl"]
