"""A record that cannot be read is never taken for absent, one that is hidden is missed by nobody whom it is meant for, and nodes with other
code are refused."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster import FAST, REPO, Cluster
from node_loops import node_loop, observer, settle

from fsbarrier.coordination.life import NodeLife
from fsbarrier.protocol.facts import (
    Beat,
    Fact,
    Generation,
    Join,
    Member,
    Position,
    Pulse,
    StopRequest,
    Verdict,
)
from fsbarrier.protocol.membership import JOINING
from fsbarrier.protocol.state import Node, Stage
from fsbarrier.rundir.heartbeats import request_stop
from fsbarrier.rundir.names import fact_name
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.record_store import PosixStore
from fsbarrier.store.retry import Backoff, fails


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)


def other_format(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"fsbarrier/2", b"fsbarrier/3", 1))


def cut(path: Path) -> None:
    path.write_bytes(b"")


def snapshot(folder: Path) -> dict[str, bytes]:
    """What all that is no heartbeat and no join holds."""
    found = (
        path
        for path in folder.rglob("*")
        if path.is_file() and path.parent.name not in ("beats", "status", "joins")
    )
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (flip_a_bit, r"cannot be read: torn: length or digest differs; .*init_from"),
        (cut, r"cannot be read: empty"),
        (other_format, r"record format 3; this fsbarrier reads format 2"),
    ],
)
def test_a_generation_that_cannot_be_read_is_no_absent_one(
    tmp_path: Path, spoil: Callable[[Path], None], says: str
) -> None:
    """Its nodes are gone. Whoever starts must neither go on from the generation before it, nor seal that, nor create another."""
    paths, store = RunPaths(tmp_path), PosixStore()
    store.make_dir(paths.generations)
    for number in (1, 2):
        loop = node_loop(observer(tmp_path)) if number == 2 else None
        generation = Generation(number, (Member(0, number),), 0, Position(number, 0), "start")
        store.create(paths.generation(number), generation)
    assert loop is not None
    spoil(paths.generation(2))
    before = snapshot(tmp_path)
    for second in range(40):
        with pytest.raises(OSError, match=says) as caught:
            settle(loop.tick, float(second))
        assert caught.value.filename == str(paths.generation(2))
    assert loop.exit is None
    assert snapshot(tmp_path) == before
    with pytest.raises(OSError, match=says) as caught:
        loop.observer.prepare()
    # A start tries again, as with any failing mount.
    assert fails(caught.value)


def test_a_generation_is_followed_once_it_can_be_read(tmp_path: Path) -> None:
    loop = node_loop(observer(tmp_path))
    paths = loop.observer.paths
    generation = Generation(1, (Member(0, 1),), 0, Position(1, 0), "start", until=1)
    loop.store.create(paths.generation(1), generation)
    whole = paths.generation(1).read_bytes()
    cut(paths.generation(1))
    for second in range(10):
        with pytest.raises(OSError, match="cannot be read"):
            settle(loop.tick, float(second))
    assert loop.exit is None and loop.node.stage is Stage.JOINING
    paths.generation(1).write_bytes(whole)
    settle(loop.tick, 10.0)
    assert loop.exit is not None and loop.exit.reason == "1 iteration is done"


@pytest.mark.parametrize("status", ["done", "failed"])
def test_a_fact_that_cannot_be_read_is_not_passed_over(tmp_path: Path, status: str) -> None:
    """Whoever waits for the leader's decision fails and names the file, and so does who looks at the others' failures."""
    loop = node_loop(observer(tmp_path), 1)
    paths, store = loop.observer.paths, loop.store
    members = (Member(0, 1), Member(1, 1))
    store.create(paths.generation(1), Generation(1, members, 0, Position(1, 0), "start"))
    fact = loop.observer.row.row_dir(1, Position(1, 0)) / fact_name(1, 0, status)
    store.make_dir(fact.parent)
    store.create(fact, Fact(0, 1, status))
    flip_a_bit(fact)
    for second in range(30):
        with pytest.raises(OSError, match="cannot be read") as caught:
            settle(loop.tick, float(second))
        assert caught.value.filename == str(fact)
    assert loop.exit is None and loop.node.position == Position(1, 0)
    # It does not hold up what a newer generation says.
    over = Generation(2, members, 0, Position(1, 0), "over", verdict=Verdict(0, "stopped"))
    store.create(paths.generation(2), over)
    settle(loop.tick, 60.0)
    assert loop.exit is not None and loop.exit.reason == "stopped"


def test_a_node_that_cannot_read_a_record_gives_up_in_the_end(tmp_path: Path) -> None:
    """And holds its heartbeats back meanwhile, so that the others, who may be able to read it, go on without this node."""
    loop = node_loop(observer(tmp_path))
    paths = loop.observer.paths
    loop.store.create(paths.generation(1), Generation(1, (Member(0, 1),), 0, Position(1, 0), "start"))
    cut(paths.generation(1))
    life = NodeLife(loop, lambda: None, 2.0, Backoff(0.1, 0.1), 0.0)
    for second in range(int(loop.observer.intervals.outage_s) + 1):
        assert loop.exit is None
        life.beat(float(second))
        life.tick(float(second))
    assert loop.exit is not None and loop.exit.code == 3
    assert "has failed for 120 s" in loop.exit.reason and "gen-000001.json" in loop.exit.reason
    assert loop.observer.beaten_at is not None and loop.observer.beaten_at < 10.0


# --- starts and stops, seen through listings that are old ------------------------------------------------------------------------


class Frozen(PosixStore):
    """A mount on which the listing of one directory never changes any more (two changes within one tick of its time)."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.known = directory, super().names(directory)

    def names(self, directory: Path) -> list[str]:
        return self.known if directory == self.directory else super().names(directory)


