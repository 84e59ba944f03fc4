"""What is said of a run from its directory: states, silence, who waits for whom, and never a crash."""

from __future__ import annotations

import json
import os
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cluster import FAST, Cluster
from commands import typed
from fake_run import FakeRun, long_run

from fsbarrier.protocol.facts import Pulse

# `status` watches for one beat and a half. In that time the thread of a test beats too, however busy the machine is.
QUICK = {"coordination.beat_s": 0.2, "coordination.dead_s": 1.0}
PATIENT = {"coordination.beat_s": 2.0, "coordination.dead_s": 15.0}
BOOT_ID = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
HERE = {"hosts": (socket.gethostname(),), "boot_ids": dict.fromkeys(range(4), BOOT_ID)}
NO_PROCESS = 2**22 + 1  # above the largest pid there can be


def status_of(run: FakeRun | Cluster) -> Any:
    return json.loads(typed("status", "--json", "--log-path", run.log_path).out)


def node(status: Any, rank: int) -> Any:
    return next(one for one in status["nodes"] if one["node_rank"] == rank)


def beating(run: FakeRun, ranks: tuple[int, ...], at: tuple[int, int]) -> threading.Event:
    """Heartbeats that go on until the event is set."""
    stop = threading.Event()

    def beat() -> None:
        counter = 100
        while not stop.wait(0.02):
            counter += 1
            for rank in ranks:
                run.beat(rank, counter, "running", at, done=3, total=8, unit="trajectories")

    threading.Thread(target=beat, daemon=True).start()
    return stop


def test_the_status_of_a_finished_run_tells_its_end_and_its_rewards(tmp_path: Path) -> None:
    status = status_of(long_run(tmp_path / "run"))
    assert (status["state"], status["exit_code"]) == ("finished", 0)
    assert (status["generation"], status["iteration"], status["iterations"], status["leader"]) == (3, 6, 6, 0)
    assert status["phase"] is not None and (status["phase"]["index"], status["phase"]["name"]) == (
        13,
        "iteration_end",
    )
    assert [one["state"] for one in status["nodes"]] == ["finished"] * 3
    assert node(status, 2)["incarnation"] == 2
    assert status["problems"] == [] and status["waiting_for"] is None
    assert [r["iteration"] for r in status["rewards"]] == [1, 2, 3, 4, 5, 6]
    assert status["rewards"][0]["train"] == pytest.approx(0.23) and status["rewards"][0][
        "test"
    ] == pytest.approx(0.25)
    assert [one["iteration"] for one in status["coordination"]] == [1, 2, 3, 4, 5, 6]


