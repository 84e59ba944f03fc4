"""Which nodes and accelerators roll out and which train, and rollouts of the next iteration while the update runs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cluster import FAST, Cluster
from commands import typed
from waiting import until

from fsbarrier.run.admission import check_nodes
from fsbarrier.run.fingerprint import Fingerprint
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.settings.placement import Ranges
from fsbarrier.settings.sections import Settings
from fsbarrier.trajectories import load

APART = ("placement.rollout=node:1-2", "placement.update=node:0")


# --- ranges -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "each", "held"),
    [
        ("all", 8, {0: [*range(8)], 1: [*range(8)], 2: [*range(8)], 3: [*range(8)]}),
        ("all", 0, {0: [], 1: [], 2: [], 3: []}),
        ("0-19", 8, {0: [*range(8)], 1: [*range(8)], 2: [0, 1, 2, 3]}),
        ("20-23", 8, {2: [4, 5, 6, 7]}),
        ("24-31", 8, {3: [*range(8)]}),
        ("0, 9-10 ,31", 8, {0: [0], 1: [1, 2], 3: [7]}),
        ("node:0-1,3", 2, {0: [0, 1], 1: [0, 1], 3: [0, 1]}),
        ("node:2", 0, {2: []}),
        ("0-3", 0, {}),
    ],
)
def test_ranges_count_accelerators_in_rank_order(
    text: str, each: int, held: Mapping[int, Sequence[int]]
) -> None:
    assert {rank: [*own] for rank, own in Ranges.parse(text).holders(range(4), each).items()} == held


def test_a_lost_node_moves_nobody_elses_accelerators() -> None:
    assert Ranges.parse("8-15").holders([1, 3], 8) == {1: tuple(range(8))}


@pytest.mark.parametrize(
    "text", ["", "3-1", "a", "node:", "0-", "-1", "0;1", "node:0-1,node:2", "ALL", "1.5"]
)
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be all, accelerators such as 0-19,24, or whole nodes"):
        Ranges.parse(text)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["placement.update=3-1"], "placement.update=3-1: must be all, accelerators such as"),
        (["placement.rollout=node:1-3"], "placement.rollout=node:1-3: there is no node 3; nodes are 0 to 2"),
        (
            ["rollout.ahead=1"],
            "rollout.ahead=1: the nodes that train and those that roll out must be different ones",
        ),
        (
            ["rollout.ahead=1", "placement.rollout=node:0-1", "placement.update=node:1-2"],
            "must be different ones",
        ),
        (["rollout.ahead=2", *APART], "rollout.ahead: must be a whole number ≥ 0 and ≤ 1, got 2"),
    ],
)
def test_a_mistake_ends_the_start(tmp_path: Path, words: list[str], said: str) -> None:
    start = ("run", "--master", "--num-nodes", "3", "--program", "toy", "--log-path", str(tmp_path / "run"))
    told = typed(*start, *words, code=2).err
    assert said in told and told.count("\n") == 1, told
    assert not (tmp_path / "run").exists()


def placed(rollout: str, update: str, counts: Sequence[int], ahead: int = 0) -> list[str]:
    """What a start says of nodes with so many accelerators."""
    settings = Settings(num_nodes=len(counts), rank_weights=(1.0,) * len(counts)).with_values(
        {"placement.rollout": rollout, "placement.update": update, "rollout.ahead": ahead}
    )
    nodes = {
        rank: replace(Fingerprint(), accelerators=[("nvidia X", 80 * 2**30, 0)] * count)
        for rank, count in enumerate(counts)
    }
    hosts = {rank: f"host{rank}" for rank in nodes}
    return [
        re.sub(" +", " ", str(one))
        for one in check_nodes(nodes, hosts, settings, 0)
        if "placement" in one.what + one.found or one.what in ("nothing to do", "rollout.ahead=1")
    ]


def test_the_nodes_are_compared_with_the_ranges() -> None:
    assert placed("0-19", "24-31", [8] * 4, ahead=1) == [
        "warning nothing to do 4 of node 2, 5 of node 2, 6 of node 2, 7 of node 2"
    ]
    assert placed("0-7", "8-16", [8, 8]) == [
        "refused placement.update=8-16 there is no accelerator 16; 2 nodes with 8 each have 0 to 15"
    ]
    (refused,) = placed("0-5", "all", [4, 2])
    assert refused.startswith(
        "refused placement.rollout=0-5 numbers count accelerators of equal nodes, and node 0 has 4, node 1 has 2"
    )
    (refused,) = placed("0-11", "12-15", [8, 8], ahead=1)
    assert "node 1 both trains and rolls out" in refused
    assert placed("node:0", "node:1", [4, 2], ahead=1) == []


# --- whole runs ---------------------------------------------------------------------------------------------------------------


def rolled_out(log_path: Path, iteration: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = load(RunPaths(log_path).merged("train", iteration))["trajectories"]
    return found


def versions(log_path: Path, iterations: int, tasks: int = 24) -> list[list[int]]:
    """The policy versions in each iteration's merged file, whose tasks are there once each."""
    for iteration in range(1, iterations + 1):
        counted = Counter(one["task_index"] for one in rolled_out(log_path, iteration))
        assert counted == Counter(range(tasks)), iteration
    return [
        sorted({one["policy_version"] for one in rolled_out(log_path, n)}) for n in range(1, iterations + 1)
    ]


