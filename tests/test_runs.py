"""`fsbarrier runs` over hand-written runs, whole and damaged ones."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import typed
from fake_run import FakeRun, long_run
from test_status import beating

QUICK = {"coordination.beat_s": 0.05}


def test_each_run_is_one_line_the_newest_first(tmp_path: Path) -> None:
    long_run(tmp_path / "done", 3, lose_at=None, extra=QUICK)
    begun = FakeRun(tmp_path / "begun", nodes=2, extra=QUICK)
    begun.start(0, 1)
    begun.beat(0, 5)
    (tmp_path / "no run").mkdir()
    edited = FakeRun(tmp_path / "edited", nodes=2).paths.record
    edited.write_text(edited.read_text().replace('"num_nodes": 2', '"num_nodes": 4'))
    # Whole, but a word in it is no text.
    (tmp_path / "no text").mkdir()
    body = json.loads((tmp_path / "begun" / "run.json").read_text())
    body["settings"]["num_nodes"] = "\ud800"
    del body["digest"]
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    body["digest"] = hashlib.sha256(canonical.encode()).hexdigest()
    (tmp_path / "no text" / "run.json").write_text(json.dumps(body))
    os.symlink("/nowhere", tmp_path / "gone")
    for beat in (tmp_path / "done").rglob("node-*.json"):
        os.utime(beat, (1.0, 1.0))
    captured = typed("runs", tmp_path, "--json")
    assert "fsbarrier: skipped edited: " in captured.err and captured.err.count("\n") == 2
    assert "fsbarrier: skipped no text: " in captured.err and "not a run's record" in captured.err
    runs = json.loads(captured.out)
    assert [Path(run["path"]).name for run in runs] == ["begun", "done"]
    assert runs[1]["state"] == "finished" and runs[1]["iteration"] == 3 and runs[1]["nodes"] == 3
    said = typed("status", "--log-path", tmp_path / "done", "--json", "--no-watch")
    *_, newest = json.loads(said.out)["rewards"]
    assert (runs[1]["train_reward"], runs[1]["test_reward"]) == (newest["train"], newest["test"])
    assert newest["train"] != newest["test"]
    assert runs[0]["state"] != "finished" and runs[0]["train_reward"] is None
    lines = typed("runs", tmp_path).out.splitlines()
    assert len(lines) == 3 and lines[0].split()[:3] == ["run", "state", "iteration"]
    assert lines[2].startswith("done")
    assert [float(word) for word in lines[2].split()[6:8]] == [
        pytest.approx(newest[split], abs=0.01) for split in ("train", "test")
    ]


def test_many_runs_are_listed_by_a_fresh_process(tmp_path: Path) -> None:
    """Its threads are all the first to read a record. They change as often as can be, because each first use is short."""
    first = FakeRun(tmp_path / "0", nodes=1)
    for number in range(1, 16):
        shutil.copytree(first.log_path, tmp_path / str(number))
    code = "import sys; sys.setswitchinterval(1e-6); from fsbarrier.cli import main; sys.exit(main(sys.argv[1:]))"
    words = [sys.executable, "-c", code, "runs", "--json", str(tmp_path)]
    ended = subprocess.run(words, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    assert (ended.returncode, len(json.loads(ended.stdout or "[]"))) == (0, 16), ended.stderr


# --- removing runs ----------------------------------------------------------------------------------------------------------


def test_rm_removes_what_fsbarrier_made_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = long_run(tmp_path / "run", 2, lose_at=None, extra=QUICK).log_path
    outside = tmp_path / "precious"
    outside.mkdir()
    (outside / "data").write_text("x" * 5000)
    # The served policy is a link, and so may be anything else in there.
    (run / "model.pt").symlink_to(outside)
    (run / "checkpoints").mkdir(exist_ok=True)
    (run / "checkpoints" / "policy-000009.g0001").symlink_to(outside)
    (run / "notes.txt").write_text("mine")
    typed("report", run)
    shown = typed("rm", run, "--dry-run").out
    assert "run.json" in shown and "report.html" in shown and "stays: notes.txt" in shown
    assert shown.endswith("nothing was removed\n")
    assert "give --yes" in typed("rm", run, code=2).err
    assert "drop one of the two" in typed("rm", run, "--yes", "--dry-run", code=2).err
    assert "give --yes or --dry-run with it" in typed("rm", run, "--json", code=2).err
    for answer, removed in (("n\n", False), ("y\n", True)):
        monkeypatch.setattr("sys.stdin", _Terminal(answer))
        said = typed("rm", "--log-path", run).out
        assert ("freed" in said) is removed
    assert [path.name for path in run.iterdir()] == ["notes.txt"]
    assert (outside / "data").read_text() == "x" * 5000
    assert "no run there" in typed("rm", run, code=2).err


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_rm_refuses_a_live_run(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", nodes=1, extra=QUICK)
    run.start(0)
    run.beat(0, 5)
    stop = beating(run, (0,), (1, 1))
    try:
        said = typed("rm", run.log_path, "--yes", code=2).err
    finally:
        stop.set()
    assert "is in use by node 0" in said and run.paths.record.exists()
    # A link to a run stays; the run is gone without a word to its folder.
    ended = long_run(tmp_path / "ended", 1, lose_at=None, extra=QUICK).log_path
    (tmp_path / "link").symlink_to(ended)
    told = json.loads(typed("rm", tmp_path / "link", "--yes", "--json").out)
    assert told["removed"] and told["bytes"] > 4096 and told["stays"] == [] and not ended.exists()
