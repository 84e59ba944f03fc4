"""run.json: made once, recognised when torn or foreign, what later starts may say beside it, and runs that begin with another's policy."""

from __future__ import annotations

import json
import os
import shutil
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
from commands import typed
from test_export import checkpoint

from fsbarrier.cli.start import begin as beginning
from fsbarrier.cli.start.begin import Request, Start
from fsbarrier.cli.start.begin import begin as begin_node
from fsbarrier.errors import UsageError
from fsbarrier.rundir import checkpoints, runrecord
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.runrecord import RunRecord
from fsbarrier.settings.resolve import resolve
from fsbarrier.settings.sections import Settings, known_names
from fsbarrier.settings.sources import from_words
from fsbarrier.store import files
from fsbarrier.store.files import sha256_file

KNOWN = known_names()


def make(log_path: Path, *words: str, **more: Any) -> RunRecord:
    settings = resolve(from_words(["program=ping", *words], KNOWN))
    fields: dict[str, Any] = {"tasks": {}, "model": None, **more}
    return runrecord.new(log_path, settings, **fields)


def begin(log_path: Path, *words: str, **more: Any) -> Start:
    chosen = from_words([f"log_path={log_path}", *words], KNOWN)
    return begin_node(Request(chosen=tuple(chosen), **{"environ": {}, **more}))


def test_what_was_published_is_what_is_loaded(tmp_path: Path) -> None:
    record = runrecord.publish(make(tmp_path / "a" / "run", "num_nodes=3"))
    assert runrecord.load(tmp_path / "a" / "run") == record
    assert record.settings.num_nodes == 3
    assert record.run_id in (tmp_path / "a" / "run" / "run.json").read_text()
    assert (tmp_path / "a" / "run").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "a" / "run" / "run.json").stat().st_mode & 0o777 == 0o600


def test_the_first_record_counts(tmp_path: Path) -> None:
    first = runrecord.publish(make(tmp_path))
    assert runrecord.publish(make(tmp_path)).run_id == first.run_id


