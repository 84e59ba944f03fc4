"""`fsbarrier bench`: real daemons and real scanning processes; that it measures, not how fast this machine is."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from fsbarrier.cli import main


def test_the_benchmark_measures_all_kinds_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = str(Path(__file__).resolve().parent.parent)
    monkeypatch.setenv("PYTHONPATH", repo)
    assert main(["bench", "--nodes", "2", "--iterations", "2", "--path", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["nodes"] == 2
    assert told["ping"]["barriers"] >= 13
    assert told["bare_scan"]["barriers"] == told["join"]["barriers"] == 27
    scan_s = (told["bare_scan"]["median_s"] + told["bare_scan_after"]["median_s"]) / 2
    assert told["ratio_of_medians"] == pytest.approx(told["ping"]["median_s"] / scan_s)
    assert told["join_ratio_of_medians"] == pytest.approx(told["join"]["median_s"] / scan_s)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("words", [["--nodes", "0"], ["--iterations", "1"], ["--path", "/nowhere"]])
def test_bad_input(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words]) == 2
    assert words[0] in capsys.readouterr().err
