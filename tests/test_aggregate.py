"""Merging rank files: complete, each task once, verified, in one step, and again without a change."""

from __future__ import annotations

import json
import os
import resource
import signal
import stat
import subprocess
import sys
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest
from commands import Said, typed
from forks import run_warm
from trainer_bench import work_identity
from trajectory_files import group, write_part

from fsbarrier.aggregate import AggregateReport, Part, aggregate, command_line
from fsbarrier.errors import StoreError, UsageError
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.trajectories import FormatError, RankFileWriter, iter_trajectories, load, scan_rank_file

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def three(tmp_path: Path) -> list[Path]:
    """A finished part, one that still grows, one with a torn tail: tasks 0 to 8, out of order."""
    first = write_part(tmp_path / "rank_0", (2, 0, 1), rank=0, finished=True)
    second = write_part(tmp_path / "rank_1", (5, 3, 4), rank=1)
    third = write_part(tmp_path / "rank_2", (8, 7, 6), rank=2)
    with third.open("ab") as stream:
        stream.write(write_part(tmp_path / "other", [1]).read_bytes()[:-100])
    (tmp_path / "other").unlink()
    return [first, second, third]


def merge(parts: list[Path], out: Path, expected: Any = None, **options: Any) -> AggregateReport:
    options.setdefault("metadata", {"run_id": "r", "split": "train", "iteration": 5})
    return aggregate([Part(path) for path in parts], out, expected=expected, **options)


