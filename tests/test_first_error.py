"""`fsbarrier logs` over hand-written runs: the last lines, and `--first-error`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from commands import typed
from fake_run import FakeRun, long_run

TRACE = [
    "step 41",
    "Traceback (most recent call last):",
    '  File "x.py", line 3',
    "ValueError: \x1b[31mbad\x1b[0m",
    "later",
]


def shown(run: FakeRun) -> str:
    return typed("logs", "--log-path", run.log_path, "--first-error").out


def test_a_failed_program_is_shown_with_its_log_and_its_neighbours(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run")
    run.start()
    run.iteration(1)
    run.now += 60
    log = run.log_path / "logs" / "attempt_1" / "node_1" / "update.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    header = "--- 2026-01-01T00:00:00+00:00 start update: torchrun"
    log.write_text("\n".join([header, "RuntimeError: of an earlier start", header, *TRACE, ""]))
    run.fail(1, 2, 10, "torchrun ended with exit code 1", [f"(from {log})", "later"])
    run.lose(2, 2, 10, after=5.0, resume=1)
    out = shown(run)
    assert "torchrun ended with exit code 1" in out.split("events around it")[0]
    assert f"the error in {log}:" in out
    assert "step 41" in out and "ValueError" in out and "earlier start" not in out
    assert "\x1b" not in out and "iteration 1" not in out.split("events around it")[1], "a minute before"
    said = typed("logs", "--log-path", run.log_path, "--file", "update", "--attempt", "1", "--lines", "1")
    assert said.out.strip().endswith("later")
    assert "node 2" in out.split("events around it")[1], "what happened next stands there, too"


def test_a_lost_node_counts_and_a_good_run_has_none(tmp_path: Path) -> None:
    assert "node 2" in shown(long_run(tmp_path / "lost", 4))
    good = long_run(tmp_path / "good", 2, lose_at=None)
    assert shown(good) == "no node, program or phase of this run has failed\n"


@pytest.fixture
def logged(tmp_path: Path) -> FakeRun:
    """Node 1 was started twice."""
    run = FakeRun(tmp_path / "run", nodes=2)
    for rank in (0, 1, 1):
        run.join(rank)
        folder = run.paths.node_logs(run.incarnations[rank], rank)
        for name in ("daemon", "vllm"):
            lines = [f"{name} {rank} {run.incarnations[rank]} line {n}" for n in (1, 2, 3)]
            (folder / f"{name}.log").write_text("\n".join(lines) + "\n")
    return run


@pytest.mark.parametrize(
    ("flags", "starts"),
    [
        ((), ["daemon 0 1", "vllm 0 1", "daemon 1 2", "vllm 1 2"]),
        (("--node", "1"), ["daemon 1 2", "vllm 1 2"]),
        (("--file", "vllm", "--attempt", "1"), ["vllm 0 1", "vllm 1 1"]),
        (("--node", "0", "--file", "daemon.log"), ["daemon 0 1"]),
    ],
)
def test_the_last_lines_of_each_nodes_latest_start(
    logged: FakeRun, flags: tuple[str, ...], starts: list[str]
) -> None:
    said = typed("logs", "--log-path", logged.log_path, "-n", "2", *flags)
    labels = [f"[node {start.split()[1]} {start.split()[0]}]" for start in starts]
    expected = [
        f"{label} {start} line {n}" for label, start in zip(labels, starts, strict=True) for n in (2, 3)
    ]
    assert said.out.splitlines() == expected


def test_new_lines_are_followed(logged: FakeRun) -> None:
    argv = [
        sys.executable,
        "-m",
        "fsbarrier",
        "logs",
        "--log-path",
        str(logged.log_path),
        "--node",
        "0",
        "-f",
    ]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert [process.stdout.readline().split()[-1] for _ in range(6)] == ["1", "2", "3"] * 2
        for word in ("new", "newer"):
            with (logged.paths.node_logs(1, 0) / "vllm.log").open("a") as log:
                log.write(f"{word}\n")
            assert process.stdout.readline() == f"[node 0 vllm] {word}\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == "" and process.wait() == 130
