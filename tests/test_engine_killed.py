"""A vLLM of the node's own is killed in the middle of a rollout: another goes on, or the phase is tried again, and nothing is lost."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
from cluster import Cluster, leftovers
from waiting import until

from fsbarrier.trajectories import iter_trajectories, scan_rank_file

TASKS, SAMPLES = 512, 8
DEADLINE_S = 400.0


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_killed_engine_costs_only_what_was_in_flight(tmp_path: Path, replicas: int) -> None:
    flags = ("--iterations", "1", "--rl-phase", "rollout", "--rollout-split", "train-only")
    flags += (f"rollout.tasks={TASKS}", f"rollout.samples={SAMPLES}", "rollout.concurrency=8")
    flags += (f"engine.replicas={replicas}",)
    with Cluster(tmp_path, 1, *flags, program="rl") as cluster:
        cluster.start()
        paths = cluster.paths
        wait_for_groups(paths, cluster)
        os.kill(engine_of(cluster.processes[0].pid), signal.SIGKILL)
        assert cluster.wait(deadline_s=DEADLINE_S) == {0: 0}, cluster.said(0)
        groups = Counter(
            trajectory["task_index"] for trajectory in iter_trajectories(paths.merged("train", 1))
        )
        assert len(groups) == TASKS and set(groups.values()) == {SAMPLES}
        ends = {trajectory["finish_reason"] for trajectory in iter_trajectories(paths.merged("train", 1))}
        assert ends <= {"stop", "length"}, "what the killed engine cut off counts for nothing"
        ready = [event["replica"] for event in cluster.events() if event["event"] == "engine_ready"]
        generations = [event for event in cluster.events() if event["event"] == "generation_started"]
        if replicas == 2:
            assert ready == [0, 1] and len(generations) == 1, "the phase was not tried again"
        else:
            assert ready == [0, 0] and len(generations) == 2
            (failed,) = [event for event in cluster.events() if event["event"] == "work_failed"]
            assert "vLLM was ended by signal 9" in failed["error"]
        logs = sorted(path.name for path in paths.node_logs(1, 0).glob("vllm*.log"))
        assert logs == ["vllm-1.log", "vllm.log"][-replicas:]
        assert leftovers(cluster.log_path) == {}


def wait_for_groups(paths: Any, cluster: Cluster) -> None:
    """Until some groups, but not all, are on disk."""

    def under_way() -> bool:
        parts = paths.trajectories("train").glob("*.part")
        return any(0 < len(scan_rank_file(part).groups) < TASKS // 2 for part in parts)

    until(
        under_way,
        lambda: cluster.said(0),
        deadline_s=DEADLINE_S,
        lives=lambda: cluster.processes[0].poll() is None,
    )


def engine_of(daemon: int) -> int:
    """The server's process below a daemon: the innermost one whose command names it."""
    below = psutil.Process(daemon).children(recursive=True)
    servers = [each for each in below if "fsbarrier.workers.vllm_server" in each.cmdline()]
    return int(servers[-1].pid)
