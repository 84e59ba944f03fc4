"""fsbarrier export: a policy, adapters, tables of trajectories."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tracemalloc
from array import array
from pathlib import Path
from typing import Any

import pytest
from commands import Said, typed
from hub_stand_in import Hub

from fsbarrier.aggregate import Part, aggregate
from fsbarrier.data import demo_tasks, tables
from fsbarrier.errors import ProgramFailed
from fsbarrier.rundir import checkpoints, runrecord
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.settings.sections import Settings
from fsbarrier.trajectories import RankFileWriter


def weights(text: str, name: str = "w") -> bytes:
    """A safetensors file with one tensor, the bytes of `text`."""
    place = {"dtype": "U8", "shape": [len(text)], "data_offsets": [0, len(text)]}
    header = json.dumps({name: place}).encode()
    return len(header).to_bytes(8, "little") + header + text.encode()


def checkpoint(log_path: Path, version: int, generation: int, text: str, *, complete: bool = True) -> Path:
    folder = RunPaths(log_path).checkpoint(version, generation)
    (folder / "model").mkdir(parents=True)
    (folder / "trainer").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    (folder / "model" / "model.safetensors").write_bytes(weights(text))
    (folder / "trainer" / "part-00000.safetensors").write_text("state")
    if complete:
        checkpoints.write_manifest(folder, version)
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with a first policy and versions 1 and 2, of which 2 was tried twice and 1 is what is served."""
    log_path, first = tmp_path / "run", tmp_path / "first"
    first.mkdir()
    (first / "config.json").write_text("{}")
    (first / "model.safetensors").write_bytes(weights("zero"))
    runrecord.publish(runrecord.new(log_path, Settings(), tasks={}, model=str(first)))
    one = checkpoint(log_path, 1, 1, "one")
    checkpoint(log_path, 2, 1, "two, first try")
    checkpoint(log_path, 2, 2, "two")
    checkpoint(log_path, 2, 3, "two, half", complete=False)
    checkpoints.publish_link(log_path, one)
    return log_path


def test_of_two_attempts_at_a_version_the_one_that_is_served_is_exported(run: Path, tmp_path: Path) -> None:
    checkpoints.publish_link(run, RunPaths(run).checkpoint(2, 1))
    export(run, tmp_path / "out", "--policy-version", "2")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == weights("two, first try")


def export(run: Path, to: Path, *words: str, code: int = 0) -> Said:
    return typed("export", to, "--log-path", run, *words, code=code)


@pytest.mark.parametrize(
    ("words", "content", "version"),
    [([], "one", 1), (["--policy-version", "2"], "two", 2), (["--policy-version", "0"], "zero", 0)],
)
def test_the_policy_that_is_asked_for(
    run: Path, tmp_path: Path, words: list[str], content: str, version: int
) -> None:
    to = tmp_path / "deep" / "out"
    told = json.loads(export(run, to, "--json", *words).out)
    assert (to / "model.safetensors").read_bytes() == weights(content)
    assert (told["policy_version"], told["checked"]) == (version, version > 0)
    assert [path.name for path in to.parent.iterdir()] == ["out"]


def test_a_wrong_export_is_refused_and_says_what_there_is(run: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("x")
    assert "name a new folder" in export(run, tmp_path / "full", code=2).err
    said = export(run, tmp_path / "out", "--policy-version", "7", code=2)
    assert "--policy-version 7: not on disk; available: 0, 1, 2" in said.err
    checkpoint(run, 3, 1, "three, half", complete=False)
    said = export(run, tmp_path / "out", "--policy-version", "3", code=2)
    assert "--policy-version 3: not on disk; available: 0, 1, 2 (" in said.err
    said = export(run, tmp_path / "out", "--critic", code=2)
    assert "--critic: policy version 1 was saved without a critic" in said.err
    said = export(run, tmp_path / "out", "--critic", "--policy-version", "0", code=2)
    assert "--critic: the initial policy has none yet" in said.err
    # As the toy program leaves it.
    (checkpoint(run, 4, 1, "") / "model" / "model.safetensors").unlink()
    checkpoints.write_manifest(RunPaths(run).checkpoint(4, 1), 4)
    said = export(run, tmp_path / "out", "--policy-version", "4", code=2)
    assert "this run has no policy to export (program rl)" in said.err
    (RunPaths(run).checkpoint(1, 1) / "model" / "model.safetensors").write_bytes(weights("eno"))
    assert "model.safetensors differs" in export(run, tmp_path / "out", code=4).err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("files", "missing"),
    [
        (["model-00001-of-00002.safetensors", "index"], "model-00002-of-00002.safetensors is missing"),
    ],
)
def test_a_model_that_is_not_whole_is_not_exported(
    run: Path, tmp_path: Path, files: list[str], missing: str
) -> None:
    """What a trainer of the user's own may leave: its manifest lists all that is there."""
    folder = RunPaths(run).checkpoint(3, 3)
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text("{}")
    for name in files:
        if name == "index":
            second = files[0].replace("00001-of", "00002-of")
            listed = json.dumps({"weight_map": {"w": files[0], "other": second}})
            (folder / "model" / "model.safetensors.index.json").write_text(listed)
        else:
            (folder / "model" / name).write_bytes(weights("x"))
    checkpoints.write_manifest(folder, 3)
    assert missing in export(run, tmp_path / "out", "--policy-version", "3", code=4).err
    assert {path.name for path in tmp_path.iterdir()} == {"run", "first"}, "nothing is left of it"


