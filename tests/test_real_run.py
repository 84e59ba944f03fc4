"""The whole loop once, for real: real vLLM on CPU, real torchrun over gloo, two iterations of the built-in task; at night two nodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cluster import REPO, Cluster, all_gone, leftovers, rolled_out_twice
from waiting import until

from fsbarrier.program import PHASE_NAMES
from fsbarrier.rundir import checkpoints
from fsbarrier.trajectories import load

SMALL = ("rollout.tasks=24", "rollout.samples=8", "eval.tasks=32", "optimizer.warmup_steps=0")


@pytest.mark.engine
@pytest.mark.torch
@pytest.mark.timeout(900)
@pytest.mark.parametrize("nodes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_two_iterations_train_and_serve_new_weights(tmp_path: Path, nodes: int) -> None:
    copies = tmp_path / "copies"
    own = (f"checkpoint.weights_dir={copies}", "checkpoint.trainer_every=9")
    with Cluster(tmp_path, nodes, "--iterations", "2", *SMALL, *own, program="rl") as cluster:
        cluster.start()
        assert set(cluster.wait(deadline_s=800).values()) == {0}, cluster.said_by_all()
        events, paths = cluster.events(), cluster.paths
        assert_phases_in_order(cluster)
        assert_trajectories_open_in_torch(paths, nodes)
        assert_new_weights_are_served(paths, events, nodes)
        assert leftovers(cluster.log_path) == {} and not list(copies.iterdir())
        assert [e["trainer_state"] for e in events if e["event"] == "updated"] == ["in memory", "saved"]


@pytest.mark.engine
@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("victim", "phase"), [(0, 2), (1, 10)])
def test_a_node_dies_in_the_real_thing(tmp_path: Path, victim: int, phase: int) -> None:
    """The leader while it rolls out; the other node in the middle of the torchrun that both are in."""
    quick = ("coordination.beat_s=1", "coordination.dead_s=10")
    with Cluster(tmp_path, 2, "--iterations", "1", *SMALL, *quick, program="rl") as cluster:
        cluster.start()
        cluster.wait_for(
            lambda e: (e["event"], e["node_rank"], e["phase"]) == ("phase_started", victim, phase),
            deadline_s=400,
        )
        if phase == 2:
            cluster.beating(victim, lambda beat: beat.progress.get("done", 0) >= 2, deadline_s=400)
        else:
            cluster.running(victim, "fsbarrier.workers.update")
        tree = cluster.tree(victim)
        cluster.kill(victim)
        assert all_gone(tree)
        assert cluster.wait(1 - victim, deadline_s=400) == {1 - victim: 0}, cluster.said(1 - victim)
        paths, events = cluster.paths, cluster.events()
        assert rolled_out_twice(cluster.log_path, 1, "train") == []
        assert len(load(paths.merged("train", 1))["trajectories"]) == 24 * 8
        published = [e for e in events if e["event"] == "weights_published"]
        assert [(e["node_rank"], e["policy_version"]) for e in published] == [(1 - victim, 1)]
        assert leftovers(cluster.log_path) == {}


#: Python runs it in each process of the node: the one that trains waits for its end when it has left its copy of the new weights.
WAITS_AFTER_ITS_COPY = """
import os, signal, sys
from pathlib import Path
if "-m" in sys.orig_argv and sys.orig_argv[sys.orig_argv.index("-m") + 1] == "fsbarrier.workers.update":
    from fsbarrier.training.checkpoint_write import NodeCopy
    write = NodeCopy.write
    def write_and_wait(self, *args):
        write(self, *args)
        Path(os.environ["FSBARRIER_TEST_COPIED"]).touch()
        signal.pause()
    NodeCopy.write = write_and_wait
