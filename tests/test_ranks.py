"""Which rank a node has: from the launcher's environment, a free one by --rank auto, and that one process has it."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path

import pytest
from cluster import Cluster

from fsbarrier.cli.start import ranks
from fsbarrier.coordination.loop import NodeLoop
from fsbarrier.coordination.observer import Observer
from fsbarrier.coordination.ranks import free_ranks, hold_rank
from fsbarrier.coordination.run_rules import poll_intervals
from fsbarrier.errors import UsageError
from fsbarrier.network import this_host
from fsbarrier.network.this_host import host_name
from fsbarrier.protocol.facts import Beat, Join
from fsbarrier.protocol.membership import GONE, death_notice
from fsbarrier.rundir import runrecord
from fsbarrier.rundir.heartbeats import beats_of_newest_starts
from fsbarrier.rundir.record_store import PosixStore
from fsbarrier.rundir.runrecord import RunRecord
from fsbarrier.settings.resolve import resolve
from fsbarrier.store import reading


def rank(
    environ: dict[str, str], *, master: bool = False, worker: int | None = None, num_nodes: int | None = None
) -> tuple[int, str] | None:
    choice = ranks.node_rank(master=master, worker=worker, environ=environ, num_nodes=num_nodes)
    return None if choice is None else (choice.value, choice.source)


def test_the_first_of_the_launchers_variables_gives_the_rank() -> None:
    order = [
        ("NODE_RANK", {"NODE_RANK": "1"}),
        ("RANK", {"RANK": "2"}),
        ("SLURM_NODEID", {"SLURM_NODEID": "3"}),
        ("JOB_COMPLETION_INDEX", {"JOB_COMPLETION_INDEX": "4"}),
        ("SKYPILOT_NODE_RANK", {"SKYPILOT_NODE_RANK": "5"}),
        ("DSTACK_NODE_RANK", {"DSTACK_NODE_RANK": "6"}),
        ("OMPI_COMM_WORLD_RANK", {"OMPI_COMM_WORLD_RANK": "7", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}),
    ]
    environ: dict[str, str] = {}
    for name, variables in reversed(order):
        environ |= variables
        assert rank(environ) == (int(variables[name]), name)


@pytest.mark.parametrize(
    ("environ", "num_nodes", "used"),
    [
        ({"RANK": "1"}, None, True),
        ({"RANK": "1", "WORLD_SIZE": "3"}, None, True),
        ({"RANK": "1", "WORLD_SIZE": "3"}, 3, True),
        ({"RANK": "1", "WORLD_SIZE": "24"}, 3, False),  # processes: 8 a node
        ({"RANK": "3", "WORLD_SIZE": "3"}, None, False),
        ({"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "1"}, None, False),
        ({"RANK": "8", "WORLD_SIZE": "16", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8"}, None, False),
        ({"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, None, True),
        ({"RANK": "1", "WORLD_SIZE": "many"}, None, False),
    ],
)
def test_rank_counts_only_where_no_world_size_contradicts_it(
    environ: dict[str, str], num_nodes: int | None, used: bool
) -> None:
    assert rank(environ, num_nodes=num_nodes) == ((int(environ["RANK"]), "RANK") if used else None)
    elsewhere = rank({**environ, "SLURM_NODEID": "2"}, num_nodes=num_nodes)
    assert elsewhere is not None and elsewhere[1] == ("RANK" if used else "SLURM_NODEID")


@pytest.mark.parametrize(
    ("environ", "flags", "message"),
    [
        ({}, {"master": True, "worker": 1}, "--master and --worker 1"),
        ({}, {"worker": 3, "num_nodes": 3}, "--worker 3: out of range, this run has 3 nodes, ranks 0 to 2"),
        ({"NODE_RANK": "1"}, {"num_nodes": 1}, "NODE_RANK 1: out of range, this run has one node"),
        ({"NODE_RANK": "-1"}, {}, "NODE_RANK -1: a node rank must be 0 or more"),
        ({"NODE_RANK": "first"}, {}, "NODE_RANK 'first': must be a whole number"),
        ({"SLURM_NODEID": "0x"}, {}, "SLURM_NODEID '0x': must be a whole number"),
        ({"SLURM_NODEID": "1", "SLURM_LOCALID": "3"}, {}, "SLURM_LOCALID 3"),
        (
            {"NODE_RANK": "2", "NNODES": "2"},
            {},
            "NODE_RANK=2 contradicts NNODES=2: ranks start at 0, so the last one is 1",
        ),
        ({"DSTACK_NODE_RANK": "5", "DSTACK_NODES_NUM": "4"}, {}, "contradicts DSTACK_NODES_NUM=4"),
        ({"PET_NODE_RANK": "1", "RANK": "2"}, {}, "PET_NODE_RANK=1 and RANK=2: contradict each other"),
        (
            {"LWS_WORKER_INDEX": "1", "JOB_COMPLETION_INDEX": "0"},
            {},
            "LWS_WORKER_INDEX=1 and JOB_COMPLETION_INDEX=0",
        ),
        (
            {"NODE_RANK": "1", "NNODES": "2", "PET_NODE_RANK": "1", "PET_NNODES": "3"},
            {},
            "NNODES=2 and PET_NNODES=3: contradict each other about the number of nodes",
        ),
        (
            {"PET_NODE_RANK": "1", "PET_NNODES": "2:4"},
            {},
            "PET_NNODES=2:4: a range of nodes; give --num-nodes 2:4",
        ),
        (
            {"SM_CURRENT_HOST": "algo-3", "SM_HOSTS": '["algo-1"]'},
            {},
            'SM_HOSTS=["algo-1"]: does not name SM_CURRENT_HOST=algo-3',
        ),
        ({"SM_CURRENT_HOST": "algo-3", "SM_HOSTS": "algo-3"}, {}, "SM_HOSTS=algo-3: does not name"),
        (
            {"LSF_PM_TASKID": "3", "LSB_MCPU_HOSTS": "h1 4 h2 4"},
            {},
            "LSF_PM_TASKID=3 contradicts LSB_MCPU_HOSTS=h1 4 h2 4: ranks start at 0, so the last one is 1",
        ),
    ],
)
def test_an_impossible_rank_is_refused_with_its_source(
    environ: dict[str, str], flags: dict[str, int], message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        rank(environ, **flags)  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_a_number_of_nodes_that_is_typed_wins_over_the_launcher_s() -> None:
    assert rank({"NODE_RANK": "2", "NNODES": "2"}, num_nodes=4) == (2, "NODE_RANK")
    assert rank({"NODE_RANK": "1", "NNODES": "2"}) == (1, "NODE_RANK")


def test_the_number_of_nodes_comes_from_the_same_launcher() -> None:
    everything = {"SLURM_NNODES": "4", "WORLD_SIZE": "5", "NNODES": "6", "SKYPILOT_NUM_NODES": "7"}

    def count(source: str, environ: dict[str, str]) -> int | None:
        choice = ranks.count_nodes(ranks.Choice(0, source), environ)
        return None if choice is None else choice.value

    assert count("SLURM_NODEID", everything) == 4
    assert count("RANK", everything) == 5
    assert count("NODE_RANK", everything) == count("--master", everything) == 6
    assert count("SKYPILOT_NODE_RANK", everything) == 7
    assert count("JOB_COMPLETION_INDEX", everything) is count("--worker", everything) is None
    assert ranks.count_nodes(None, everything) is None
    assert count("SLURM_NODEID", {"SLURM_NNODES": "9", "SLURM_STEP_NUM_NODES": "2"}) == 2
    with pytest.raises(UsageError, match="NNODES 0"):
        count("NODE_RANK", {"NNODES": "0"})
    with pytest.raises(UsageError, match="WORLD_SIZE 'x'"):
        count("RANK", {"WORLD_SIZE": "x"})


@pytest.mark.parametrize(
    ("host", "interface", "kind"),
    [
        ("192.0.2.5", "eth0", "default"),
        ("10.0.0.5", "ib0", "other"),
        ("2001:db8::5", "eth0", "other"),
        ("172.17.0.1", "docker0", "bridge"),
        ("10.42.0.0", "flannel.1", "bridge"),
        ("169.254.3.4", "eth1", "link-local"),
        ("fe80::1%eth0", "eth0", "link-local"),
        ("127.0.1.1", "lo", "loopback"),
        ("::1", "lo", "loopback"),
    ],
)
def test_each_address_is_of_its_kind(host: str, interface: str, kind: str) -> None:
    assert this_host.kind_of(host, interface, {"192.0.2.5"}) == kind


# --- --rank auto ----------------------------------------------------------------------------------------------------------------

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


# --- one process a rank ---------------------------------------------------------------------------------------------------------

FOREVER_S = 250.0


@pytest.fixture
def locked_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunRecord:
    """A run; its nodes see a temporary directory of their own, as in a container."""
    in_container(monkeypatch, tmp_path / "one")
    settings = resolve((), {"program": "ping"}, cross_checks=False)
    return runrecord.publish(runrecord.new(tmp_path / "run", settings, tasks={}, model=None))


def in_container(monkeypatch: pytest.MonkeyPatch, temporary: Path) -> None:
    temporary.mkdir(exist_ok=True)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))


def beat_beside_lock(locked_run: RunRecord, incarnation: int, counter: int, state: str = "running") -> None:
    PosixStore().make_dir(locked_run.paths.status)
    written = Beat(2, incarnation, counter, host_name(), 1, state)
    PosixStore().put(locked_run.paths.beat(2, incarnation), written)


def test_a_daemon_in_another_container_of_this_host_is_left_alone(
    locked_run: RunRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hold_rank(locked_run.log_path, 2, FOREVER_S):
        ended = threading.Event()

        def beating() -> None:
            counter = 0
            while not ended.wait(0.01):
                beat_beside_lock(locked_run, 1, counter := counter + 1)

        beat_beside_lock(locked_run, 1, 0)
        thread = threading.Thread(target=beating)
        thread.start()
        in_container(monkeypatch, tmp_path / "two")
        try:
            with pytest.raises(UsageError, match=rf"already running on {host_name()}, process 1"):
                hold_rank(locked_run.log_path, 2, FOREVER_S).__enter__()
        finally:
            ended.set()
            thread.join()


@pytest.mark.parametrize("older", [None, "left"])
def test_a_heartbeat_that_is_met_in_its_replacement_is_watched(
    locked_run: RunRecord, monkeypatch: pytest.MonkeyPatch, older: str | None
) -> None:
    """It cannot be read in that moment, and belongs to a node that lives, whatever an older start of the rank said last."""
    if older is not None:
        beat_beside_lock(locked_run, 3, 9, older)
    beat_beside_lock(locked_run, 4, 1)
    path, ended, half, read = (
        locked_run.paths.beat(2, 4),
        threading.Event(),
        [True, True],
        reading.read_bytes,
    )

    def beating() -> None:
        counter = 1
        while not ended.wait(0.01):
            beat_beside_lock(locked_run, 4, counter := counter + 1)

    def read_half(found: Path, most: int) -> bytes:
        data = read(found, most)
        return data[:-5] if found == path and half and half.pop() else data

    monkeypatch.setattr(reading, "read_bytes", read_half)
    thread = threading.Thread(target=beating)
    thread.start()
    try:
        with pytest.raises(UsageError, match="already running on"):
            hold_rank(locked_run.log_path, 2, FOREVER_S).__enter__()
    finally:
        ended.set()
        thread.join()


def test_a_killed_node_starts_again_at_once(tmp_path: Path) -> None:
    """Its death notice says that it is dead: it waits for no time-out, however long that is."""
    flags = ("coordination.dead_s=251",)
    with Cluster(tmp_path, 1, *flags, program="ping") as cluster:
        cluster.start()
        cluster.in_phase(0, 1)
        cluster.kill(0)
        cluster.start()
        cluster.wait_for(lambda e: e["event"] == "node_joined" and e["incarnation"] == 2)


def test_the_death_notice_of_an_earlier_start_proves_nothing(locked_run: RunRecord) -> None:
    for incarnation in (3, 4):
        beat_beside_lock(locked_run, incarnation, 9)
    PosixStore().make_dir(locked_run.paths.beats)
    for incarnation, proven in ((3, False), (4, True)):
        last = Beat(2, incarnation, 9, host_name(), 1, "running")
        PosixStore().mark(locked_run.paths.pulse(death_notice(last)), last)
        watched = beats_of_newest_starts(locked_run.log_path, 2)[2]
        assert watched is not None and (watched.state in GONE) == proven
