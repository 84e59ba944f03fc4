"""After SIGKILL of a daemon nothing of its real vLLM, rollout and torchrun is left within 5 s; and other people's are untouched."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from cluster import Cluster, all_gone, command_lines, leftovers, rolled_out_twice

SMALL = ("rollout.tasks=256", "rollout.samples=8", "eval.tasks=8", "coordination.beat_s=0.5")
PAUSE = "import signal; signal.pause()"
FOREIGN = (("vllm", "serve", "VLLM::EngineCore"), ("fsbarrier.workers.torchrun", "fsbarrier.workers.rollout"))


@pytest.mark.engine
@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_daemon_takes_its_engine_and_programs_along(tmp_path: Path) -> None:
    foreign = [
        subprocess.Popen([sys.executable, "-c", PAUSE, *words], start_new_session=True) for words in FOREIGN
    ]
    try:
        with Cluster(tmp_path, 1, "--iterations", "1", *SMALL, program="rl") as cluster:
            cluster.start()
            cluster.wait_for(lambda e: e["event"] == "phase_started" and e["phase"] == 2)
            cluster.beating(0, lambda beat: beat.progress.get("done", 0) >= 2, deadline_s=400)
            tree = cluster.running(0, "VLLM::EngineCore", "fsbarrier.workers.rollout")
            cluster.kill(0)
            assert all_gone(tree), command_lines(tree)

            cluster.start()
            cluster.wait_for(lambda e: (e["event"], e["phase"]) == ("phase_started", 10), deadline_s=400)
            tree = cluster.running(0, "fsbarrier.workers.torchrun", "fsbarrier.workers.update")
            cluster.kill(0)
            assert all_gone(tree), command_lines(tree)

            assert leftovers(cluster.log_path) == {}
            assert rolled_out_twice(cluster.log_path, 1, "train") == []
            assert [process.poll() for process in foreign] == [None, None]
    finally:
        for process in foreign:
            process.kill()
            process.wait()