def test_frozen_engines_and_environments_stand_below_their_node(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", nodes=2, **HERE)
    for rank in range(2):
        run.join(rank, pid=os.getpid())
    run.begin((0, 1), "start")
    judge = {"states": ["up", "down"], "restarts": 2, "why": "vLLM died"}
    web = {
        "states": ["up", "starting"],
        "sessions": 3,
        "most": 7,
        "waiting": 2,
        "restarts": 1,
        "why": "killed",
    }
    shown = {"environments.web": web, "environment": {"states": ["up"], "sessions": 1, "most": None}}
    frozen = {"judge": judge, "rm": {"states": ["asleep"]}}
    run.beat(0, 1, at=(1, 2), done=1, total=8, frozen=frozen, environments=shown)
    run.beat(1, 1, at=(1, 2), frozen=["not", "ours"], environments={"odd": {"states": 7, "sessions": "x"}})
    show = ("status", "--no-watch", "--log-path", str(run.log_path))
    first, second = json.loads(typed(*show, "--json").out)["nodes"]
    assert first["engines"] == {"judge": judge, "rm": {"states": ["asleep"]}} and second["engines"] == {}
    assert first["progress"] == {"done": 1, "total": 8, "environments": shown}
    lines = [" ".join(one.split()) for one in typed(*show).out.splitlines()]
    assert "down engines.judge restarted 2 times: vLLM died" in lines, lines
    assert "asleep engines.rm" in lines, lines
    assert "up environment sessions 1, 0 waiting" in lines, lines
    assert any(one.startswith("starting environments.web sessions 3/7, 2 waiting; resta") for one in lines), (
        lines
    )


def test_an_iteration_is_complete_once_its_last_row_was_passed(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run")
    run.start()
    run.iteration(1)
    run.iteration(2, range(13))
    run.lose(2, 2, 13, after=5.0, resume=13)
    said = typed("status", "--json", "--no-watch", "--log-path", run.log_path)
    assert [one["iteration"] for one in json.loads(said.out)["coordination"]] == [1]


def test_the_newest_files_are_named(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", nodes=1, extra=QUICK)
    for start in (1, 2):
        run.join(0)
        run.paths.node_logs(start, 0).mkdir(parents=True, exist_ok=True)
    for iteration in (2, 10, 9):
        run.paths.trajectories("train").mkdir(parents=True, exist_ok=True)
        run.paths.merged("train", iteration).touch()
    status = status_of(run)
    assert status["files"]["train_trajectories"] == str(run.paths.merged("train", 10))
    assert node(status, 0)["logs"] == str(run.paths.node_logs(2, 0))


def test_the_json_has_what_scripts_rely_on(tmp_path: Path) -> None:
    run = long_run(tmp_path / "run")
    body = json.loads(typed("status", "--json", "--log-path", run.log_path).out)
    assert {"state", "run_id", "generation", "iteration", "phase", "leader", "nodes"} <= body.keys()
    assert body["phase"] == {"index": 13, "name": "iteration_end"}
    (lost,) = body["interruptions"]
    assert lost["generation"] == 2 and 30 < lost["cost_s"] < 40 and 0.9 < body["goodput"] < 1
    wanted = {"node_rank", "host", "pid", "incarnation", "state", "phase", "progress", "last_beat_age_s"}
    assert all(wanted <= one.keys() for one in body["nodes"])
    assert body["nodes"][0]["host"] == "gpu-a" and body["nodes"][0]["pid"] == 4001
    first = body["coordination"][0]
    assert first["coordination_s"] == pytest.approx(14 * 0.004, abs=1e-4) and first["iteration"] == 1
    assert first["share"] == pytest.approx(first["coordination_s"] / first["seconds"], abs=1e-4)
    assert body["phases_s"]["train_rollout"] == pytest.approx(43.464, abs=1e-3)


def test_moving_heartbeats_mean_running_and_whoever_stands_still_is_suspected(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", extra=PATIENT)
    run.start()
    run.iteration(1, range(2))
    for rank in range(3):
        run.line(rank, "phase_started", (1, 2, 0))
        run.beat(rank, 1, "running", (1, 2))
    run.done(0, 1, 2)
    stop = beating(run, (0, 1), (1, 2))
    try:
        status = status_of(run)
    finally:
        stop.set()
    assert status["state"] == "running"
    assert [node(status, rank)["state"] for rank in range(3)] == ["running", "running", "suspected"]
    assert [node(status, rank)["activity"] for rank in (0, 1)] == ["waiting", "working"]
    assert node(status, 0)["last_beat_age_s"] < 5 and node(status, 2)["last_beat_age_s"] is None
    assert node(status, 1)["progress"]["done"] == 3 and node(status, 0)["progress"] is None
    assert status["waiting_for"] is not None and status["waiting_for"]["node_ranks"] == [1, 2]
    assert status["waiting_for"]["for_s"] is None  # no journal tells
    assert any("node 2 (gpu-c): no heartbeat" in problem for problem in status["problems"])


def test_all_silent_is_stalled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = FakeRun(tmp_path / "run", extra=QUICK)
    run.start()
    for rank in range(3):
        run.beat(rank, 7, "running", (1, 0))
    status = status_of(run)
    assert status["state"] == "stalled" and status["exit_code"] is None
    assert {one["state"] for one in status["nodes"]} == {"suspected"} and "is full" not in status["problems"][
        0
    ]
    room = SimpleNamespace(f_bavail=1, f_frsize=1000, f_files=9, f_favail=9)
    for room.f_bavail, room.f_favail, lacks in ((1, 9, "bytes"), (1 << 20, 0, "inodes")):
        monkeypatch.setattr(os, "statvfs", lambda path: room)
        full = f"the filesystem of {run.log_path} is full (no {lacks} left), so no node can write"
        assert full in status_of(run)["problems"][0]


def test_who_cannot_write_is_alive_and_says_so_in_its_heartbeat_s_name(tmp_path: Path) -> None:
    """By a quota of its own, which the filesystem's figures do not show: what it says beside its heartbeat is old."""
    run = FakeRun(tmp_path / "run", nodes=2, extra=QUICK)
    run.start()
    for rank in (0, 1):
        run.beat(rank, 7, "running", (1, 0))
    run.paths.beats.mkdir(parents=True, exist_ok=True)
    run.paths.pulse(Pulse(1, 1, 9, "unwritable", 1, 1, 0)).touch()
    status = status_of(run)
    assert f"node 1 cannot write in {run.log_path} (room, quota, permission)" in status["problems"][0]


def test_a_process_that_is_gone_from_this_host_needs_no_watching(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", nodes=2, extra={"coordination.beat_s": 60.0}, **HERE)
    run.join(0, pid=NO_PROCESS)
    run.join(1, pid=NO_PROCESS)
    run.begin((0, 1), "start")
    for rank in (0, 1):
        run.beat(rank, 7, "running", (1, 0))
    status = status_of(run)  # at once, although a beat is a minute
    assert status["state"] == "stalled"
    assert [one["state"] for one in status["nodes"]] == ["lost", "lost"]
    assert f"process {NO_PROCESS} is gone" in status["problems"][0]
    for who, hint in (("--master", status["problems"][1]), ("--worker 1", status["problems"][3])):
        assert hint.strip() == f"start it again there: fsbarrier run {who} --log-path {run.log_path}"


def test_a_verdict_is_broken_and_its_reason_is_the_first_problem(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run")
    run.start()
    run.fail(1, 1, 2, "rollout.py ended with exit code 1", ["Traceback", "ValueError: no answer"])
    run.verdict(
        4, "node 1 (gpu-b), iteration 1, phase 2 train_rollout: exit code 1\n  | ValueError: no answer"
    )
    for rank in range(3):
        run.beat(rank, 9, "broken", (1, 2))
    status = status_of(run)
    assert (status["state"], status["exit_code"]) == ("broken", 4)
    assert status["problems"][0].startswith("node 1 (gpu-b), iteration 1")
    assert "ValueError" in status["problems"][1]
    assert status["files"]["node_1_logs"].endswith("attempt_1/node_1")


def test_a_run_whose_only_node_was_stopped_before_the_others_came(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run")
    run.join(0)
    run.line(0, "node_ended", (0, 0, 0), state="left", code=130, reason="stopped by Ctrl-C")
    run.beat(0, 1, "left", (0, 0))
    status = status_of(run)
    assert (status["state"], status["exit_code"]) == ("stopped", 130)
    shown = typed("status", "--no-watch", "--log-path", run.log_path).out
    assert "ended before it began: 1 of 3 nodes had joined" in shown and "waiting" not in shown


@pytest.mark.parametrize(
    ("code", "state", "nodes"), [(130, "stopped", 3), (143, "stopped", 3), (3, "broken", 9)]
)
def test_a_run_that_all_nodes_left_has_their_exit_code_and_reason(
    tmp_path: Path, code: int, state: str, nodes: int
) -> None:
    run = FakeRun(tmp_path / "run", nodes=nodes)
    run.start()
    for rank in range(nodes):
        run.line(rank, "node_ended", (1, 0, 0), state="left", code=code, reason="why it left")
        run.beat(rank, 3, "left", (1, 0))
    status = status_of(run)
    assert (status["state"], status["exit_code"]) == (state, code)
    who = "0, 1, 2, 3, 4, 5 and 3 more" if nodes == 9 else "0, 1, 2"
    assert status["problems"] == [f"nodes {who} ended: why it left"]


def test_failures_of_the_iteration_are_told_once_with_their_last_lines(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", extra=QUICK)
    run.start()
    for _ in range(2):
        run.fail(1, 1, 2, "exit code 1", ["ValueError: no answer"])
    status = status_of(run)
    assert [p for p in status["problems"] if "failed" in p] == [
        "node 1, iteration 1, phase 2 train_rollout failed (2 times): exit code 1"
    ]
    assert "  | ValueError: no answer" in status["problems"]
    run.iteration(1)
    run.line(0, "phase_started", (2, 0, 0))
    assert not [problem for problem in status_of(run)["problems"] if "failed" in problem]


def test_a_lost_node_stays_named_while_the_others_go_on(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", extra=PATIENT)
    run.start()
    run.lose(2, 1, 2, after=5.0, resume=1)
    for rank in range(3):
        run.beat(rank, 5, "running", (1, 2))
    stop = beating(run, (0, 1), (1, 2))
    try:
        status = status_of(run)
    finally:
        stop.set()
    assert status["generation"] == 2 and status["state"] == "running"
    assert [one["state"] for one in status["nodes"]] == ["running", "running", "lost"]
    lost = status["problems"].index("node 2 (gpu-c) is lost: no heartbeat for 15.4 s")
    again = f"start it again there: fsbarrier run --worker 2 --log-path {run.log_path}"
    assert status["problems"][lost + 1].strip() == again


# --- damaged directories -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["status", "top", "report"])
@pytest.mark.parametrize("there", ["nothing", "empty", "file", "edited"])
def test_no_run_is_one_clear_line(tmp_path: Path, command: str, there: str) -> None:
    path = tmp_path / "run"
    if there == "file":
        path.write_text("x")
    elif there == "empty":
        path.mkdir()
    if there == "edited":
        record = FakeRun(path).paths.record
        record.write_bytes(record.read_bytes().replace(b'"num_nodes": 3', b'"num_nodes": 4'))
    captured = typed(command, "--log-path", path, code=2)
    assert captured.out == "" and captured.err.count("\n") == 1
    why = {"nothing": "no such directory", "empty": "no run.json", "file": "not a directory"}
    if there in why:
        assert f"no run there ({why[there]})" in captured.err


# --- a real run -----------------------------------------------------------------------------------------------------------


def test_a_real_run_from_its_start_to_its_end(tmp_path: Path) -> None:
    with Cluster(
        tmp_path, 2, "--iterations", "2", *FAST, "coordination.beat_s=1", "toy.phase_s=0.3"
    ) as cluster:
        cluster.start()
        cluster.in_phase(1, 2)
        status = status_of(cluster)
        assert status["state"] == "running" and status["generation"] == 1
        assert [one["pid"] for one in status["nodes"]] == [cluster.processes[rank].pid for rank in (0, 1)]
        assert all(one["last_beat_age_s"] is not None for one in status["nodes"])
        assert cluster.wait() == {0: 0, 1: 0}, cluster.said(0)
        status = status_of(cluster)
    assert status["state"] == "finished" and status["iteration"] == 2
    assert [one["iteration"] for one in status["coordination"]] == [1, 2]
    assert all(0 < one["coordination_s"] < one["seconds"] for one in status["coordination"])
    assert all(None not in (r["train"], r["test"]) for r in status["rewards"]) and len(status["rewards"]) == 2
    assert {"run", "model", "train_trajectories", "logs"} <= status["files"].keys()
