"""Any node, any phase, killed or stopped: the run goes on, and every task is in every merged file once. Real daemons.

A sample runs every day; the whole matrices, 112 cases: `python -m pytest tests/test_matrix.py`.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster, all_gone, assert_exactly_once, leftovers, rolled_out_twice
from test_placement import APART, versions
from waiting import until

from fsbarrier.program import PHASE_NAMES

HELD = Path(__file__).parent / "programs" / "held.py"
#: in which a stopped node is found; a killed one is found at once
DEAD_S = {"SIGSTOP": 6.0, "SIGKILL": 30.0}
QUICK = (
    "coordination.beat_s=0.15",
    "toy.phase_s=0.05",
    "toy.tasks=24",
)
ROLLOUTS = (2, 6)
EVERY_DAY = {("SIGKILL", 0, 4), ("SIGSTOP", 2, 6)}
CASES = [
    pytest.param(name, rank, phase, marks=[] if (name, rank, phase) in EVERY_DAY else pytest.mark.slow)
    for phase in range(len(PHASE_NAMES))
    for rank in range(3)
    for name in ("SIGKILL", "SIGSTOP")
]


@pytest.mark.parametrize(("name", "rank", "phase"), CASES)
def test_the_run_goes_on_when_a_node_is_struck_in_any_row(
    tmp_path: Path, name: str, rank: int, phase: int
) -> None:
    iterations = 1 if name == "SIGKILL" and phase < 12 else 2
    flags = (
        "--iterations",
        str(iterations),
        *QUICK,
        f"coordination.dead_s={DEAD_S[name]:g}",
        f"custom.hold={phase}",
    )
    with Cluster(tmp_path, 3, *flags, program=str(HELD), real=True) as cluster:
        cluster.start()
        others = [other for other in range(3) if other != rank]
        cluster.beating(rank, lambda beat: (beat.iteration, beat.phase) == (1, phase))
        if phase in ROLLOUTS:  # with something durable, and something missing
            cluster.beating(rank, lambda beat: beat.progress.get("done", 0) >= 2)
        tree = cluster.tree(rank)
        cluster.signal(rank, signal.Signals[name])
        if name == "SIGKILL":
            assert all_gone(tree)
            assert_the_others_end(cluster, others)
            for split in ("train", "test"):
                assert rolled_out_twice(cluster.log_path, 1, split) == []
        else:
            for other in others:
                cluster.wait_for(
                    lambda e, other=other: (
                        (e["event"], e["node_rank"], e["generation"]) == ("generation_started", other, 2)
                    )
                )
            cluster.signal(rank, signal.SIGCONT)
            assert_the_others_end(cluster, others)
            assert_the_zombie_says_so(cluster, rank)
        assert_the_loss_is_named(cluster, rank, phase, others)
        for split in ("train", "test"):
            assert_exactly_once(cluster.log_path, iterations, split=split)
        assert leftovers(cluster.log_path) == {}


@pytest.mark.slow
@pytest.mark.parametrize("phase", range(len(PHASE_NAMES)))
@pytest.mark.parametrize("rank", [0, 1], ids=["the only trainer", "a sampler"])
def test_a_node_with_one_role_is_struck(tmp_path: Path, rank: int, phase: int) -> None:
    """Nodes 1 and 2 roll out, also ahead while node 0 trains. Nothing of it is lost or doubled, or older than one policy version."""
    flags = ("--iterations", "2", *QUICK, *APART, "rollout.ahead=1", f"custom.hold={phase}")
    with Cluster(tmp_path, 3, *flags, program=str(HELD), real=True) as cluster:
        cluster.start()
        cluster.beating(rank, lambda beat: (beat.iteration, beat.phase) == (1, phase))
        if phase in (*ROLLOUTS, 10):  # with something durable, and something missing
            cluster.beating(1, lambda beat: beat.progress.get("done", 0) >= 2)
        tree = cluster.tree(rank)
        cluster.kill(rank)
        assert all_gone(tree)
        if rank == 0:
            cluster.wait_for(lambda e: e["event"] == "node_lost" and e.get("waiting") is True)
            cluster.start(0)
        left = {other: 0 for other in range(3) if rank == 0 or other != rank}
        assert cluster.wait(*left) == left, cluster.said_by_all()
        first, second = versions(cluster.log_path, 2)
        assert first == [0] and {*second} <= {0, 1}
        twice = [
            rolled_out_twice(cluster.log_path, iteration, split)
            for iteration in (1, 2)
            for split in ("train", "test")
        ]
        assert twice == [[]] * 4
        if phase == 10:
            assert 0 in second, "what was rolled out ahead is used"
        assert leftovers(cluster.log_path) == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("back", "apart"),
    [((1, 2), False), ((1,), False), ((1,), True)],
    ids=["both are back", "one is back", "the first one is back, without which the others had gone on"],
)
def test_a_role_comes_back_whose_holders_are_all_killed(
    tmp_path: Path, back: tuple[int, ...], apart: bool
) -> None:
    """I18. Nodes 1 and 2 roll out, and node 0 trains: it goes on with whoever of them is started again."""
    flags = ("--iterations", "2", *QUICK, *APART, "rollout.ahead=1", "custom.hold=10")
    with Cluster(tmp_path, 3, *flags, program=str(HELD)) as cluster:
        cluster.start()
        for rank in (1, 2):
            cluster.beating(rank, lambda beat: (beat.iteration, beat.phase) == (1, 10))
        cluster.kill(1)
        if apart:
            cluster.wait_for(lambda e: (e["event"], e["generation"]) == ("generation_started", 2))
        cluster.kill(2)
        cluster.wait_for(lambda e: e["event"] == "node_lost" and e.get("waiting") is True)
        cluster.start(*back)
        left = {rank: 0 for rank in (0, *back)}
        assert cluster.wait(*left) == left, cluster.said_by_all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "trainer", "after", "back"),
    [(1, 0, False, False), (1, 0, True, False), (0, 2, False, False), (0, 0, True, True)],
    ids=[
        "a sampler while another node trains",
        "a sampler after that",
        "the leader, which does not train",
        "the only trainer after it was done",
    ],
)
def test_an_update_is_made_once_whoever_is_struck(
    tmp_path: Path, victim: int, trainer: int, after: bool, back: bool
) -> None:
    """I4, I19. Only the node that trains could make it begin again, before it is done. The others are in the middle of their rollout."""
    samplers = ",".join(str(rank) for rank in range(3) if rank != trainer)
    # Node 0 takes `hold_s`, the others `others_s`.
    seconds = (
        {"custom.hold_s": 3, "custom.others_s": 90}
        if trainer == 0
        else {"custom.hold_s": 90, "custom.others_s": 3}
    )
    flags = ("--iterations", "2", *QUICK, "rollout.ahead=1", "custom.hold=10")
    flags += (f"placement.rollout=node:{samplers}", f"placement.update=node:{trainer}")
    flags += tuple(f"{name}={value}" for name, value in seconds.items())
    with Cluster(tmp_path, 3, *flags, program=str(HELD)) as cluster:
        cluster.start()
        cluster.beating(victim, lambda beat: (beat.iteration, beat.phase) == (1, 10))
        if after:
            fact = f"coordination/gen-000001/p10-update/iter-000001.node-{trainer:04d}.done"
            until((cluster.log_path / fact).exists, cluster.said_by_all)
        cluster.kill(victim)
        if back:
            cluster.wait_for(lambda e: e["event"] == "node_lost" and e.get("waiting") is True)
            cluster.start(victim)
        left = {rank: 0 for rank in range(3) if back or rank != victim}
        assert cluster.wait(*left) == left, cluster.said_by_all()
        events = cluster.events()
    goes_on = [e for e in events if (e["event"], e["generation"]) == ("generation_started", 2)]
    assert {(e["iteration"], e["phase_name"]) for e in goes_on} == {(1, "weights_publish")}
    published = [e["folder"] for e in events if e["event"] == "weights_published"]
    assert published[0] == "policy-000001.g0001", "what was made in the first generation"
    lost = [e for e in events if e["event"] == "node_lost"]
    assert {e.get("finishing", False) for e in lost} == {not after}
    if not after:
        assert "the others first finish the update" in cluster.said_by_all()


@pytest.mark.slow
@pytest.mark.parametrize("phase", [2, 4, 10, 11])
def test_the_leader_and_then_the_next_one_are_struck(tmp_path: Path, phase: int) -> None:
    """Node 0 dies, node 1 takes over and dies as soon as it leads: node 2 does the rest alone."""
    flags = (
        "--iterations",
        "1",
        *QUICK,
        f"coordination.dead_s={DEAD_S['SIGKILL']:g}",
        f"custom.hold={phase}",
    )
    with Cluster(tmp_path, 3, *flags, program=str(HELD), real=True) as cluster:
        cluster.start()
        for rank in range(3):
            cluster.beating(rank, lambda beat: (beat.iteration, beat.phase) == (1, phase))
        cluster.kill(0)
        cluster.wait_for(lambda e: e["event"] == "generation_proposed" and e["number"] == 2)
        cluster.kill(1)
        assert cluster.wait(2) == {2: 0}, cluster.said(2)
        lost = [item for e in cluster.events() if e["event"] == "node_lost" for item in e["lost"]]
        assert {item["node_rank"] for item in lost} == {0, 1}
        for split in ("train", "test"):
            assert_exactly_once(cluster.log_path, 1, split=split)
            assert rolled_out_twice(cluster.log_path, 1, split) == []
        assert leftovers(cluster.log_path) == {}


def assert_the_others_end(cluster: Cluster, others: list[int]) -> None:
    assert cluster.wait(*others) == dict.fromkeys(others, 0), "\n".join(map(cluster.said, range(3)))


def assert_the_zombie_says_so(cluster: Cluster, rank: int) -> None:
    """It ends what it was doing, joins anew, and takes part again or learns that all is done."""
    assert cluster.wait(rank) == {rank: 0}, cluster.said(rank)
    mine = [e for e in cluster.events() if e["node_rank"] == rank]
    left = next(e for e in mine if e["event"] == "left_generation")
    assert left["newest"] == 2 and f"node {rank}" in left["reason"]
    assert not [e for e in mine[mine.index(left) + 1 :] if e["generation"] in (1, 2)]
    assert [e["state"] for e in mine if e["event"] == "node_ended"] == ["finished"]
    assert "it rejoins" in cluster.said(rank)


def assert_the_loss_is_named(cluster: Cluster, rank: int, phase: int, others: list[int]) -> None:
    events, found = cluster.events(), list[dict[str, Any]]()
    for other in others:
        told = [e for e in events if e["event"] == "node_lost" and e["node_rank"] == other]
        lost: list[dict[str, Any]] = [item for e in told for item in e["lost"]]
        assert [item["node_rank"] for item in lost] == [rank], told
        assert (lost[0]["iteration"], lost[0]["phase"], lost[0]["phase_name"]) == (
            1,
            phase,
            PHASE_NAMES[phase],
        )
        assert lost[0]["host"] and lost[0]["incarnation"] == 1
        # One of them may learn of it from the other, before it has found it itself.
        found += [lost[0]] * (not lost[0]["why"].startswith("found by node"))
        assert lost[0]["log"], "its last log lines"
        said = cluster.said(other)
        assert (
            f"node {rank} ({lost[0]['host']}) is lost" in said
            and f"phase {phase} {PHASE_NAMES[phase]}" in said
        )
        assert "last heartbeat seen" in said and f"| node {rank}: daemon.log: " in said
    ages = [item["beat_age_s"] for item in found if "its daemon was killed" not in item["why"]]
    assert found and all(age > DEAD_S["SIGSTOP"] / 2 for age in ages), found
