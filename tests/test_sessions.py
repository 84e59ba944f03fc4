"""Runs that are stopped or killed as a whole and started again: with other nodes, and where only the last evaluation is missing."""

from __future__ import annotations

import random
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cluster import FAST, REPO, Cluster, all_gone, assert_exactly_once, leftovers, rolled_out_twice
from waiting import DEADLINE_S, until

from fsbarrier.trajectories import load

Way = Callable[[Cluster, int, Path], None]


def call(cluster: Cluster, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fsbarrier", *words, "--log-path", str(cluster.log_path)]
    return subprocess.run(
        command,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(REPO), "HOME": str(cluster.output), **environ},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def launch_local(cluster: Cluster, nodes: int, folder: Path) -> None:
    done = call(cluster, "launch", "local", "--nodes", str(nodes), "--iterations", "2")
    assert done.returncode == 0, done.stdout + done.stderr


def launch_ssh(cluster: Cluster, nodes: int, folder: Path) -> None:
    ssh = folder / "ssh"
    ssh.write_text('#!/bin/sh\nfor last; do :; done\nexec sh -c "$last"\n')
    ssh.chmod(0o700)
    hosts = ",".join(f"host{rank}" for rank in range(nodes))
    words = ("--hosts", hosts, "--ssh", shlex.quote(str(ssh)), "--logs", str(folder / "logs"))
    program = f"{sys.executable} -m fsbarrier"
    done = call(cluster, "launch", "ssh", *words, "--fsbarrier", program, "--iterations", "2")
    assert done.returncode == 0, done.stdout + done.stderr


def slurm(cluster: Cluster, nodes: int, folder: Path) -> None:
    """What `launch slurm` starts on each node: the same words everywhere, and the rank from the environment."""
    for rank in reversed(range(nodes)):
        cluster.env[rank] = {"SLURM_NODEID": str(rank), "SLURM_NNODES": str(nodes), "SLURM_LOCALID": "0"}
        cluster.start_as(rank, "--iterations", "2")


def kubernetes(cluster: Cluster, nodes: int, folder: Path) -> None:
    for rank in reversed(range(nodes)):
        cluster.env[rank] = {"JOB_COMPLETION_INDEX": str(rank)}
        cluster.start_as(rank, "--iterations", "2", "--num-nodes", str(nodes))


def by_hand(cluster: Cluster, nodes: int, folder: Path) -> None:
    """The workers first; node 0 only once they wait."""
    for rank in range(nodes - 1, 0, -1):
        cluster.start_as(rank, "--worker", str(rank))
    for rank in range(1, nodes):
        cluster.beating(rank, lambda beat: beat.state == "joining" and beat.counter > 10)
    weights = ",".join(["2", *["1"] * (nodes - 1)])
    numbers = ("--num-nodes", str(nodes), "--rank-weights", weights)
    cluster.start_as(0, "--master", "--iterations", "2", *numbers)


def a_range(cluster: Cluster, nodes: int, folder: Path) -> None:
    for rank in range(nodes):
        which = ("--worker", str(rank)) if rank else ("--master", "--num-nodes", f"1:{nodes}")
        cluster.start_as(rank, *which, "--iterations", "2")


WAYS: dict[str, Way] = {
    "launch local": launch_local,
    "launch ssh": launch_ssh,
    "slurm": slurm,
    "kubernetes": kubernetes,
    "by hand, workers first": by_hand,
    "a range": a_range,
}


#: each way and each direction; both ways of each with --all
EVERY_DAY = (
    "launch local more",
    "slurm fewer",
    "kubernetes fewer",
    "by hand, workers first more",
    "a range fewer",
)
CASES = [
    pytest.param(way, *change, marks=() if name in EVERY_DAY else pytest.mark.slow, id=name)
    for title, way in WAYS.items()
    for more, change in (("more", (2, 3)), ("fewer", (3, 2)))
    for name in [f"{title} {more}"]
]


@pytest.mark.parametrize(("way", "before", "after"), CASES)
def test_a_run_goes_on_with_another_number_of_nodes(
    tmp_path: Path, way: Way, before: int, after: int
) -> None:
    with Cluster(tmp_path, before, "--iterations", "1", *FAST, "toy.phase_s=0.02") as cluster:
        cluster.start()
        assert set(cluster.wait().values()) == {0}, cluster.said_by_all()
        cluster.processes.clear()
        way(cluster, after, tmp_path)
        assert set(cluster.wait().values()) <= {0}, cluster.said_by_all()
        last = [e for e in cluster.events() if e["event"] == "generation_started"][-1]
        assert last["members"] == list(range(after)), cluster.said_by_all()
    assert_exactly_once(cluster.log_path, 2)


@pytest.mark.slow
def test_a_run_lives_through_stops_more_nodes_a_kill_and_more_iterations(tmp_path: Path) -> None:
    with Cluster(tmp_path, 2, "--iterations", "3", *FAST) as cluster:
        cluster.start()
        cluster.in_phase(1, 2)
        assert call(cluster, "stop", "--now").returncode == 0
        assert cluster.wait() == {0: 0, 1: 0}, cluster.said_by_all()
        cluster.nodes = 3
        cluster.start(2, 1, 0)
        # In which iteration depends on where the stop caught them.
        cluster.wait_for(lambda e: (e["event"], e["node_rank"], e["phase"]) == ("phase_started", 2, 2))
        cluster.kill(0)
        cluster.wait_for(lambda event: event["event"] == "node_lost" and event["node_rank"] == 1)
        # It comes back when the run may be over.
        cluster.start(0)
        assert cluster.wait() == {0: 0, 1: 0, 2: 0}, cluster.said_by_all()
        cluster.flags = ("--iterations", "4")
        cluster.start(1, 2)
        for rank in (1, 2):
            cluster.beating(rank, lambda beat: beat.state == "joining" and beat.counter > 10)
        cluster.start(0)
        assert cluster.wait() == {0: 0, 1: 0, 2: 0}, cluster.said_by_all()
        last = [e for e in cluster.events() if e["event"] == "generation_started"][-1]
        assert last["members"] == [0, 1, 2], cluster.said_by_all()
    assert_exactly_once(cluster.log_path, 4)


def test_a_worker_that_waits_for_what_may_never_come_says_so(tmp_path: Path) -> None:
    with Cluster(tmp_path, 2, "--iterations", "1", *FAST, "toy.phase_s=0.02") as cluster:
        cluster.start()
        assert cluster.wait() == {0: 0, 1: 0}, cluster.said_by_all()
        cluster.start(1, 7)
        done = "the run has done its 1 iteration, so start node 0 (--master) with a larger --iterations"
        until(lambda: done in cluster.said(1), cluster.said_by_all)
        few = "node 7: this run has 2 nodes; waiting up to 1800 s for node 0 (--master) to be started with --num-nodes 8 "
        until(lambda: few in cluster.said(7), cluster.said_by_all)


# --- killed at once -------------------------------------------------------------------------------------------------------------

QUICK = (
    "coordination.beat_s=0.2",
    "coordination.dead_s=30",
    "toy.phase_s=0.3",
    "toy.tasks=24",
)
LATEST_S = 4.0  # after the start; an iteration takes about as long


@pytest.mark.parametrize(
    ("seed", "kills"), [(0, 2), *(pytest.param(seed, 20, marks=pytest.mark.slow) for seed in range(1, 6))]
)
@pytest.mark.timeout(600)
def test_all_are_killed_and_started_again(tmp_path: Path, seed: int, kills: int) -> None:
    nodes = 2 if kills == 2 else 3
    generator, pause = random.Random(seed), threading.Event()
    with Cluster(tmp_path, nodes, *QUICK, real=True) as cluster:
        for start in range(1, kills + 1):
            cluster.start()
            for rank in range(nodes):
                cluster.beating(rank, lambda beat, new=start: beat.incarnation >= new)
            pause.wait(generator.uniform(0.0, LATEST_S))
            tree = {pid: begun for rank in range(nodes) for pid, begun in cluster.tree(rank).items()}
            for rank in generator.sample(range(nodes), nodes):
                cluster.kill(rank)
            assert all_gone(tree)
        cluster.start()
        cluster.wait_for(lambda e: e["event"] == "generation_started" and e["incarnation"] == kills + 1)
        cluster.stop()
        assert set(cluster.wait().values()) == {0}, cluster.said(0)
        done = max(e["iteration"] for e in cluster.events() if e["event"] == "iteration_finished")
        assert done >= 1
        for split in ("train", "test"):
            assert_exactly_once(cluster.log_path, done, split=split)
            twice = {i: rolled_out_twice(cluster.log_path, i, split) for i in range(1, done + 2)}
            assert not any(twice.values()), twice
        assert not cluster.paths.merged("train", done + 2).exists()
        assert leftovers(cluster.log_path) == {}


# --- the last evaluation --------------------------------------------------------------------------------------------------------

PROGRAM = Path(__file__).parent / "programs" / "closing.py"


def final_evaluations(cluster: Cluster) -> list[dict[str, Any]]:
    return [event for event in cluster.events() if event["event"] == "evaluated" and event.get("final")]


def assert_evaluated(cluster: Cluster, iteration: int) -> None:
    """The policy that iteration `iteration` has made was evaluated on every task."""
    event = final_evaluations(cluster)[-1]
    assert (event["iteration"], event["phase"], event["policy_version"]) == (iteration, 13, iteration)
    merged = load(cluster.paths.merged("test", iteration + 1))
    assert sorted(one["task_index"] for one in merged["trajectories"]) == list(range(24))
    assert {one["policy_version"] for one in merged["trajectories"]} == {iteration}


def test_the_final_evaluation_is_done_although_the_leader_dies_in_it(tmp_path: Path) -> None:
    # Nodes that start together on a busy machine may come seconds apart, and node 0 that has nothing to do stays for `dead_s`.
    flags = (*FAST, "coordination.dead_s=10", "--iterations", "1", "toy.phase_s=0.01", "custom.hold_s=60")
    with Cluster(tmp_path, 2, *flags, program=str(PROGRAM)) as cluster:
        cluster.start()
        closing = ("phase_started", 0, 13)
        cluster.wait_for(lambda e: (e["event"], e["node_rank"], e["phase"]) == closing)
        cluster.kill(0)
        assert cluster.wait(1) == {1: 0}, cluster.said(1)
        assert_evaluated(cluster, 1)
        # Whoever comes later finds nothing left to do.
        cluster.start()
        assert cluster.wait() == {0: 0, 1: 0}
        assert len(final_evaluations(cluster)) == 1


def test_a_run_whose_iterations_are_done_makes_up_for_a_missing_evaluation(tmp_path: Path) -> None:
    """Its program did not evaluate at the end when it did them."""
    program = tmp_path / "mine.py"
    program.write_text('from fsbarrier.loader import load_module\nPROGRAM = load_module("toy").PROGRAM\n')
    with Cluster(
        tmp_path, 1, *FAST, "toy.phase_s=0.01", "--iterations", "2", program=str(program)
    ) as cluster:
        cluster.start()
        assert cluster.wait() == {0: 0}, cluster.said(0)
        assert not final_evaluations(cluster)
        program.write_text(PROGRAM.read_text())
        cluster.start()
        assert cluster.wait() == {0: 0}, cluster.said(0)
        assert_evaluated(cluster, 2)
        assert [e["phase"] for e in cluster.events() if e["event"] == "phase_started"][-2:] == [12, 13]
        # The run goes on from there: what was sampled then is iteration 3's evaluation, and is not done again.
        cluster.flags = (*cluster.flags[:-1], "3")
        cluster.start()
        assert cluster.wait() == {0: 0}, cluster.said(0)
        assert_evaluated(cluster, 3)
        parts = cluster.paths.trajectories("test").glob("*iteration3_rank_*.part")
        assert len([*parts]) == 1


def test_a_run_that_was_stopped_in_row_13_and_is_to_end_there_evaluates(tmp_path: Path) -> None:
    """The iteration was not to be the last one when the run was stopped."""
    flags = (*FAST, "toy.phase_s=0.01", "custom.hold_s=60", "--iterations")
    with Cluster(tmp_path, 1, *flags, "3", program=str(PROGRAM)) as cluster:
        cluster.start()
        cluster.in_phase(0, 13)
        cluster.signal(0, signal.SIGTERM)
        assert cluster.wait() == {0: 143}
        cluster.flags = (*cluster.flags[:-1], "1")
        cluster.start()
        assert cluster.wait() == {0: 0}, cluster.said(0)
        assert_evaluated(cluster, 1)
        begun = [e["phase"] for e in cluster.events() if e["event"] == "phase_started"]
        assert begun == [*range(14), 12, 13]
