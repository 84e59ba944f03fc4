"""No bytes in a file that nodes share make a reader crash, hang or take them for what they are not: arbitrary bytes, and real
files with a few bytes changed.

`FUZZ_EXAMPLES=5000 pytest tests/test_fuzz.py` tries more than the everyday hundred or so for each.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from commands import typed
from fake_run import long_run
from group_members import REPO
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trajectory_files import group, write_part

from fsbarrier import aggregate
from fsbarrier.coordination.observer import Observer
from fsbarrier.data.tasks import read_tasks
from fsbarrier.errors import EXIT_INTERNAL, ProgramFailed, StoreError, UsageError
from fsbarrier.processes import worker_contract
from fsbarrier.program import PHASE_NAMES, Phase, Program
from fsbarrier.protocol import codec, facts
from fsbarrier.protocol.codec import CorruptRecord
from fsbarrier.protocol.facts import Fact, Position
from fsbarrier.protocol.state import Node, RowPart, Stage
from fsbarrier.rundir import checkpoints, journal, runrecord
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.record_store import PosixStore
from fsbarrier.settings import sources as given_settings
from fsbarrier.settings.sections import Settings
from fsbarrier.trajectories import FormatError, RankFileWriter, scan_rank_file

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "120"))
fuzz = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize="FUZZ_EXAMPLES" not in os.environ,
    suppress_health_check=list(HealthCheck),
    database=None,
)

#: what readers trip over: nesting, numbers that are none or too many digits, lone surrogates, wrong types everywhere
NASTY = (
    b"",
    b"\n",
    b"\xff" * 40,
    b"[" * 5_000,
    b'{"a":' * 5_000,
    b"[" * 450 + b"]" * 450,
    b'{"a":' * 450 + b"1" + b"}" * 450,
    b"9" * 5000,
    b"1e999",
    b"NaN",
    b'"\\ud800"',
    b'{"event": 5}',
    b"null",
    b"[]",
    b"{}",
)


def mutations(valid: bytes) -> st.SearchStrategy[bytes]:
    """`valid` with a few places changed, cut out, repeated or cut off."""
    place = st.integers(0, max(0, len(valid) - 1))
    edit = st.tuples(
        st.sampled_from(("flip", "cut", "repeat", "insert", "end")),
        place,
        st.integers(1, 40),
        st.binary(max_size=9),
    )

    def apply(edits: list[tuple[str, int, int, bytes]]) -> bytes:
        data = bytearray(valid)
        for kind, at, count, new in edits:
            if kind == "flip" and at < len(data):
                data[at] ^= count
            elif kind == "cut":
                del data[at : at + count]
            elif kind == "repeat":
                data[at:at] = data[at : at + count]
            elif kind == "insert":
                data[at:at] = new
            elif kind == "end":
                del data[at:]
        return bytes(data)

    return st.lists(edit, min_size=1, max_size=3).map(apply)


def bytes_like(*valid: bytes) -> st.SearchStrategy[bytes]:
    return st.one_of(st.binary(max_size=300), st.sampled_from(NASTY), *map(mutations, valid))


plain_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def damaged_json(value: Any) -> st.SearchStrategy[Any]:
    """`value` with one of its parts, at any depth, replaced by something else or left out."""
    places: list[tuple[Any, ...]] = []

    def walk(part: Any, path: tuple[Any, ...]) -> None:
        places.append(path)
        items = part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ()
        for key, inner in items:
            walk(inner, (*path, key))

    walk(value, ())

    def replace(choice: tuple[tuple[Any, ...], Any, bool]) -> Any:
        path, new, leave_out = choice
        if not path:
            return new
        whole = json.loads(json.dumps(value))
        inner = whole
        for key in path[:-1]:
            inner = inner[key]
        if leave_out:
            del inner[path[-1]]
        else:
            inner[path[-1]] = new
        return whole

    return st.tuples(st.sampled_from(places), plain_json, st.booleans()).map(replace)


# --- records ------------------------------------------------------------------------------------------------------------------

RECORDS: tuple[facts.Record, ...] = (
    facts.Join(1, 2, "host", 77, "boot", ("10.0.0.1",), 5, "0.1", "d", "t", {"rl_phase": "both"}),
    facts.Beat(1, 2, 3, "host", 77, "running", 1, 2, 3, "train_aggregate", {"done": 3}),
    facts.Generation(
        3,
        (facts.Member(0, 1, "a"), facts.Member(2, 1, "b")),
        0,
        Position(4, 1),
        "a node was lost",
        {"train_assign": {"iteration": 3, "value": {"shares": {"0": [1]}}}},
        verdict=facts.Verdict(4, "given up"),
    ),
    Fact(1, 2, "done", {"tasks": [1, 2]}, 0.5),
    facts.StopRequest(True, "me", "now"),
)


def encoded_body(record: facts.Record, body: Any) -> bytes:
    """A record's file with another body, whose length and digest are right."""
    kind = codec.encode(record).split(b" ")[1].decode()
    text = json.dumps(body).encode() + b"\n"
    return f"fsbarrier/2 {kind} {len(text)} {hashlib.sha256(text).hexdigest()[:32]}\n".encode() + text


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_damaged_records_are_refused_or_used_safely(record: facts.Record) -> None:
    whole = codec.encode(record)

    @fuzz
    @given(bytes_like(whole))
    def bytes_are_the_record_or_none(data: bytes) -> None:
        try:
            assert codec.decode(data, type(record)) == record  # type: ignore[type-var]
        except CorruptRecord:
            pass

    @fuzz
    @given(damaged_json(json.loads(whole.partition(b"\n")[2])))
    def a_body_with_a_right_digest_is_used_safely(body: Any) -> None:
        data = encoded_body(record, body)
        try:
            found = codec.decode(data, type(record))  # type: ignore[type-var]
        except CorruptRecord:
            return
        assert codec.decode(codec.encode(found), type(record)) == found or body != body

    bytes_are_the_record_or_none()
    a_body_with_a_right_digest_is_used_safely()


