"""`fsbarrier logs --first-error` over hand-written runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_run import FakeRun, long_run

from fsbarrier.cli import main

TRACE = [
    "step 41",
    "Traceback (most recent call last):",
    '  File "x.py", line 3',
    "ValueError: \x1b[31mbad\x1b[0m",
    "later",
]


def shown(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["logs", "--log-path", str(run.log_path), "--first-error"]) == 0
    return capsys.readouterr().out


def test_a_failed_program_is_shown_with_its_log_and_its_neighbours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = FakeRun(tmp_path / "run")
    run.start()
    run.iteration(1)
    log = run.log_path / "logs" / "attempt_1" / "node_1" / "update.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    header = "--- 2026-01-01T00:00:00+00:00 start update: torchrun"
    log.write_text("\n".join([header, "RuntimeError: of an earlier start", header, *TRACE, ""]))
    run.fail(1, 2, 10, "torchrun ended with exit code 1", [f"(from {log})", "later"])
    run.lose(2, 2, 10, after=5.0, resume=1)
    out = shown(run, capsys)
    assert "torchrun ended with exit code 1" in out.split("events around it")[0]
    assert f"the error in {log}:" in out
    assert "step 41" in out and "ValueError" in out and "earlier start" not in out
    assert "\x1b" not in out
    assert (
        main(["logs", "--log-path", str(run.log_path), "--file", "update", "--attempt", "1", "--lines", "1"])
        == 0
    )
    assert capsys.readouterr().out.strip().endswith("later")
    assert "node 2" in out.split("events around it")[1], "what happened next stands there, too"


def test_a_lost_node_counts_and_a_good_run_has_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "node 2" in shown(long_run(tmp_path / "lost", 4), capsys)
    good = long_run(tmp_path / "good", 2, lose_at=None)
    assert shown(good, capsys) == "no node, program or phase of this run has failed\n"