def test_of_two_starts_of_a_rank_the_newer_is_heard_and_the_older_told(tmp_path: Path) -> None:
    """I7: each has a heartbeat of its own, and by its name the older learns of the newer, however old its listings of `joins/` are."""
    paths, store = RunPaths(tmp_path), PosixStore()
    for folder in (paths.joins, paths.beats):
        store.make_dir(folder)
    for incarnation in (1, 2):
        join = Join(1, incarnation, "ab"[incarnation - 1], 1, "boot")
        store.put(paths.join(1, incarnation), join)
        if incarnation == 1:
            frozen = Frozen(paths.joins)
    others, older = observer(tmp_path), observer(tmp_path, frozen)
    for counter in range(20):
        for incarnation in (2, 1):  # the older one always beats last
            paths.pulse(Pulse(1, incarnation, counter, JOINING)).touch()
        seen = others.view(Node(0, 1, 0.0), float(counter)).ledger.seen[1]
        assert (seen.beat.incarnation, seen.since) == (2, float(counter))
        known = older.view(Node(1, 1, 0.0), float(counter)).joins[1]
        assert known.incarnation == 2


def test_a_stop_holds_for_the_starts_that_were_there(tmp_path: Path) -> None:
    """A listing that is behind shows it late: then it must not end a later session. Nor must it be missed by whom it is meant for."""
    paths, store = RunPaths(tmp_path), PosixStore()
    runs, started = {rank: observer(tmp_path) for rank in (0, 1)}, {0: 3, 1: 2}

    def ask(number: int, *starts: Member) -> StopRequest:
        request = StopRequest(True, f"ann {number}", starts=starts)
        store.put(paths.stop(number), request)
        for one in runs.values():
            one.schedule.poll_now()
        return request

    def seen(rank: int) -> StopRequest | None:
        return runs[rank].view(Node(rank, 9, 0.0, started_as=started[rank]), 0.0).stop

    ask(1, Member(0, 2), Member(1, 1))
    assert seen(0) is seen(1) is None, "both were started since"
    ours = ask(2, Member(0, 3), Member(1, 5))
    assert seen(0) == seen(1) == ours, "node 1 rejoined as its fifth incarnation"
    ask(3, Member(0, 2))
    assert seen(0) == ours, "its author's listing was behind"