FOLDERS = ("joins", "status", "generations", "stops")
NAMES = {
    "joins": "node-0001.inc-0002.json",
    "status": "node-0001.inc-0002.json",
    "generations": "gen-000003.json",
    "stops": "000001.json",
}
PING = Program("ping", tuple(Phase(index, name) for index, name in enumerate(PHASE_NAMES)))


@fuzz
@given(
    st.fixed_dictionaries({folder: bytes_like(*map(codec.encode, RECORDS)) for folder in FOLDERS}),
    bytes_like(codec.encode(RECORDS[3])),
)
def test_a_node_looks_at_anything(
    tmp_path_factory: pytest.TempPathFactory, found: dict[str, bytes], fact: bytes
) -> None:
    paths, store = RunPaths(tmp_path_factory.mktemp("run")), PosixStore()
    observer = Observer(store, paths, PING)
    observer.prepare()
    for folder, data in found.items():
        (paths.coordination / folder / NAMES[folder]).write_bytes(data)
    generation = facts.Generation(1, (facts.Member(0, 1), facts.Member(1, 1)), 0, Position(1, 0), "start")
    row = observer.row.row_dir(1, Position(1, 0))
    store.make_dir(row)
    for name in ("iter-000001.node-0000.done", "iter-000001.node-0001.failed"):
        (row / name).write_bytes(fact)
    node = Node(0, 1, 0.0, "", Stage.RUNNING, 0, True, generation, Position(1, 0), RowPart.ANNOUNCED)
    for now in (0.0, 1.0, 20.0):
        with suppress(OSError):  # a record that it needs cannot be read
            view = observer.view(node, now)
            assert view.newest is None or view.newest.number == 3
            assert all(isinstance(one, Fact) for one in view.failed.values())


RECORD = runrecord.RunRecord("id", "2026", "me@here", "0.1", Settings(), "d", {"train": {"path": "p"}}, "m")


