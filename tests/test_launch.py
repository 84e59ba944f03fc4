"""`fsbarrier launch local` with real daemons: it ends by itself, by a signal, and when it is killed; nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import leftovers
from commands import typed
from fake_run import FakeRun
from waiting import DEADLINE_S, until

from fsbarrier.cli.commands.run import demo_path, is_finished
from fsbarrier.protocol.codec import encode
from fsbarrier.protocol.facts import Beat
from fsbarrier.rundir.journal import read_events
from fsbarrier.rundir.paths import RunPaths

REPO = Path(__file__).resolve().parent.parent
FAST = ("coordination.beat_s=0.2", "coordination.dead_s=10")


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "fsbarrier", *words]


def environ() -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if "RANK" not in name and "SLURM" not in name}
    return {**clean, "PYTHONPATH": str(REPO)}


def launch(log_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    words = ("launch", "local", "--log-path", str(log_path), *words)
    return subprocess.run(command(*words), capture_output=True, text=True, env=environ(), timeout=DEADLINE_S)


@pytest.fixture
def endless(tmp_path: Path) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """Two nodes in a rollout that lasts until they are stopped."""
    log_path = tmp_path / "run"
    words = ("launch", "local", "--nodes", "2", "--program", "toy", "--log-path", str(log_path), *FAST)
    process = subprocess.Popen(
        command(*words, "toy.phase_s=3600"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environ(),
        start_new_session=True,
    )
    try:
        until(
            lambda: any((e.name, e.phase) == ("phase_started", 2) for e in read_events(log_path)),
            lives=lambda: process.poll() is None,
        )
        yield log_path, process
    finally:
        process.kill()
        process.communicate()


def test_a_run_ends_by_itself_and_can_be_gone_on_with(tmp_path: Path) -> None:
    log_path = tmp_path / "run"
    done = launch(log_path, "--nodes", "3", "--program", "ping", "--iterations", "2", *FAST)
    assert done.returncode == 0, done.stdout + done.stderr
    assert leftovers(log_path) == {}
    settings = json.loads((log_path / "run.json").read_text())["settings"]
    assert (settings["num_nodes"], settings["rank_weights"]) == (3, [1.0, 1.0, 1.0])
    assert {e.node_rank for e in read_events(log_path)} == {0, 1, 2}
    assert is_finished(log_path)
    again = launch(log_path, "--iterations", "3")
    assert again.returncode == 0, again.stdout + again.stderr
    iterations = [
        e.iteration for e in read_events(log_path) if e.name == "phase_started" and e.node_rank == 2
    ]
    assert sorted(set(iterations)) == [1, 2, 3]
    assert len(list((log_path / "logs").glob("launch_*/node_*.log"))) == 6


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGHUP, 143)])
def test_one_signal_ends_everything(
    endless: tuple[Path, subprocess.Popen[str]], number: int, code: int
) -> None:
    log_path, process = endless
    assert len(leftovers(log_path)) >= 3
    process.send_signal(number)
    said = process.communicate(timeout=DEADLINE_S)[0]
    assert process.returncode == code, said
    assert leftovers(log_path) == {}
    assert "Traceback" not in said
    assert not is_finished(log_path)
    # The summary says what the user did, and no exit code.
    by = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
    assert f"ended: stopped by {by}" in said and f"exit code {code}" not in said
    assert number != signal.SIGINT or "SIG" not in said


STORM = """
import os, signal, subprocess, sys, threading, types
from fsbarrier.run.daemon import Daemon

send = "import os, signal, sys; [os.kill(int(sys.argv[1]), signal.SIGTERM) for _ in range(100_000)]"
daemon = Daemon.__new__(Daemon)
daemon._signal, daemon._wake = None, threading.Event()
daemon.events = types.SimpleNamespace(write_stacks_on_signal=lambda: None)
with daemon.signals():
    storm = subprocess.Popen([sys.executable, "-c", send, str(os.getpid())])
    while storm.poll() is None:
        daemon._wake.wait(0.00001)
        daemon._wake.clear()
assert daemon._signal == signal.SIGTERM
"""


def test_a_signal_may_come_at_any_moment_of_a_wait() -> None:
    """Also while the loop holds the lock of what it waits for: one in twenty signals found it there, and the daemon hung for ever."""
    done = subprocess.run(
        [sys.executable, "-c", STORM], capture_output=True, text=True, env=environ(), timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stderr


def test_nothing_outlives_a_killed_launch(endless: tuple[Path, subprocess.Popen[str]]) -> None:
    log_path, process = endless
    process.kill()
    process.wait()
    until(lambda: leftovers(log_path) == {})


def test_a_second_start_of_a_rank_is_refused_and_harms_nobody(
    endless: tuple[Path, subprocess.Popen[str]],
) -> None:
    log_path, process = endless
    second = subprocess.run(
        command("run", "--worker", "1", "--log-path", str(log_path)),
        capture_output=True,
        text=True,
        env=environ(),
    )
    assert second.returncode == 2, second.stderr
    assert "node 1 of" in second.stderr
    assert second.stderr.count("\n") == 1
    again = launch(log_path)
    assert again.returncode == 2, again.stdout + again.stderr
    assert "already running" in again.stderr
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=DEADLINE_S)


def test_a_node_that_comes_back_says_for_what_it_waits(endless: tuple[Path, subprocess.Popen[str]]) -> None:
    log_path, _ = endless
    joined = [
        event for event in read_events(log_path) if event.name == "node_joined" and event.node_rank == 1
    ]
    os.kill(joined[0].integer("pid"), signal.SIGKILL)
    words = command("run", "--worker", "1", "--log-path", str(log_path))
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environ()) as back:
        assert back.stdout is not None
        line = back.stdout.readline()
        back.send_signal(signal.SIGTERM)
        back.communicate(timeout=DEADLINE_S)
    assert line.startswith("fsbarrier: node 1: the others were in iteration "), line


def test_a_start_names_the_nodes_that_it_waits_for(tmp_path: Path) -> None:
    words = command(
        "run", "--master", "--num-nodes", "3", "--program", "ping", "--log-path", str(tmp_path / "run")
    )
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environ()) as alone:
        assert alone.stdout is not None
        said = next(line for line in alone.stdout if "waiting" in line)
        alone.send_signal(signal.SIGTERM)
        alone.communicate(timeout=DEADLINE_S)
    assert said.startswith(f"fsbarrier: waiting up to 1800 s for nodes 1, 2 to join {tmp_path / 'run'} "), (
        said
    )


def test_the_demo_leaves_another_run_alone(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", program="toy")
    before = run.paths.record.read_bytes()
    said = typed("run", "--demo", "--log-path", run.log_path, code=2)
    assert "contains a run that is not a demo" in said.err
    assert run.paths.record.read_bytes() == before and not [*run.paths.joins.iterdir()]


def test_the_demo_goes_on_with_an_unfinished_run(tmp_path: Path) -> None:
    def beat(name: str, state: str) -> None:
        folder = RunPaths(tmp_path / name).status
        folder.mkdir(parents=True, exist_ok=True)
        record = Beat(rank=0, incarnation=1, counter=1, host="h", pid=1, state=state)
        (folder / "node-0000.inc-0001.json").write_bytes(encode(record))

    assert demo_path(tmp_path) == tmp_path / "demo"
    beat("demo", "left")
    assert demo_path(tmp_path) == tmp_path / "demo"
    beat("demo", "finished")
    assert demo_path(tmp_path) == tmp_path / "demo-2"
    beat("demo-2", "finished")
    assert demo_path(tmp_path) == tmp_path / "demo-3"
