"""A run is started again with another number of nodes and a larger `--iterations`, in every way in which people start nodes."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster import FAST, REPO, Cluster, assert_exactly_once
from waiting import DEADLINE_S, until

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