@fuzz
@given(bytes_like(runrecord.encode(RECORD)))
def test_a_damaged_run_s_record_is_refused(data: bytes) -> None:
    try:
        assert runrecord.decode(data, Path()) == RECORD
    except (ValueError, UsageError):
        pass


QUICK = {"coordination.beat_s": 0.02, "coordination.dead_s": 0.2}

# --- journals and what programs leave -----------------------------------------------------------------------------------------

LINE = (
    b'{"time":"2026-01-01T00:00:00+00:00","mono_s":1.5,"run_id":"r","node_rank":1,"generation":1,"iteration":1,'
    b'"phase":2,"phase_name":"train_rollout","event":"phase_started"}\n'
)


@fuzz
@given(bytes_like(LINE * 2))
def test_a_damaged_journal_gives_whole_events_or_none(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.mktemp("journal") / "node_1.inc-0001.jsonl"
    path.write_bytes(data)
    for event in journal.JournalReader(path).read():
        assert event.phase >= 0 and isinstance(event.name, str)


@fuzz
@given(bytes_like(b'{"done": 3, "total": 8}'))
def test_progress_and_results_of_programs(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("work") / "result.json"
    path.write_bytes(data)
    for read in (worker_contract.read_progress, lambda p: worker_contract.read_result(p, "the program")):
        try:
            value = read(path)
        except ProgramFailed:
            continue
        if value is not None:
            again = codec.decode(codec.encode(Fact(0, 1, "done", value)), Fact).value
            assert json.dumps(again) == json.dumps(value)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    (folder / "model").mkdir()
    (folder / "model" / "weights").write_bytes(b"abc")
    checkpoints.write_manifest(folder, 3)
    return folder


def test_a_damaged_manifest_is_refused_or_says_what_lies_there(policy: Path) -> None:
    path = policy / checkpoints.MANIFEST
    whole = path.read_bytes()

    @fuzz
    @given(bytes_like(whole) | damaged_json(json.loads(whole)).map(lambda value: json.dumps(value).encode()))
    def read(data: bytes) -> None:
        path.write_bytes(data)
        try:
            manifest = checkpoints.verify(policy)
        except ProgramFailed:
            return
        assert manifest.files["model/weights"].size == 3  # what is verified is what lies there

    read()


@settings(fuzz, max_examples=max(1, EXAMPLES // 20))
@given(st.data())
def test_commands_that_look_at_a_run(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, data: st.DataObject
) -> None:
    # Where the run's record cannot be read, `status` would watch for beats of the default length.
    monkeypatch.setattr("fsbarrier.view.run_status.WATCHED_BEATS", 0.01)
    folder = tmp_path_factory.mktemp("run")
    long_run(folder, iterations=2, extra=QUICK)
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in data.draw(st.lists(st.sampled_from(found), min_size=1, max_size=3)):
        path.write_bytes(data.draw(bytes_like(path.read_bytes())))
    recover = ["recover", "--iteration", "1", "--dry-run"]
    for words in (["status", "--json"], ["report", "--out", folder / "page.html"], ["logs"], recover):
        assert (said := typed(*words, "--log-path", folder, code=None)).code != EXIT_INTERNAL, said


# --- settings and tasks -------------------------------------------------------------------------------------------------------


@fuzz
@given(bytes_like(b"iterations = 3\n[rollout]\ntemperature = 0.5\n[custom]\na = [1, {b = 2}]\n"))
def test_a_damaged_settings_file_is_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.mktemp("settings") / "settings.toml"
    path.write_bytes(data)
    try:
        given_settings.from_file(path)
    except UsageError as error:
        assert "\n" not in str(error)


TASK = (
    b'{"prompt": [{"role": "user", "content": "2 + 2?"}], "answer": 4, "task_id": "t", "more": {"a": [1]}}\n'
)


@fuzz
@given(bytes_like(TASK) | damaged_json(json.loads(TASK)).map(lambda value: json.dumps(value).encode()))
def test_a_damaged_task_file_is_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.mktemp("tasks") / "train.jsonl"
    path.write_bytes(data)
    try:
        found = read_tasks(path)
    except UsageError as error:
        assert "\n" not in str(error) and str(path) in str(error)
        return
    for task in found.tasks.values():
        json.dumps(asdict(task)).encode()  # as trajectories and requests carry it
        assert task.task_id and task.messages


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ('"answer": ' + '{"a":' * 450 + "1" + "}" * 450, "nested too deeply"),
        ('"answer": ' + "9" * 5000, "is not JSON"),
        ('"answer": 1, "task_id": "\\ud800"', "surrogate"),
        ('"answer": 1, "prompt": "\\udfff"', "surrogate"),
        ('"prompt": [{"role": "user", "content": "a", "\\u009b[2J": 1}]', "has the field .*2J"),
    ],
)
def test_a_task_that_no_run_could_carry(tmp_path: Path, field: str, words: str) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(f'{{"prompt": "p", {field}}}\n')
    with pytest.raises(UsageError, match=words) as caught:
        read_tasks(path)
    assert str(caught.value).startswith(f"{path}, line 1") and str(caught.value).isprintable()


# --- trajectory files ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A growing file, a finished one and a merged one."""
    folder = tmp_path_factory.mktemp("shards") / "train_trajectories"
    growing = write_part(folder / "a.part", [0, 1], tokens=4)
    finished = write_part(
        folder / "train_trajectories.pt.iteration5_rank_0.checkpoint", [0, 1], finished=True, tokens=4
    )
    merged = folder / "train_trajectories.pt.iteration5"
    aggregate.aggregate([aggregate.Part(finished)], merged, metadata={}, expected={0, 1})
    return {"growing": growing.read_bytes(), "finished": finished.read_bytes(), "merged": merged.read_bytes()}


@fuzz
@given(st.data())
def test_a_writer_that_goes_on_never_writes_behind_damage(
    shards: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("shard") / "a.part"
    path.write_bytes(data.draw(bytes_like(shards["growing"])))
    header = {"run_id": "run-1", "node_rank": 0, "generation": 1, "iteration": 5, "split": "train"}
    header |= {"policy_version": 3, "expected": [0, 1]}
    try:
        with RankFileWriter(path, header=header) as writer:
            there = {entry.task_index for entry in writer.groups}
            assert there <= {0, 1}
            for task in {0, 1} - there:
                writer.append_group(task, group(task, tokens=4))
    except (UsageError, StoreError, FormatError):
        return
    assert {entry.task_index for entry in scan_rank_file(path).groups} == {0, 1}


HOSTILE = """
import resource, struct, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
sys.path.insert(0, {repo!r})
from fsbarrier.errors import FsbarrierError
from fsbarrier.trajectories import FormatError, iter_trajectories, load, scan_rank_file
for path in sorted(Path({folder!r}).iterdir()):
    for reader in (scan_rank_file, load, lambda p: list(iter_trajectories(p))):
        try:
            reader(path)
        except (FormatError, FsbarrierError):
            pass
print("alive")
"""


def test_sizes_that_lie_take_no_memory_and_nothing_is_run(shards: dict[str, bytes], tmp_path: Path) -> None:
    folder, marker = tmp_path / "hostile", tmp_path / "run"
    folder.mkdir()
    number = 0
    for data in shards.values():
        for at in range(14, min(len(data) - 8, 400), 4):
            for lie in (b"\xff" * 4, b"\xff" * 8, b"\x00\x00\x00\x7f"):
                number += 1
                (folder / f"{number:05d}").write_bytes(data[:at] + lie + data[at + len(lie) :])
    evil = b"\x80\x02cposix\nsystem\n(X" + len(f"touch {marker}").to_bytes(4, "little")
    evil += f"touch {marker}".encode() + b"tR."
    with zipfile.ZipFile(folder / "evil", "w") as archive:
        archive.writestr("archive/data.pkl", evil)
    code = HOSTILE.format(repo=str(REPO), folder=str(folder))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "alive"), done.stderr[-2000:]
    assert not marker.exists()