def test_every_prefix_is_recognised_as_torn(tmp_path: Path) -> None:
    whole = runrecord.encode(make(tmp_path))
    for length in range(len(whole) - 1):
        with pytest.raises(ValueError, match=r"torn|record"):
            runrecord.decode(whole[:length], tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 99}, "its nodes write record format 99, as fsbarrier 0.1.0 does"),
        ({"format": "1"}, "no format"),
        ({"model": "/other"}, "torn or edited"),
        ({"settings": []}, "torn or edited"),
    ],
)
def test_an_edited_or_newer_record_is_one_line(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    runrecord.publish(make(tmp_path))
    path = RunPaths(tmp_path).record
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(UsageError) as caught:
        runrecord.load(tmp_path)
    assert message in str(caught.value)
    assert "run.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_cannot_be_written_leaves_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        runrecord.publish(make(tmp_path / "file" / "run"))
    long = "x" * 254  # the directory can be made, a temporary name in it can too, but not this as a file's
    with pytest.raises(UsageError, match="cannot be written"):
        runrecord.publish(make(tmp_path / "new" / long / ("y" * 300)))
    assert os.listdir(tmp_path) == ["file"]


# --- waiting ------------------------------------------------------------------------------------------------------------


def test_a_worker_waits_for_node_0_and_says_so(tmp_path: Path) -> None:
    log_path, said = tmp_path / "later" / "run", threading.Event()
    lines: list[str] = []

    def on_wait(line: str) -> None:
        lines.append(line)
        said.set()

    def node_0() -> None:
        said.wait(60)
        runrecord.publish(make(log_path))

    thread = threading.Thread(target=node_0)
    thread.start()
    record = runrecord.wait(log_path, 60.0, on_wait=on_wait)
    thread.join()
    assert record == runrecord.load(log_path)
    assert len(lines) == 1
    assert "node 0 (--master)" in lines[0]


# --- agreeing -----------------------------------------------------------------------------------------------------------


def test_a_start_of_node_0_makes_the_run_and_the_next_one_finds_it(tmp_path: Path) -> None:
    first = begin(tmp_path / "run", "program=ping", "num_nodes=2", "iterations=3", master=True)
    assert (first.created, first.node_rank, first.until) == (True, 0, 3)
    again = begin(tmp_path / "run", "program=ping", "num_nodes=2", master=True)
    assert (again.created, again.until, again.record) == (False, 3, first.record)
    assert begin(tmp_path / "run", "iterations=7", master=True).until == 7
    worker = begin(tmp_path / "run", worker=1)
    assert (worker.node_rank, worker.record) == (1, first.record)


def test_each_start_chooses_its_phases(tmp_path: Path) -> None:
    """What the first one chose does not stick."""
    words = ("program=toy", "rl_phase=rollout", "rollout_split=train-only")
    for chosen, expected in (
        (words, ("rollout", "train-only")),
        (("rl_phase=both",), ("both", None)),
        (("rl_phase=rollout",), ("rollout", None)),
        (("rollout_split=eval-only",), ("rollout", "eval-only")),
    ):
        settings = begin(tmp_path / "run", *chosen, master=True).settings
        assert (settings.rl_phase, settings.rollout_split) == expected


@pytest.mark.parametrize(
    ("words", "who", "message"),
    [
        (["program=toy"], {"master": True}, "program=toy contradicts this run's record (ping, "),
        (["debug_mode=true"], {"worker": 2}, "debug_mode=true contradicts this run's record (false, "),
        (
            ["rollout_split=none", "custom.x=1"],
            {"worker": 2},
            "custom.x=1 contradicts this run's record (none, ",
        ),
        ([], {}, "the rank of this node is unknown, and the run has 3 nodes"),
        ([], {"environ": {"RANK": "1", "WORLD_SIZE": "24"}}, "RANK=1 counts processes here, not nodes"),
    ],
)
def test_a_contradiction_shows_both_values(
    tmp_path: Path, words: list[str], who: dict[str, Any], message: str
) -> None:
    record = begin(tmp_path, "program=ping", "num_nodes=3", master=True).record
    with pytest.raises(UsageError) as caught:
        begin(tmp_path, *words, **who)
    assert message in str(caught.value)
    if "contradicts" in message:
        assert record.created_by in str(caught.value)
        assert "use another --log-path" in str(caught.value)


def test_the_same_values_again_are_no_contradiction(tmp_path: Path) -> None:
    words = (
        "program=ping",
        "num_nodes=3",
        "rank_weights=1,1,1",
        "optimizer.lr=1",
        "custom.x=[1]",
        "model=none",
    )
    first = begin(tmp_path, *words, master=True)
    assert begin(tmp_path, *words, worker=2).record == first.record


def test_resume_refuses_a_fresh_directory(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="contains no run"):
        begin(tmp_path / "run", "program=ping", master=True, resume=True)
    assert not (tmp_path / "run").exists()
    begin(tmp_path / "run", "program=ping", master=True)
    assert not begin(tmp_path / "run", master=True, resume=True).created


def test_a_task_file_that_changed_is_named(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text("{}\n")
    source = {"path": str(path), "count": 1, "sha256": sha256_file(path)}
    runrecord.publish(make(tmp_path / "run", "program=toy", tasks={"train": source}))
    assert not begin(tmp_path / "run", master=True).created
    path.write_text("{ }\n")
    with pytest.raises(UsageError, match="not the train tasks that this run began with"):
        begin(tmp_path / "run", master=True)
    path.unlink()
    with pytest.raises(UsageError, match="this run's train tasks cannot be read"):
        begin(tmp_path / "run", master=True)


@pytest.mark.parametrize(
    ("words", "written"),
    [
        (["stop"], "coordination/stops/000001.json"),
        (["report", "--no-samples"], "report.html"),
        (["recover", "--iteration", "1"], "quarantine"),
    ],
)
def test_what_a_command_writes_into_a_shared_run_is_open_to_the_group(
    tmp_path: Path, words: list[str], written: str
) -> None:
    """Its nodes may be another member's."""
    files.set_shared_group(True)
    paths = runrecord.publish(make(tmp_path / "run", "shared_group=true")).paths
    files.make_dirs(paths.trajectories("train"))
    paths.rank_checkpoint("train", 1, 0).write_bytes(b"of nobody")
    # The command is a process of its own.
    files.set_shared_group(False)
    typed(words[0], "--log-path", tmp_path / "run", *words[1:])
    files.set_shared_group(False)
    assert stat.S_IMODE((tmp_path / "run" / written).stat().st_mode) in (0o660, 0o770)


# --- init_from ------------------------------------------------------------------------------------------------------------------


def start(log_path: Path, *words: str, **more: Any) -> Start:
    chosen = from_words([f"log_path={log_path}", *words], known_names())
    return beginning.begin(Request(**{"chosen": tuple(chosen), "environ": {}, "master": True, **more}))


@pytest.fixture
def data(tmp_path: Path) -> str:
    folder = tmp_path / "data"
    folder.mkdir()
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text(json.dumps({"prompt": "1+1", "answer": "2"}) + "\n")
    return f"data_path={folder}"


@pytest.fixture
def first(tmp_path: Path) -> Path:
    """A run with the policy versions 1 and 2, of which it serves 2."""
    log_path = tmp_path / "first"
    runrecord.publish(runrecord.new(log_path, Settings(), tasks={}, model=None))
    for version in (1, 2):
        folder = checkpoint(log_path, version, 1, f"weights {version}", complete=False)
        (folder / "model" / "tokenizer.json").write_text("{}")
        (folder / "model" / "config.json").write_text('{"model_type": "llama"}')
        checkpoints.write_manifest(folder, version)
    checkpoints.publish_link(log_path, folder)
    return log_path


@pytest.mark.parametrize(("named", "version"), [("@1", 1), ("@2", 2), ("", 2)])
def test_a_run_begins_with_its_own_copy_of_anothers_policy(
    tmp_path: Path, first: Path, data: str, named: str, version: int
) -> None:
    wanted = first / "checkpoints" / f"policy-{version:06d}.g0001" / "model"
    expected = {path.name: path.read_bytes() for path in wanted.iterdir()}
    words = (data, f"init_from={first}{named}")
    made = start(tmp_path / "run", *words)
    own = Path(str(made.record.model))
    assert own == tmp_path / "run" / "first_policy" / "model" == Path(str(made.settings.model))
    shutil.rmtree(first)
    assert {path.name: path.read_bytes() for path in own.iterdir()} == expected
    # The same command goes on, without the other run.
    assert start(tmp_path / "run", *words).record == made.record


def test_nothing_begins_with_a_damaged_policy(tmp_path: Path, first: Path, data: str) -> None:
    weights = first / "checkpoints" / "policy-000001.g0001" / "model" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(UsageError, match="differs from what MANIFEST"):
        start(tmp_path / "run", data, f"init_from={first}@1")
    assert not runrecord.exists(tmp_path / "run")
    assert start(tmp_path / "run", data, f"init_from={first}@2").created


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["init_from=FIRST@9"], "init_from=FIRST@9: policy version 9: not on disk; available: 0, 1, 2"),
        (["init_from=FIRST@two"], "'two' is not a policy version; write RUN_DIRECTORY@VERSION"),
        (["init_from=FIRST/nowhere@1"], "no run there (no such directory)"),
        (
            ["init_from=FIRST@1", "model=m"],
            "contradicts --model, which also sets the initial policy; drop one of the two",
        ),
        (["init_from=FIRST@1", "program=ping"], "program ping has no model; drop it"),
    ],
)
def test_a_mistake_is_one_line(
    tmp_path: Path, first: Path, data: str, words: list[str], message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        start(tmp_path / "run", data, *(word.replace("FIRST", str(first)) for word in words))
    assert message.replace("FIRST", str(first)) in str(caught.value)
    assert not (tmp_path / "run").exists()
