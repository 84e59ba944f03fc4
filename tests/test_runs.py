"""`fsbarrier runs` over hand-written runs, whole and damaged ones."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import typed
from fake_run import FakeRun, long_run

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