def concatenated(tasks: range, rank_of: Any = lambda task: task // 3) -> list[dict[str, Any]]:
    return [item for task in tasks for item in group(task, rank=rank_of(task))]


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def damage(path: Path, task: int) -> None:
    """Flip a bit in the trajectories of one group."""
    entry = next(entry for entry in scan_rank_file(path).groups if entry.task_index == task)
    content = bytearray(path.read_bytes())
    content[(entry.offset + entry.end) // 2] ^= 4
    path.write_bytes(content)


def test_three_parts_merge_into_their_concatenation(tmp_path: Path, three: list[Path]) -> None:
    out = tmp_path / "merged"
    report = merge(three, out, range(9))
    assert load(out)["trajectories"] == list(iter_trajectories(out)) == concatenated(range(9))
    metadata = load(out)["metadata"]
    assert (metadata["run_id"], metadata["iteration"], metadata["missing"]) == ("r", 5, [])
    assert (metadata["trajectories"], metadata["groups"]) == (18, 9)
    assert [part["name"] for part in metadata["parts"]] == ["rank_0", "rank_1", "rank_2"]
    assert metadata["parts"][2]["bytes"] == scan_rank_file(three[2]).valid_bytes
    items = concatenated(range(9))
    rewards = [item["reward"] for item in items]
    by_task = [[item["reward"] for item in items if item["task_index"] == task] for task in range(9)]
    assert report == AggregateReport(
        str(out),
        18,
        9,
        (),
        0,
        out.stat().st_size,
        pytest.approx(sum(rewards) / 18),
        False,
        figures={
            "truncated": 0,
            "truncated_share": 0,
            "reward_errors": 0,
            "agent_errors": 0,
            "environment_errors": 0,
            "reward_std": pytest.approx(mean(map(stdev, by_task))),
            "groups_without_signal": sum(len(set(group)) == 1 for group in by_task),
            "without_signal_share": pytest.approx(sum(len(set(group)) == 1 for group in by_task) / 9),
            "answer_tokens_mean": 8,
            "answer_tokens_min": 8,
            "answer_tokens_max": 8,
            "reward_parts/exact": 1,
            "reward_parts/length": -0.5,
        },
        rolled_out_reward_mean=sum(rewards) / 18,
    )
    assert metadata["tasks"] == list(range(9))
    assert oct(out.stat().st_mode)[-3:] == "600"
    assert names(tmp_path) == {"merged", "rank_0", "rank_1", "rank_2"}


@pytest.mark.torch
@pytest.mark.parametrize("mmap", [False, True])
def test_torch_opens_a_merged_file_with_weights_only(tmp_path: Path, three: list[Path], mmap: bool) -> None:
    import torch

    merge(three, tmp_path / "merged", range(9))
    loaded = torch.load(tmp_path / "merged", weights_only=True, mmap=mmap)
    wanted = concatenated(range(9))
    assert loaded["metadata"]["groups"] == 9
    for found, item in zip(loaded["trajectories"], wanted, strict=True):
        for name, value in item.items():
            assert (
                found[name].tolist() == value.tolist() if hasattr(value, "typecode") else found[name] == value
            )


def test_missing_tasks_are_named_and_nothing_is_written(tmp_path: Path, three: list[Path]) -> None:
    before = names(tmp_path)
    with pytest.raises(UsageError, match=r"merged: 3 tasks are missing \(9, 10, 20\)"):
        merge(three, tmp_path / "merged", [*range(11), 20])
    assert names(tmp_path) == before


def test_a_partial_merge_says_what_is_missing(tmp_path: Path, three: list[Path]) -> None:
    out = tmp_path / "merged"
    report = merge(three, out, range(11), allow_partial=True)
    assert report.missing == (9, 10) and report.groups == 9
    assert load(out)["metadata"]["missing"] == [9, 10]
    write_part(tmp_path / "late", (9, 10), rank=3)
    whole = merge([*three, tmp_path / "late"], out, range(11))
    assert whole.missing == () and not whole.already_done
    assert load(out)["metadata"]["missing"] == []


def test_of_a_task_in_two_parts_the_first_wins(tmp_path: Path, three: list[Path]) -> None:
    other = write_part(tmp_path / "other", (0, 5, 9), rank=7)
    for parts, rank in (([*three, other], 0), ([other, *three], 7)):
        out = tmp_path / f"merged-{rank}"
        report = merge(parts, out, range(10))
        assert (report.groups, report.duplicates_dropped) == (10, 2)
        found = load(out)["trajectories"]
        assert [item["task_index"] for item in found] == [task for task in range(10) for _ in range(2)]
        assert {item["node_rank"] for item in found if item["task_index"] == 0} == {rank}


def test_filters_by_task_limit_and_expectation(tmp_path: Path, three: list[Path]) -> None:
    entries = scan_rank_file(three[1]).groups
    parts = [
        Part(three[0], tasks=frozenset({1})),
        Part(three[1], valid_bytes=entries[1].end),  # tasks 5 and 3 were acknowledged, 4 was not
        Part(three[2]),
    ]
    report = aggregate(parts, tmp_path / "merged", metadata={}, expected={1, 3, 5, 8})
    assert (report.groups, report.unexpected, report.missing) == (4, 2, ())
    assert {item["task_index"] for item in load(tmp_path / "merged")["trajectories"]} == {1, 3, 5, 8}


def test_acknowledged_bytes_that_are_gone_are_missed(tmp_path: Path, three: list[Path]) -> None:
    acknowledged = three[1].stat().st_size
    os.truncate(three[1], acknowledged - 1)
    part = Part(three[1], valid_bytes=acknowledged)
    with pytest.raises(StoreError, match="acknowledged bytes are valid"):
        aggregate([part], tmp_path / "merged", metadata={}, expected=None)
    with pytest.raises(UsageError, match=r"1 task is missing \(4\)"):
        aggregate([part], tmp_path / "merged", metadata={}, expected={3, 4, 5})


def test_a_damaged_group_is_replaced_from_another_part_or_missed(tmp_path: Path, three: list[Path]) -> None:
    out = tmp_path / "merged"
    for path, task in ((three[0], 0), (three[1], 3)):
        damage(path, task)
    before = names(tmp_path)
    with pytest.raises(
        UsageError, match=r"2 tasks are missing \(0, 3\); damaged: rank_0: the group at byte \d+ is damaged"
    ):
        merge(three, out, range(9))
    assert names(tmp_path) == before
    other = write_part(tmp_path / "other", (3, 0), rank=7)
    report = merge([*three, other], out, range(9))
    assert (report.groups, report.missing, len(report.damaged)) == (9, (), 2)
    rank_of = {0: 7, 3: 7}
    assert load(out)["trajectories"] == concatenated(range(9), lambda task: rank_of.get(task, task // 3))


def test_parts_that_cannot_be_merged(tmp_path: Path, three: list[Path]) -> None:
    with pytest.raises(StoreError, match="gone: cannot read"):
        merge([tmp_path / "gone"], tmp_path / "merged")
    (tmp_path / "torn").write_bytes(b"")
    with pytest.raises(UsageError, match="no group"):
        merge([tmp_path / "torn"], tmp_path / "merged")
    with pytest.raises(UsageError, match="metadata"):
        merge(three, tmp_path / "merged", metadata={"a": object()})
    (tmp_path / "noise").write_bytes(os.urandom(5000))
    with pytest.raises(FormatError, match="noise: it was not written by fsbarrier"):
        merge([tmp_path / "noise"], tmp_path / "merged")
    assert "merged" not in names(tmp_path)


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, three: list[Path]) -> None:
    before = names(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))
        with pytest.raises(StoreError, match="cannot merge: File too large"):
            merge(three, tmp_path / "merged", range(9))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == before


# --- the worker -------------------------------------------------------------------------------------------------------


def spec_file(folder: Path, parts: list[Path], out: Path, expected: Any, **more: Any) -> Path:
    records = [{"path": str(path), "valid_bytes": None, "tasks": None} for path in parts]
    request = {"parts": records, "out": str(out), "expected": expected, "metadata": {"run_id": "r"}}
    spec = {**work_identity(folder), "request": request, "settings": {}, **more}
    spec |= {"result": str(folder / "result.json"), "progress": str(folder / "progress.json")}
    (folder / "spec.json").write_text(json.dumps(spec))
    return folder / "spec.json"


def worker(spec: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fsbarrier.aggregate", "--spec", str(spec)]
    done: subprocess.CompletedProcess[str] = run_warm(command, env={**os.environ, "PYTHONPATH": str(ROOT)})
    return done


@pytest.mark.parametrize("group", [False, True])
def test_the_worker_writes_its_result(tmp_path: Path, three: list[Path], group: bool) -> None:
    settings = {"shared_group": group}
    spec = spec_file(tmp_path, three, tmp_path / "merged", list(range(9)), settings=settings)
    done = worker(spec)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["trajectories"], result["missing"], result["already_done"]) == (18, [], False)
    found = (tmp_path / "merged").stat()
    assert result["bytes"] == found.st_size
    assert stat.S_IMODE(found.st_mode) == (0o660 if group else 0o600), "as every other file of the run"
    progress = json.loads((tmp_path / "progress.json").read_text())
    assert (progress["done"], progress["total"], progress["unit"]) == (18, 18, "trajectories")


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_an_ended_worker_leaves_the_old_result(
    tmp_path: Path, three: list[Path], how: signal.Signals
) -> None:
    """It is stopped for sure in the middle: when it would write."""
    out = tmp_path / "merged"
    merge(three[:1], out)
    before = out.read_bytes()
    spec = spec_file(tmp_path, three, out, list(range(9)))
    program = (
        "import sys, os\n"
        "from fsbarrier import aggregate\n"
        "from fsbarrier.data import merge\n"
        "def stuck(*given, **more):\n"
        "    print('copying', flush=True)\n"
        "    sys.stdin.read()\n"
        "merge.write_atomic = stuck\n"
        "sys.exit(aggregate.command_line(sys.argv[1:]))\n"
    )
    command = [sys.executable, "-c", program, "--spec", str(spec)]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None and child.stdin is not None
        assert child.stdout.readline() == "copying\n"
        child.send_signal(how)
        assert child.wait() == (143 if how == signal.SIGTERM else -9)
    assert out.read_bytes() == before
    assert merge(three, out, range(9)).groups == 9
    assert not [name for name in names(tmp_path) if name.startswith(".merged.")]


# --- by hand ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    """Iteration 5: rank 0 finished, with its link; rank 1 died while writing; rank 2 grows; an older try of rank 1."""
    paths = RunPaths(tmp_path / "run")
    write_part(paths.part("train", 5, 0, 2, 1), range(3), rank=0, generation=2, finished=True)
    os.link(paths.part("train", 5, 0, 2, 1), paths.rank_checkpoint("train", 5, 0))
    torn = write_part(paths.part("train", 5, 1, 2, 1), range(3, 5), rank=1, generation=2, expected=range(9))
    with torn.open("ab") as stream:
        stream.write(b"\1\2\3\4 and no more")
    write_part(paths.part("train", 5, 1, 1, 1), range(3, 6), rank=1, generation=1)
    write_part(paths.part("train", 5, 2, 2, 1), range(6, 9), rank=2, generation=2)
    return paths


def by_hand(paths: RunPaths, *words: str, code: int = 0) -> Said:
    return typed("aggregate", "--log-path", paths.root, "--iteration", "5", *words, code=code)


def test_by_hand_shows_what_there_is_and_merges_it(run: RunPaths) -> None:
    out = run.merged("train", 5)
    before = names(out.parent)
    shown = by_hand(run, "--dry-run").out
    assert names(out.parent) == before
    assert "would merge 9 groups" in shown and "torn" in shown and "partial" in shown and "complete" in shown
    assert "train: merged: 18 trajectories in 9 groups" in by_hand(run).out
    loaded = load(out)
    assert [item["task_index"] for item in loaded["trajectories"]] == [
        task for task in range(9) for _ in range(2)
    ]
    metadata = loaded["metadata"]
    assert (metadata["run_id"], metadata["generation"], metadata["policy_version"]) == ("run-1", 2, 3)
    assert names(out.parent) == {*before, out.name}
    stat = out.stat()
    assert "train: already merged" in by_hand(run).out
    assert out.stat().st_mtime_ns == stat.st_mtime_ns


def test_by_hand_refuses_what_is_incomplete(run: RunPaths) -> None:
    run.part("train", 5, 1, 1, 1).unlink()
    said = by_hand(run, code=2)
    assert "1 task is missing (5). To merge without them: --allow-partial" in said.err
    assert not run.merged("train", 5).exists()
    by_hand(run, "--allow-partial")
    assert load(run.merged("train", 5))["metadata"]["missing"] == [5]
    write_part(run.part("train", 5, 1, 3, 1), [5], rank=1, generation=3)
    by_hand(run)  # now there is more than was merged
    assert load(run.merged("train", 5))["metadata"]["missing"] == []


def test_by_hand_names_the_tasks_of_a_rank_without_any_file(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    header = {"run_id": "r", "node_rank": 0, "generation": 1, "expected": [5, 4, 3, 2, 1, 0], "keep": 4}
    part = paths.part("train", 5, 0, 1, 1)
    part.parent.mkdir(parents=True)
    with RankFileWriter(part, header=header) as writer:
        for task in range(3):
            writer.append_group(task, group(task))
    assert "3 tasks are missing (3, 4, 5)" in by_hand(paths, code=2).err
    with RankFileWriter(paths.part("train", 5, 1, 1, 1), header=header) as writer:
        for task in range(3, 6):
            writer.append_group(task, group(task))
    by_hand(paths)
    metadata = load(paths.merged("train", 5))["metadata"]
    assert metadata["groups"] == 4 and len(metadata["surplus"] + metadata["without_signal"]) == 2


def states(said: Said) -> list[str]:
    return [item["state"] for item in json.loads(said.out)["splits"]["train"]["files"]]


def test_by_hand_leaves_out_what_another_policy_rolled_out(run: RunPaths) -> None:
    """The run was taken back to an earlier iteration: policy 3 is another one since generation 9."""
    write_part(
        run.part("train", 5, 3, 9, 1), range(9), rank=3, generation=9, policy="policy-000003.g0008:ffff"
    )
    assert sorted(states(by_hand(run, "--json"))) == [*["other policy"] * 4, "partial"]
    merged = load(run.merged("train", 5))
    assert merged["metadata"]["policy"] == "policy-000003.g0008:ffff"
    assert {record["node_rank"] for record in merged["trajectories"]} == {3}


def test_by_hand_refuses_what_it_cannot_read(run: RunPaths) -> None:
    part = run.part("train", 5, 3, 2, 1)
    part.write_bytes(run.part("train", 5, 2, 2, 1).read_bytes().replace(b"run-1", b"run-2"))
    assert "its header is damaged; move it away" in by_hand(run, code=2).err
    assert states(by_hand(run, "--json", "--allow-partial")).count("damaged") == 1
    run.merged("train", 5).write_bytes(b"somebody's own file")
    part.unlink()
    for words in ([], ["--dry-run"]):
        assert "move it away" in by_hand(run, *words, code=2).err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--iteration", "6"], "no rank wrote a file for this iteration"),
        (["--iteration", "-1"], "--iteration -1"),
        (["--iteration", "5", "--split", "test"], "no rank wrote a file for this iteration"),
        (["--iteration", "5", "--split", "other"], "--split"),
        (["--iteration", "5", "--log-path", "/nowhere"], "no such directory"),
    ],
)
def test_by_hand_mistakes_are_one_line(
    run: RunPaths, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    assert command_line(["--log-path", str(run.root), *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and says in captured.err