def test_roles_on_different_nodes(tmp_path: Path) -> None:
    """Node 0 leads and rolls out; only node 2 trains, so the programs of the update meet there."""
    flags = ("placement.rollout=node:0-1", "placement.update=node:2", "--iterations", "2")
    with Cluster(tmp_path, 3, *FAST, *flags) as cluster:
        cluster.start()
        assert cluster.wait() == {0: 0, 1: 0, 2: 0}, cluster.said_by_all()
    assert versions(cluster.log_path, 2) == [[0], [1]]
    assert {one["node_rank"] for n in (1, 2) for one in rolled_out(cluster.log_path, n)} == {0, 1}


def test_the_next_iteration_is_rolled_out_while_the_update_trains(tmp_path: Path) -> None:
    with Cluster(tmp_path, 3, *FAST, *APART, "rollout.ahead=1", "--iterations", "4") as cluster:
        cluster.start()
        assert cluster.wait() == {0: 0, 1: 0, 2: 0}, cluster.said_by_all()
        events = cluster.events()
    assert versions(cluster.log_path, 4) == [[0], [0], [1], [2]]
    assert {one["node_rank"] for one in rolled_out(cluster.log_path, 3)} == {1, 2}
    adopted = [
        e["iteration"] for e in events if e["event"] == "parts_adopted" and e["phase_name"] == "train_assign"
    ]
    assert adopted == [2, 3, 4]


@pytest.mark.parametrize(("victim", "back"), [(1, False), (0, True)], ids=["a sampler", "the only trainer"])
def test_a_node_lost_in_the_update(tmp_path: Path, victim: int, back: bool) -> None:
    """Nothing that was rolled out ahead is lost or doubled. Without the only node that trains, the others wait for it."""
    with Cluster(
        tmp_path, 3, *FAST, "toy.phase_s=0.2", *APART, "rollout.ahead=1", "--iterations", "3"
    ) as cluster:
        cluster.start()
        cluster.in_phase(victim, 10, iteration=2)
        cluster.kill(victim)
        if back:
            lost = cluster.wait_for(lambda e: e["event"] == "node_lost" and e.get("waiting") is True)
            assert lost["lost"][0]["node_rank"] == victim
            cluster.start(victim)
        left = {rank: 0 for rank in range(3) if back or rank != victim}
        assert cluster.wait(*left) == left, cluster.said_by_all()
    assert versions(cluster.log_path, 3)[:2] == [[0], [0]]
    assert {version for (*found,) in versions(cluster.log_path, 3)[2:] for version in found} <= {1, 2}


def test_everything_killed_goes_on_with_what_was_rolled_out_ahead(tmp_path: Path) -> None:
    with Cluster(
        tmp_path, 3, *FAST, "toy.phase_s=0.3", *APART, "rollout.ahead=1", "--iterations", "3"
    ) as cluster:
        cluster.start()
        cluster.in_phase(1, 10, iteration=1)
        ahead = RunPaths(cluster.log_path).part("train", 2, 1, 1, 1)
        until(lambda: ahead.exists() and ahead.stat().st_size > 1000, cluster.said_by_all)
        for rank in range(3):
            cluster.kill(rank)
        cluster.start()
        assert cluster.wait() == {0: 0, 1: 0, 2: 0}, cluster.said_by_all()
    assert versions(cluster.log_path, 3) == [[0], [0], [1]]
    kept = [one for one in rolled_out(cluster.log_path, 2) if one["generation"] == 1]
    assert kept, "what the first session had rolled out ahead is used"
