"""`scripts/lab/bench_latency.py`: real daemons; that it measures, not how fast this machine is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "lab" / "bench_latency.py"


def measure(*words: object) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(SCRIPT.parent.parent.parent)}
    return subprocess.run(
        [sys.executable, SCRIPT, *map(str, words)], capture_output=True, text=True, env=environ
    )


def test_the_barriers_of_real_daemons_are_measured(tmp_path: Path) -> None:
    told = json.loads(measure("--nodes", 2, "--iterations", 2, "--path", tmp_path).stdout)
    assert told["nodes"] == 2
    assert told["barriers"] >= 13 and 0 < told["median_s"] <= told["p99_s"] <= told["max_s"]
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--nodes", "0"], "--num-nodes: must be"), (["--path", "/nowhere"], "--path /nowhere: No such file")],
)
def test_bad_input_is_refused_in_words(words: list[str], said: str) -> None:
    done = measure(*words)
    assert done.returncode == 2 and said in done.stderr