def pushed(run: Path, to: Path, url: str, *words: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: the client reads its environment once."""
    argv = [sys.executable, "-m", "fsbarrier", "export", str(to), "--log-path", str(run), "--push", "me/mine"]
    env = {**os.environ, "HF_ENDPOINT": url, "HF_TOKEN": "hf_test", "HF_HUB_DISABLE_XET": "1"}
    env.pop("HF_HUB_OFFLINE", None)
    return subprocess.run([*argv, *words], env=env, capture_output=True, text=True)


def test_an_export_is_sent_to_a_hub(run: Path, tmp_path: Path) -> None:
    with Hub() as hub:
        done = pushed(run, tmp_path / "out", hub.url, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["pushed"] == f"{hub.url}/me/mine"
    there = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert hub.repositories == {"me/mine": there} and there["model.safetensors"] == weights("one")
    assert hub.made[0]["visibility"] == "private"


def test_a_push_that_is_refused_or_meets_nobody_leaves_the_exported_folder(run: Path, tmp_path: Path) -> None:
    with Hub(refuse=403) as hub:
        refused = pushed(run, tmp_path / "refused", hub.url)
    for done, to in ((refused, "refused"), (pushed(run, tmp_path / "nobody", hub.url), "nobody")):
        assert (
            done.returncode == 4 and "--push me/mine: " in done.stderr and "the folder is in" in done.stderr
        )
        assert (tmp_path / to / "model.safetensors").exists()


@pytest.mark.parametrize("name", [".hidden", "more.txt"])
@pytest.mark.parametrize("version", [0, 1])
def test_no_file_outside_is_copied_through_a_link(tmp_path: Path, name: str, version: int) -> None:
    log_path, outside = tmp_path / "run", tmp_path / "private"
    outside.write_text("a canary")
    first = RunPaths(log_path).first_policy / "model"
    first.mkdir(parents=True)
    (first / "config.json").write_text("{}")
    (first / "model.safetensors").write_bytes(weights("zero"))
    runrecord.publish(runrecord.new(log_path, Settings(), tasks={}, model=str(first)))
    model = checkpoint(log_path, 1, 1, "one") / "model" if version else first
    (model / name).symlink_to(outside)
    export(log_path, tmp_path / "out", "--policy-version", str(version), code=0 if version else 4)
    assert not any((tmp_path / "out").rglob(name))


@pytest.mark.torch
def test_a_new_policy_version_takes_over_what_the_one_before_lists(tmp_path: Path) -> None:
    """Else a link that somebody plants there would have a private file listed, and exported, as part of the next version."""
    from fsbarrier.training.beside_weights import copy_beside

    log_path, outside = tmp_path / "run", tmp_path / "private"
    outside.write_text("a canary")
    folder = checkpoint(log_path, 1, 1, "one", complete=False)
    (folder / "model" / "tokenizer.json").write_text("{}")
    checkpoints.write_manifest(folder, 1)
    (folder / "model" / "more.txt").symlink_to(outside)
    os.link(outside, folder / "model" / "even_more.txt")
    (tmp_path / "new").mkdir()
    assert list(copy_beside(folder / "model", tmp_path / "new", log_path)) == ["tokenizer.json"]
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["tokenizer.json"]
    (folder / "model" / "tokenizer.json").unlink()
    os.link(outside, folder / "model" / "tokenizer.json")
    (tmp_path / "newer").mkdir()
    with pytest.raises(ProgramFailed, match=r"tokenizer\.json differs from what"):
        copy_beside(folder / "model", tmp_path / "newer", log_path)


# --- tables ---------------------------------------------------------------------------------------------------------------------


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
def merged_run(tmp_path: Path) -> Path:
    """A run with a merged first iteration, and of the second what two ranks left: one whole, one cut off in the middle."""
    paths = RunPaths(tmp_path / "run")
    parts = [write(paths.part("train", 1, rank, 1, 1), 1, [rank, rank + 2], rank=rank) for rank in (0, 1)]
    aggregate([Part(part, None) for part in parts], paths.merged("train", 1), metadata={}, expected=None)
    write(paths.rank_checkpoint("train", 2, 0), 2, [4, 5])
    torn = write(paths.part("train", 2, 1, 1, 1), 2, [5, 6, 7], rank=1, finish=False)
    torn.write_bytes(torn.read_bytes()[:-100])
    return paths.root


def export_table(merged_run: Path, out: Path, *words: str, code: int = 0) -> Said:
    return typed("export", out, "--log-path", merged_run, *words, code=code)


def test_json_lines_hold_everything(merged_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out" / "all.jsonl"
    export_table(merged_run, out)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["task_index"] for row in rows] == [task for task in range(7) for _ in range(2)]
    whole = {
        name: value.tolist() if isinstance(value, array) else value for name, value in one(0, 1, 1).items()
    }
    assert rows[1] == whole
    assert out.stat().st_mode & 0o777 == 0o600 and [path.name for path in out.parent.iterdir()] == [
        "all.jsonl"
    ]


def test_parquet_has_typed_columns(merged_run: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    said = export_table(merged_run, tmp_path / "two.parquet", "--iteration", "2", "--json")
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


def test_what_is_wrong_is_one_line_and_leaves_nothing(merged_run: Path, tmp_path: Path) -> None:
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
        assert said in export_table(merged_run, tmp_path / out, *words, code=2).err
    damaged = RunPaths(merged_run).merged("train", 1)
    content = bytearray(damaged.read_bytes())
    content[content.index(b"\x00\x00\x00\xbf")] ^= 1
    damaged.write_bytes(content)
    said = export_table(merged_run, tmp_path / "a.jsonl", "--iteration", "1", code=2)
    assert "merge the valid groups by hand" in said.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "run", "there.jsonl"]


# --- downloads ----------------------------------------------------------------------------------------------------------------


def started(cache: Path, address: str, *more: object) -> subprocess.CompletedProcess[str]:
    """A start with a model and tasks of the hub at `address`; the run ends before it needs an engine."""
    words = ["run", "--data", "hf:me/sums", "--model", "me/tiny", "--program", "rl", "--rl-phase", "rollout"]
    words += ["engine.max_model_len=64", "rollout.max_tokens=8", "--log-path", cache / "run", *more]
    environ = {**os.environ, "HF_HOME": str(cache), "HF_ENDPOINT": address, "HF_TOKEN": "hf_test"}
    command = [sys.executable, "-m", "fsbarrier", *map(str, words)]
    return subprocess.run(command, env=environ, capture_output=True, text=True, cwd=cache)


@pytest.mark.torch
def test_a_model_and_tasks_are_downloaded_only_if_the_user_says_so(tmp_path: Path) -> None:
    task = b'{"prompt": "ab=", "answer": "ab"}\n'
    model = {path.name: path.read_bytes() for path in (demo_tasks.FOLDER / "model").iterdir()}
    with Hub() as hub:
        hub.repositories = {
            "me/tiny": {**model, "pytorch_model.bin": b"not needed"},
            "datasets/me/sums": {"train.jsonl": task * 2, "test.jsonl": task, "README.md": b"not needed"},
        }
        refused = started(tmp_path, hub.url)
        assert refused.returncode == 2 and len(refused.stderr.splitlines()) == 1
        assert "--data-path hf:me/sums: not in the local Hugging Face cache" in refused.stderr
        assert "--download fetches it" in refused.stderr
        dry = started(tmp_path, hub.url, "--download", "--dry-run")
        assert dry.returncode == 2 and "except in a dry run" in dry.stderr
        # No engine can be reached, so the run is refused after all has been fetched.
        fetched = started(tmp_path, hub.url, "--download", "--expect-gpus", "99")
        assert fetched.returncode == 2 and "--expect-gpus 99" in fetched.stderr, fetched.stderr
        assert fetched.stderr.count("downloading it from the Hugging Face Hub") == 2
    names = {path.name for path in tmp_path.glob("hub/*/snapshots/*/*")}
    assert {"train.jsonl", "config.json", "model.safetensors"} <= names
    assert not names & {"pytorch_model.bin", "README.md"}
    # From now on the cache has them: no flag and no network.
    shown = started(tmp_path, "http://127.0.0.1:1", "--dry-run")
    assert shown.returncode == 0 and "snapshots" in shown.stdout, shown.stderr
    (tmp_path / "none").mkdir()
    nobody = started(tmp_path / "none", "http://127.0.0.1:1", "--download")
    assert nobody.returncode == 2
    assert "--data-path hf:me/sums: cannot be downloaded: " in nobody.stderr.splitlines()[-1]
    assert "Traceback" not in nobody.stderr
