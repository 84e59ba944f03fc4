"""The node's own vLLM is killed in the middle of a rollout: the phase is done again with a new one, and keeps every finished group."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
from cluster import Cluster, leftovers

from fsbarrier.rundir.paths import RunPaths
from fsbarrier.trajectories import iter_trajectories, scan_shard

TASKS, SAMPLES = 512, 8
DEADLINE_S = 400.0


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_engine_costs_only_what_was_in_flight(tmp_path: Path) -> None:
    flags = ("--iterations", "1", "--rl-phase", "rollout", "--rollout-split", "train-only")
    flags += (f"rollout.tasks={TASKS}", f"rollout.samples={SAMPLES}", "rollout.concurrency=8")
    with Cluster(tmp_path, 1, *flags, program="rl") as cluster:
        cluster.start()
        paths = RunPaths(cluster.log_path)
        finished_before = wait_for_groups(paths, cluster)
        os.kill(engine_of(cluster.processes[0].pid), signal.SIGKILL)
        assert cluster.wait(deadline_s=DEADLINE_S) == {0: 0}, cluster.said(0)
        groups = Counter(
            trajectory["task_index"] for trajectory in iter_trajectories(paths.merged("train", 1))
        )
        assert len(groups) == TASKS and set(groups.values()) == {SAMPLES}
        ends = {trajectory["finish_reason"] for trajectory in iter_trajectories(paths.merged("train", 1))}
        assert ends <= {"stop", "length"}, "what the killed engine cut off counts for nothing"
        (ready,) = [event for event in cluster.events() if event["event"] == "engine_ready"]
        assert ready["engine_note"].startswith("restarted: the server was gone"), ready
        assigned = [event for event in cluster.events() if event["event"] == "generation_started"]
        assert len(assigned) == 2, "the phase was tried again once"
        parts = sorted(paths.trajectories("train").glob("*.part"))
        assert len(parts) == 2 and len(scan_shard(parts[1]).groups) <= TASKS - finished_before
        assert leftovers(cluster.log_path) == []


def wait_for_groups(paths: RunPaths, cluster: Cluster) -> int:
    """Until some groups, but not all, are on disk; how many."""
    end, pause = time.monotonic() + DEADLINE_S, threading.Event()
    while time.monotonic() < end and cluster.processes[0].poll() is None:
        for part in paths.trajectories("train").glob("*.part"):
            count = len(scan_shard(part).groups)
            if 0 < count < TASKS // 2:
                return count
        pause.wait(0.01)
    raise AssertionError(f"no rollout under way\n{cluster.said(0)}")


def engine_of(daemon: int) -> int:
    """The server's process below a daemon: the innermost one whose command names it."""
    below = psutil.Process(daemon).children(recursive=True)
    servers = [each for each in below if "fsbarrier.workers.vllm_server" in each.cmdline()]
    return int(servers[-1].pid)
