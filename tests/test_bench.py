"""`fsbarrier bench`: real daemons; that it measures, not how fast this machine is."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from commands import typed


def test_the_barriers_of_real_daemons_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repo = str(Path(__file__).resolve().parent.parent)
    monkeypatch.setenv("PYTHONPATH", repo)
    told = json.loads(typed("bench", "--nodes", "2", "--iterations", "2", "--path", tmp_path).out)
    assert told["nodes"] == 2
    assert told["barriers"] >= 13 and 0 < told["median_s"] <= told["p99_s"] <= told["max_s"]
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--nodes", "0"], "--num-nodes: must be"), (["--path", "/nowhere"], "--path /nowhere: No such file")],
)
def test_bad_input_is_refused_in_words(words: list[str], said: str) -> None:
    assert said in typed("bench", *words, code=2).err
