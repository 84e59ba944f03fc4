"""`fsbarrier bench`: real daemons; that it measures, not how fast this machine is."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from fsbarrier.cli import main


def test_the_barriers_of_real_daemons_are_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = str(Path(__file__).resolve().parent.parent)
    monkeypatch.setenv("PYTHONPATH", repo)
    assert main(["bench", "--nodes", "2", "--iterations", "2", "--path", str(tmp_path)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["nodes"] == 2
    assert told["barriers"] >= 13 and 0 < told["median_s"] <= told["p99_s"] <= told["max_s"]
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--nodes", "0"], "--num-nodes: must be"), (["--path", "/nowhere"], "--path /nowhere: No such file")],
)
def test_bad_input(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words]) == 2
    assert said in capsys.readouterr().err