"""


@pytest.mark.engine
@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_node_dies_between_its_copy_of_the_weights_and_the_commit(tmp_path: Path, victim: int) -> None:
    """Its copy goes with it, and what the other serves in the end is what a committed version holds."""
    quick = ("coordination.beat_s=1", "coordination.dead_s=10")
    copies, site, copied = tmp_path / "copies", tmp_path / "site", tmp_path / "copied"
    site.mkdir()
    (site / "sitecustomize.py").write_text(WAITS_AFTER_ITS_COPY)
    own = (f"checkpoint.weights_dir={copies}",)
    with Cluster(tmp_path, 2, "--iterations", "1", *SMALL, *quick, *own, program="rl") as cluster:
        cluster.env[victim] = {"PYTHONPATH": f"{site}:{REPO}", "FSBARRIER_TEST_COPIED": str(copied)}
        cluster.start()
        until(copied.exists, lambda: cluster.said(victim), deadline_s=600)
        paths = cluster.paths
        (unchecked,) = {path.parents[1].stem for path in copies.glob("*/*.unchecked/model/*.safetensors")}
        first = paths.checkpoints / unchecked
        assert not (first / checkpoints.MANIFEST).exists()
        tree = cluster.tree(victim)
        cluster.kill(victim)
        assert all_gone(tree)
        assert cluster.wait(1 - victim, deadline_s=400) == {1 - victim: 0}, cluster.said(1 - victim)
        assert not (first / checkpoints.MANIFEST).exists()
        served = paths.served_model.resolve().parent
        assert served != first and checkpoints.verify(served).policy_version == 1
        events = [e for e in cluster.events() if "weights_from" in e]
        loaded = [(e["node_rank"], e["serving"], e["weights_from"]) for e in events]
        assert (1 - victim, 1, "node") in loaded and all(rank != victim for rank, *_ in loaded)
        # The next daemon that makes a copy here removes what the dead one has left.
        (left,) = copies.iterdir()
        assert [path.name for path in left.iterdir()] == [f"{first.name}.unchecked"]
        assert leftovers(cluster.log_path) == {}


def assert_phases_in_order(cluster: Cluster) -> None:
    for rank in range(cluster.nodes):
        mine = [e for e in cluster.events() if e["node_rank"] == rank]
        started = [(e["iteration"], e["phase"]) for e in mine if e["event"] == "phase_started"]
        assert started == [(i, p) for i in (1, 2) for p in range(len(PHASE_NAMES))]
        ready = [e for e in mine if e["event"] == "engine_ready"]
        assert [e["engine_action"] for e in ready] == ["started", "reloaded", "reloaded"]


def assert_trajectories_open_in_torch(paths: Any, nodes: int) -> None:
    import torch

    for split, expected in (("train", 24 * 8), ("test", 32)):
        for iteration in (1, 2):
            merged = torch.load(paths.merged(split, iteration), weights_only=True)
            assert len(merged["trajectories"]) == expected
            assert {t["policy_version"] for t in merged["trajectories"]} == {iteration - 1}
            parts = [load(paths.rank_checkpoint(split, iteration, rank)) for rank in range(nodes)]
            assert sum(len(part["trajectories"]) for part in parts) == expected
    one = merged["trajectories"][0]
    assert len(one["token_ids"]) == len(one["loss_mask"]) == len(one["logprobs"])
    assert one["messages"][-1]["role"] == "assistant"


def assert_new_weights_are_served(paths: Any, events: list[dict[str, object]], nodes: int) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = [(e["serving"], e["weights_from"]) for e in events if "weights_from" in e]
    assert sorted(loaded) == [(version, "node") for version in (1, 2) for _ in range(nodes)]
    updates = [e for e in events if e["event"] == "updated"]
    assert [e["policy_version"] for e in updates] == [1, 2]
    gaps = [float(str(e["logprob_gap_max"])) for e in updates]
    assert max(gaps) < 1e-3, "the engine must serve what the trainer trains, also after a reload in place"
    served = AutoModelForCausalLM.from_pretrained(paths.served_model)
    first = AutoModelForCausalLM.from_pretrained(paths.demo / "model")
    moved = [not torch.equal(a, b) for a, b in zip(served.parameters(), first.parameters(), strict=True)]
    assert any(moved)
    assert AutoTokenizer.from_pretrained(paths.served_model)("dcba=").input_ids
    manifest = json.loads((paths.served_model.resolve().parent / "MANIFEST.json").read_bytes())
    assert manifest["policy_version"] == 2
