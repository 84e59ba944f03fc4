"""All nodes killed at once, at random instants, and the same commands again: the run goes on as if nothing had happened.

A sample runs every day; a hundred restarts: `python -m pytest tests/test_restarts.py`.
"""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest
from cluster import Cluster, all_gone, assert_exactly_once, leftovers, rolled_out_twice

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