def test_a_stop_names_the_starts_that_its_author_sees(tmp_path: Path) -> None:
    paths, store = RunPaths(tmp_path), PosixStore()
    for folder in (paths.joins, paths.status):
        store.make_dir(folder)
    paths.record.write_bytes(b"{}")
    for rank, incarnation in ((0, 1), (0, 2), (1, 1), (2, 1)):
        store.put(paths.join(rank, incarnation), Join(rank, incarnation, "a", 1, "boot"))
    for rank, incarnation in ((0, 1), (1, 1), (2, 3)):
        store.put(paths.beat(rank, incarnation), Beat(rank, incarnation, 5, "a", 1, "running"))
    found = request_stop(tmp_path, now=True)
    assert found == store.read(paths.stop(1), StopRequest) and found.now
    assert found.starts == (Member(0, 2), Member(1, 1), Member(2, 3))


def test_two_requests_at_once_have_two_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither listing shows the other's request."""
    RunPaths(tmp_path).record.touch()
    monkeypatch.setattr(PosixStore, "names", lambda store, directory: [])
    made = [request_stop(tmp_path, now=False), request_stop(tmp_path, now=True)]
    paths = RunPaths(tmp_path)
    assert [PosixStore().read(paths.stop(number), StopRequest) for number in (1, 2)] == made


# --- with real daemons ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_after_a_flipped_bit_the_run_goes_neither_back_nor_elsewhere(tmp_path: Path) -> None:
    with Cluster(tmp_path, 1, *FAST) as cluster:
        paths = RunPaths(cluster.log_path)

        def session(iterations: int) -> int:
            cluster.flags = ("--program", "toy", *FAST, "--iterations", str(iterations))
            cluster.start()
            return cluster.wait()[0]

        assert (session(1), session(2)) == (0, 0)
        whole = paths.generation(2).read_bytes()
        flip_a_bit(paths.generation(2))
        merged = {path: path.read_bytes() for path in paths.trajectories("train").iterdir()}
        assert session(3) == 3
        said = cluster.said(0)
        assert "gen-000002.json" in said and "cannot be read: torn" in said and "init_from" in said
        assert {path: path.read_bytes() for path in paths.trajectories("train").iterdir()} == merged
        assert len(os.listdir(paths.generations)) == 2
        paths.generation(2).write_bytes(whole)
        assert session(3) == 0
        assert [e["iteration"] for e in cluster.events() if e["event"] == "iteration_finished"] == [1, 2, 3]


def other_clone(folder: Path, file: str, old: str, new: str) -> dict[str, str]:
    """The environment in which a node runs a copy of this code, with one change."""
    for name in ("fsbarrier", "phases"):
        shutil.copytree(REPO / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPO / "pyproject.toml", folder)
    source = folder / file
    assert old in source.read_text()
    source.write_text(source.read_text().replace(old, new))
    # Python would look into the present folder first.
    return {"PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}


@pytest.mark.slow
def test_nodes_of_other_versions_are_refused_and_the_run_goes_on(tmp_path: Path) -> None:
    """Of another record format at once, and of other code once a living node is seen to run the run's."""
    with Cluster(tmp_path, 2, *FAST, "--iterations", "2", "toy.phase_s=1") as cluster:
        cluster.start(0)
        cluster.beating(0, lambda beat: True)
        cluster.env[1] = other_clone(
            tmp_path / "format", "fsbarrier/protocol/codec.py", "FORMAT = 2", "FORMAT = 3"
        )
        cluster.start(1)
        assert cluster.wait(1) == {1: 2}
        assert "its nodes write record format 2" in cluster.said(1)
        assert "reads and writes format 3" in cluster.said(1)
        # The right one still finds its place.
        del cluster.env[1]
        cluster.start(1)
        cluster.in_phase(1, 2)
        cluster.kill(1)
        cluster.env[1] = other_clone(
            tmp_path / "code", "phases/rl.py", "COLLECTIVES_TIMEOUT_S = 1800", "COLLECTIVES_TIMEOUT_S = 1801"
        )
        cluster.start(1)
        assert cluster.wait() == {0: 0, 1: 2}
        assert "start all nodes with the same fsbarrier and program" in cluster.said(1)
        members = [e["members"] for e in cluster.events() if e["event"] == "generation_started"]
        assert members[0] == [0, 1] and members[-1] == [0]
