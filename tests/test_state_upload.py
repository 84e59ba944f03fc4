"""A node brings its part of a trainer state behind the rollouts: whole files or none, at whatever moment it is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from operations import recording

from fsbarrier import files
from fsbarrier.node import work_kinds
from fsbarrier.node.job import Cancelled, RowJob, Workplace
from fsbarrier.node.state_upload import StateUpload
from fsbarrier.program import Context, ReleaseEngine, ServeWeights
from fsbarrier.rundir import checkpoints
from fsbarrier.rundir.hashed_file import digest_of
from fsbarrier.settings.sections import CheckpointSettings, Settings

VERSION, BEFORE = "policy-000006.g0004", "policy-000003.g0001"
PARTS = {"trainer/part-00000.safetensors": b"a" * 3000, "trainer/part-00001.safetensors": b"b" * 2000}


class Run:
    """A committed version whose trainer state the nodes are to bring: by default this one has all of it."""

    def __init__(self, folder: Path, mine: list[str] | None = None) -> None:
        self.version = folder / "run" / "checkpoints" / VERSION
        self.kept = checkpoints.kept_on_node(str(folder / "local"), "run", 0) / VERSION
        for place, content in (
            (self.kept, PARTS),
            (self.version, {"model/config.json": b"{}", "trainer/layout.json": b"{}"}),
        ):
            for name, data in content.items():
                (place / name).parent.mkdir(parents=True, exist_ok=True)
                (place / name).write_bytes(data)
        following = {name: digest_of(self.kept / name) for name in PARTS}
        whole = checkpoints.write_manifest(self.version, 6)
        checkpoints.commit(self.version, checkpoints.Manifest(6, whole.files, BEFORE, following))
        for name in PARTS.keys() - set(mine if mine is not None else PARTS):
            (self.kept / name).unlink()

    def brought(self) -> dict[str, bytes]:
        return {
            f"trainer/{path.name}": path.read_bytes()
            for path in (self.version / "trainer").iterdir()
            if path.name != "layout.json"
        }


@pytest.fixture
def here(tmp_path: Path) -> Run:
    return Run(tmp_path)


def done(upload: StateUpload) -> dict[str, Any]:
    (line,) = upload.wait(RowJob())
    return line


def test_the_version_has_its_state_when_all_of_it_is_there(here: Run) -> None:
    manifest = checkpoints.read_manifest(here.version)
    assert (manifest.state_in, set(manifest.following)) == (BEFORE, set(PARTS))
    assert checkpoints.newest_state(here.version) == BEFORE
    upload = StateUpload()
    upload.begin(here.version, here.kept)
    line = done(upload)
    assert (line["event"], line["serving"], line["error"]) == ("trainer_state_saved", VERSION, "")
    assert here.brought() == PARTS and checkpoints.newest_state(here.version) == VERSION
    assert upload.wait(RowJob()) == []


def test_each_file_is_flushed_before_its_name_and_the_names_are_flushed(here: Run) -> None:
    upload = StateUpload()
    with recording(here.version) as seen:
        upload.begin(here.version, here.kept)
        done(upload)
    for name in PARTS:
        named = seen.one("rename", name)
        assert seen.flushed_before(name, named), seen.done
        assert any(at > named and seen.done[at].path == "trainer" for at in seen.all("flush-dir")), seen.done


def test_each_node_brings_its_own_and_the_last_one_completes_it(tmp_path: Path) -> None:
    # The file that another node owes comes first in the list.
    second, first = PARTS
    run = Run(tmp_path, [first])
    upload = StateUpload()
    upload.begin(run.version, run.kept)
    done(upload)
    assert set(run.brought()) == {first} and checkpoints.newest_state(run.version) == BEFORE
    # What is there is not brought again, by whichever start of the node.
    (run.kept / first).write_bytes(b"another's")
    (run.kept / second).write_bytes(PARTS[second])
    again = StateUpload()
    again.begin(run.version, run.kept)
    assert done(again)["error"] == "" and run.brought() == PARTS


def test_what_is_not_what_the_trainer_wrote_is_not_brought(here: Run) -> None:
    name = next(iter(PARTS))
    (here.kept / name).write_bytes(b"a" * 2999 + b"x")
    upload = StateUpload()
    upload.begin(here.version, here.kept)
    assert "is not what the trainer wrote" in done(upload)["error"]
    assert name not in here.brought() and checkpoints.newest_state(here.version) == BEFORE


def test_serving_begins_it_and_the_trainer_waits_for_it(
    here: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_read, reads = threading.Event(), []
    real = files.temporary_beside

    def held(path: Path) -> Path:
        reads.append(path.name)
        may_read.wait()
        return real(path)

    monkeypatch.setattr(files, "temporary_beside", held)
    info = SimpleNamespace(url="u", api_key="k", model="m", action="reloaded", seconds=1.0, note="")
    engines = SimpleNamespace(ensure=lambda *_, **__: [info], release=lambda **_: {"action": "keep"})
    place = Workplace(
        engines=cast(Any, engines),
        work_dir=tmp_path,
        log_dir=tmp_path,
        log_path=tmp_path,
        stall_timeout_s=60.0,
    )
    settings = Settings(checkpoint=CheckpointSettings(local_dir=str(tmp_path / "local")))
    context = cast(Context, SimpleNamespace(settings=settings, run_id="run", node_rank=0))
    for _ in range(2):
        work_kinds.carry_out(ServeWeights(here.version / "model", 6), context, RowJob(), place)
    # Called off while it waits, it goes on; the next job waits for the same.
    job = RowJob()
    job.cancel.set()
    with pytest.raises(Cancelled):
        place.state_upload.wait(job)
    assert here.brought() == {}
    may_read.set()
    told = work_kinds.carry_out(ReleaseEngine(), context, RowJob(), place)
    assert told["action"] == "keep" and [line["event"] for line in told["events"]] == ["trainer_state_saved"]
    assert here.brought() == PARTS and len(reads) == 2


def test_the_end_of_the_daemon_leaves_nothing_half_brought(
    here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "READ_BYTES", 1)
    upload = StateUpload()
    real = files.temporary_beside

    def stopping(path: Path) -> Path:
        upload._stopping.set()
        return real(path)

    monkeypatch.setattr(files, "temporary_beside", stopping)
    upload.begin(here.version, here.kept)
    assert done(upload)["error"] and here.brought() == {}


KILLED = """
import os, signal, sys
from pathlib import Path
from fsbarrier import files
from fsbarrier.node.job import RowJob
from fsbarrier.node.state_upload import StateUpload
version, kept, dies_at = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
files.READ_BYTES, made = 1000, 0
for name in ("open", "write", "fsync", "replace"):
    def call(*args, _real=getattr(os, name), **kwargs):
        global made
        if made == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        made += 1
        return _real(*args, **kwargs)
    setattr(os, name, call)
upload = StateUpload()
upload.begin(version, kept)
upload.wait(RowJob())
os.write(1, str(made).encode())
"""


def test_killed_at_any_moment_it_leaves_whole_files_and_the_next_start_goes_on(tmp_path: Path) -> None:
    def bring(run: Run, dies_at: int) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-c", KILLED, str(run.version), str(run.kept), str(dies_at)]
        return subprocess.run(argv, capture_output=True, text=True, env={**os.environ}, check=False)

    calls = int(bring(Run(tmp_path / "all"), -1).stdout)
    assert calls >= 10
    for dies_at in range(0, calls, 3):
        run = Run(tmp_path / str(dies_at))
        assert bring(run, dies_at).returncode == -signal.SIGKILL
        there = {name: data for name, data in run.brought().items() if not name.endswith(".tmp")}
        assert there.items() <= PARTS.items()
        assert checkpoints.newest_state(run.version) == (VERSION if there == PARTS else BEFORE)
        bring(run, -1)
        assert run.brought() == PARTS and checkpoints.newest_state(run.version) == VERSION
