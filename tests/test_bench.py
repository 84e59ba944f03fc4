"""`fsbarrier bench`: real daemons and real scanning processes; that it measures, not how fast this machine is."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from fsbarrier.cli import main
from fsbarrier.errors import ProgramFailed
from fsbarrier.run import benchmark
from fsbarrier.run.benchmark import Latency, scripts


def test_latencies_are_summarised() -> None:
    figures = Latency.of([0.004, 0.001, 0.003, 0.002, 0.100])
    assert figures == Latency(5, 0.003, 0.004, 0.100)
    with pytest.raises(ProgramFailed):
        Latency.of([])


@pytest.mark.parametrize("kind", ["bare", "group"])
def test_each_round_but_the_first_is_measured(tmp_path: Path, kind: str) -> None:
    figures = scripts(kind, tmp_path / kind, 3, 5)
    assert figures.barriers == 4
    assert 0 < figures.median_s <= figures.p99_s <= figures.max_s


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


def took(milliseconds: float) -> Latency:
    return Latency.of([milliseconds / 1000])


@pytest.mark.parametrize(("after_ms", "disturbed"), [(1.4, False), (3.0, True), (0.5, True)])
def test_each_kind_is_compared_with_the_scans_before_and_after_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, after_ms: float, disturbed: bool
) -> None:
    known = {"bare": took(1.0), "group": took(6.0), "bare-after": took(after_ms)}
    monkeypatch.setattr(benchmark, "scripts", lambda kind, folder, nodes, rounds: known[folder.name])
    monkeypatch.setattr(benchmark, "ping", lambda folder, nodes, iterations: took(3.0))
    assert main(["bench"]) == 0
    said = capsys.readouterr().out
    rows = {line[:16].strip(): line.split()[-1] for line in said.splitlines()[2:6]}
    scan_ms = (1.0 + after_ms) / 2
    assert rows["join"] == f"{6 / scan_ms:.1f}" and rows["daemons"] == f"{3 / scan_ms:.1f}"
    assert ("other load on this machine disturbed the results" in said) == disturbed


@pytest.mark.parametrize("words", [["--nodes", "0"], ["--iterations", "1"], ["--path", "/nowhere"]])
def test_bad_input(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words]) == 2
    assert words[0] in capsys.readouterr().err
