"""`--rank auto`: every node gets a rank of its own, and the same one again; `--num-nodes A:B`: who comes later is taken in."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from cluster import Cluster

from fsbarrier.coordination.loop import NodeLoop
from fsbarrier.coordination.observer import Observer
from fsbarrier.coordination.ranks import free_ranks
from fsbarrier.coordination.run_rules import poll_intervals
from fsbarrier.protocol.facts import Beat, Join
from fsbarrier.rundir import runrecord
from fsbarrier.rundir.record_store import PosixStore
from fsbarrier.rundir.runrecord import RunRecord
from fsbarrier.settings.resolve import resolve
from fsbarrier.store.identity import host_name

STORE = PosixStore()
#: nothing here is found out by a silence, however slow the machine is
PATIENT = (
    "coordination.beat_s=0.2",
    "coordination.dead_s=120",
    "coordination.last_call_s=0.5",
)


@pytest.fixture
def record(tmp_path: Path) -> RunRecord:
    values = {"program": "ping", "num_nodes": 5, "coordination.dead_s": 2.0}
    settings = resolve((), values, cross_checks=False)
    return runrecord.publish(runrecord.new(tmp_path / "run", settings, tasks={}, model=None))


def started(record: RunRecord, rank: int, host: str, *, incarnation: int = 1) -> None:
    STORE.make_dir(record.paths.joins)
    assert STORE.create(record.paths.join(rank, incarnation), Join(rank, incarnation, host, 1, "boot"))


def beat(
    record: RunRecord, rank: int, state: str = "running", counter: int = 1, host: str = "elsewhere"
) -> None:
    STORE.make_dir(record.paths.status)
    STORE.put(record.paths.beat(rank, 1), Beat(rank, 1, counter, host, 1, state))


def order(record: RunRecord) -> list[tuple[int, int]]:
    return [(start.rank, start.incarnation) for start in free_ranks(record.paths, 5, 2.0)]


def test_one_s_own_rank_first_then_free_ones_then_those_that_ended_then_silent_ones(
    record: RunRecord,
) -> None:
    started(record, 0, "a")
    beat(record, 0)
    started(record, 1, "b")
    beat(record, 1, "left")
    started(record, 2, host_name())
    beat(record, 2, host=host_name())
    # It has joined and is about to write its first heartbeat.
    started(record, 4, host_name())
    assert order(record) == [(2, 2), (3, 1), (1, 2), (0, 2), (2, 2), (4, 2)]


def test_a_rank_of_which_something_is_heard_is_not_free(record: RunRecord) -> None:
    for rank in range(5):
        started(record, rank, "a")
        beat(record, rank)
    ended = threading.Event()

    def beating() -> None:
        counter = 1
        while not ended.wait(0.01):
            counter += 1
            for rank in (0, 1, 2):
                beat(record, rank, counter=counter)

    thread = threading.Thread(target=beating)
    thread.start()
    try:
        assert order(record) == [(3, 2), (4, 2)]
    finally:
        ended.set()
        thread.join()


def loop(record: RunRecord, pid: int) -> NodeLoop:
    observer = Observer(STORE, record.paths, None, poll_intervals(record.settings))  # type: ignore[arg-type]
    observer.prepare()
    join = Join(1, 0, "h", pid, "boot")
    return NodeLoop(STORE, observer, None, None, join, lambda *_: None)  # type: ignore[arg-type]


def members(cluster: Cluster, ranks: list[int]) -> None:
    cluster.wait_for(lambda e: e["event"] == "generation_started" and sorted(e["members"]) == ranks)


def test_nodes_find_their_ranks_and_come_back_to_them(tmp_path: Path) -> None:
    """Each with a temporary folder of its own, so that only the shared directory tells them apart, as on hosts of their own."""
    words = ("--program", "ping", "--rank", "auto", "--num-nodes", "2:3", *PATIENT)
    with Cluster(tmp_path, 4, program="ping") as cluster:

        def start(*numbers: int) -> None:
            for number in numbers:
                folder = tmp_path / f"host{number}"
                folder.mkdir(exist_ok=True)
                cluster.env[number] = {"TMPDIR": str(folder)}
                cluster.start_as(number, *words)

        start(0, 1)
        members(cluster, [0, 1])
        start(2)
        members(cluster, [0, 1, 2])
        start(3)
        assert cluster.wait(3) == {3: 2}, cluster.said(3)
        assert "all 3 ranks of" in cluster.said(3)
        joined = {e["pid"]: e["node_rank"] for e in cluster.events() if e["event"] == "node_joined"}
        ranks = {number: joined[cluster.processes[number].pid] for number in (0, 1, 2)}
        assert sorted(ranks.values()) == [0, 1, 2]
        assert f"this is node {ranks[2]}" in cluster.said(2)
        cluster.kill(1)
        start(1)
        again = cluster.wait_for(lambda e: e["event"] == "node_joined" and e["incarnation"] == 2)
        assert (again["node_rank"], again["pid"]) == (ranks[1], cluster.processes[1].pid)
