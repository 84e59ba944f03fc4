"""Heartbeats as others read them: of each rank its newest start's, and nothing that is torn, foreign or under another's name."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from fsbarrier.group.collective import CollectiveWork
from fsbarrier.node.loop import NodeLoop
from fsbarrier.node.observer import Observer
from fsbarrier.node.paces import Paces
from fsbarrier.program import Phase, Program, Value
from fsbarrier.protocol.codec import encode
from fsbarrier.protocol.facts import Beat, Fact, Generation, Join, Member, Position, R, Record
from fsbarrier.protocol.state import Exit, Node, RowPart, Rules, Stage
from fsbarrier.rundir.heartbeats import HeartbeatReader, live_nodes, read_beats
from fsbarrier.rundir.names import StartName, fact_name
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.record_store import PosixStore


def beat(rank: int, incarnation: int, counter: int = 1, state: str = "running") -> Beat:
    return Beat(rank, incarnation, counter, "host", 1, state)


def written(root: Path, *beats: Beat) -> RunPaths:
    paths, store = RunPaths(root), PosixStore()
    store.make_dir(paths.beats)
    for one in beats:
        store.put(paths.beat(one.rank, one.incarnation), one)
    return paths


def test_of_each_rank_the_newest_start_that_can_be_read(tmp_path: Path) -> None:
    paths = written(tmp_path, beat(0, 1), beat(0, 2), beat(1, 1))
    reader = HeartbeatReader(PosixStore(), paths.beats)
    assert dict(reader.read()) == {StartName(0, 2): beat(0, 2), StartName(1, 1): beat(1, 1)}
    paths.beat(0, 3).write_bytes(encode(beat(0, 3))[:-5])
    paths.beat(2, 1).write_bytes(encode(beat(7, 1)))
    (paths.beats / "node-0001.inc-0002.json~").write_bytes(encode(beat(1, 2)))
    assert dict(reader.read()) == {
        StartName(0, 3): beat(0, 2),
        StartName(1, 1): beat(1, 1),
        StartName(2, 1): None,
    }
    assert read_beats(tmp_path) == {0: beat(0, 2), 1: beat(1, 1)}
    assert read_beats(tmp_path, 1) == {1: beat(1, 1)} and read_beats(tmp_path, 2) == {}


def test_what_is_not_wanted_is_not_read(tmp_path: Path) -> None:
    paths = written(tmp_path, beat(0, 1), beat(0, 2), beat(1, 1))
    reader = HeartbeatReader(PosixStore(), paths.beats)
    assert [start for start, _ in reader.read(lambda newest: newest.incarnation > 1)] == [StartName(0, 2)]
    paths.beat(0, 2).unlink()
    assert dict(reader.read())[StartName(0, 1)] == beat(0, 1)


class Opened(PosixStore):
    """Counts the records that are opened."""

    opened = 0

    def read(self, path: Path, cls: type[R]) -> R | None:
        self.opened += 1
        return super().read(path, cls)


def running(counter: int, generation: int = 1, state: str = "running") -> Beat:
    return Beat(0, 1, counter, "host", 1, state, generation)


def test_a_heartbeat_whose_pulse_moves_need_not_be_opened(tmp_path: Path) -> None:
    """Only once, to know what it says beside its counter; then a listing shows all members' counters."""
    store, (loop, *_) = Opened(), started(tmp_path, PosixStore(), [])
    reader = HeartbeatReader(store, RunPaths(tmp_path).beats, pulses=True)
    loop.node = replace(loop.node, stage=Stage.RUNNING)
    for _ in range(9):
        loop.write_beat(loop.beat(), PosixStore(), 0.0)
        assert dict(reader.read()) == {StartName(0, 1): replace(loop.beat(), counter=loop.counter - 1)}
        loop.counter -= 1
    assert store.opened == 1
    assert len(os.listdir(RunPaths(tmp_path).beats)) == 2, "one pulse, which is renamed"


@pytest.mark.parametrize(
    ("first", "shown", "then", "now"),
    [
        pytest.param(running(1), (7, 7), (7, 7), running(1), id="one that stands still, a dead node's"),
        pytest.param(running(5), (2, 2), (2, 3), running(5), id="one behind what was read"),
        pytest.param(running(5), (5, 5), (5, 5), running(6, state="left"), id="a node that left"),
        pytest.param(running(5), (5, 5), (5, 9), running(9, 2), id="another generation"),
        pytest.param(running(5, state="finished"), (4, 4), (4, 9), running(9), id="one that did not run"),
        pytest.param(running(5), (), (), running(6), id="none"),
        pytest.param(running(5), (), (8,), running(6), id="one that is listed for the first time"),
        pytest.param(running(5), (9,), (7,), running(6), id="an older listing"),
    ],
)
def test_a_pulse_that_does_not_tell_all_is_not_believed(
    tmp_path: Path, first: Beat, shown: tuple[int, ...], then: tuple[int, ...], now: Beat
) -> None:
    """`shown`, `then`: the counters of the pulses in two listings."""
    paths, reader = written(tmp_path, first), HeartbeatReader(PosixStore(), RunPaths(tmp_path).beats, True)
    for beats, counters in ((first, shown), (now, then)):
        for old in paths.beats.glob("*.pulse-*"):
            old.unlink()
        for counter in counters:
            paths.pulse(0, 1, now.generation, counter).touch()
        PosixStore().put(paths.beat(0, 1), beats)
        assert dict(reader.read()) == {StartName(0, 1): beats}


def test_a_pulse_that_moved_before_the_last_listing_is_no_news(tmp_path: Path) -> None:
    paths = written(tmp_path, running(1))
    reader = HeartbeatReader(PosixStore(), paths.beats, pulses=True)
    pulse = paths.pulse(0, 1, 1, 1)
    pulse.touch()
    assert dict(reader.read()) == {StartName(0, 1): running(1)}
    pulse.rename(paths.pulse(0, 1, 1, 2))
    # It leaves this rank to the watchers at first, and reads it once the node has left.
    assert dict(reader.read(lambda newest: False)) == {}
    PosixStore().put(paths.beat(0, 1), running(3, state="left"))
    assert dict(reader.read()) == {StartName(0, 1): running(3, state="left")}


@pytest.mark.parametrize("state", ["finished", "left"])
def test_how_a_node_ended_is_read_and_no_pulse_hides_it(tmp_path: Path, state: str) -> None:
    loop, *_ = started(tmp_path, PosixStore(), [])
    reader = HeartbeatReader(PosixStore(), RunPaths(tmp_path).beats, pulses=True)
    loop.node = replace(loop.node, stage=Stage.RUNNING)
    for ended in (None, None, Exit(0, state, "it ended")):
        loop.exit = ended
        loop.write_beat(loop.beat(), PosixStore(), 0.0)
        ((_, read),) = reader.read()
        assert read is not None and read.state == (state if ended else Stage.RUNNING)


@pytest.mark.parametrize("renamed", [True, False], ids=["done all the same", "not done"])
def test_a_pulse_that_cannot_be_renamed_keeps_no_heartbeat_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renamed: bool
) -> None:
    store, (loop, *_) = Opened(), started(tmp_path, PosixStore(), [])
    reader = HeartbeatReader(store, RunPaths(tmp_path).beats, pulses=True)
    loop.node = replace(loop.node, stage=Stage.RUNNING)

    def failing(path: Path, new: Path) -> bool:
        if renamed:
            path.rename(new)
        raise OSError(errno.EIO, "Input/output error")

    for number in range(1, 7):
        with monkeypatch.context() as patched:
            if number in (2, 3):
                patched.setattr(store, "rename", failing)
            loop.write_beat(loop.beat(), store, 1.0)
        assert loop.observer.unheard_since is None
        ((_, read),) = reader.read()
        assert read is not None and read.counter == number
    assert store.opened <= 3, "since then the pulse moves again"


def test_a_node_that_does_not_beat_is_not_alive(tmp_path: Path) -> None:
    written(tmp_path, beat(0, 1), beat(1, 1, state="finished"))
    assert live_nodes(tmp_path, 0.2) == [] and live_nodes(tmp_path / "nowhere", 0.2) == []


class FullDisk(PosixStore):
    """A shared directory in which nothing can be written while `full`; a heartbeat's write hangs until `writable` where that is clear."""

    full = False

    def __init__(self) -> None:
        self.writable, self.hanging = threading.Event(), threading.Semaphore(0)
        self.writable.set()

    def put(self, path: Path, record: Record, *, durable: bool = False) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        if not self.writable.is_set():
            self.hanging.release()
            self.writable.wait()
        super().put(path, record, durable=durable)

    def create(self, path: Path, record: Record) -> bool:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().create(path, record)


ENDLESS = Phase(0, "work", each=lambda context: Value({}))


def started(
    root: Path, store: PosixStore, events: list[str], row: Phase = ENDLESS, nodes: int = 2, watchers: int = 4
) -> list[NodeLoop]:
    """The nodes of a run of one row."""
    paths = RunPaths(root)
    rules = Rules(Program("one", (row,)), nodes)

    def start(rank: int) -> NodeLoop:
        observer = Observer(store, paths, rules.table, Paces(0.0, 0.0, watchers=watchers))
        join = Join(rank, 0, f"host{rank}", rank, "boot", until=1)
        loop = NodeLoop(
            store, observer, rules, CollectiveWork(), join, lambda event, node, fields: events.append(event)
        )
        observer.prepare()
        loop.start(0.0)
        return loop

    return [start(rank) for rank in range(nodes)]


@pytest.mark.parametrize("full_s, lost", [(60, False), (200, True)])
def test_whoever_cannot_write_a_heartbeat_takes_nobody_for_dead(
    tmp_path: Path, full_s: int, lost: bool
) -> None:
    """A shared disk is full for a while: the first node that can write again must not go on without the others. But each wait ends."""
    store, events = FullDisk(), list[str]()
    loops = started(tmp_path, store, events)
    for second in range(10 + full_s + 20):
        store.full = 10 <= second < 10 + full_s
        for loop in loops:
            loop.write_beat(loop.beat(), store, float(second))
            with contextlib.suppress(OSError):
                loop.tick(float(second))
    assert ("node_lost" in events) == lost
    assert (tmp_path / "coordination" / "generations" / "gen-000002.json").exists() == lost


@pytest.mark.parametrize("fails", ["create", "journal"])
def test_a_proposal_that_failed_is_made_anew_from_what_is_seen_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """Node 1 was silent, and node 0 could not create the generation without it. When it can, node 1 has been heard again."""
    store, events = FullDisk(), list[str]()
    loops, create = started(tmp_path, store, events), store.create
    failing = False

    def refuse() -> None:
        if failing:
            raise OSError(errno.EIO, "Input/output error")

    def creating(path: Path, record: Record) -> bool:
        if fails == "create" and path.parent.name == "generations":
            refuse()
        return create(path, record)

    def noting(event: str, node: object, fields: object) -> None:
        if fails == "journal":
            refuse()
        events.append(event)

    monkeypatch.setattr(store, "create", creating)
    loops[0].write_event = noting
    for second in range(60):
        failing = 20 <= second < 40
        for loop in loops[: 1 if 10 <= second < 30 else 2]:
            loop.write_beat(loop.beat(), store, float(second))
            with contextlib.suppress(OSError):
                loop.tick(float(second))
    assert events.count("generation_started") == 2 and "node_lost" in events
    assert os.listdir(tmp_path / "coordination" / "generations") == ["gen-000001.json"]


def test_whoever_hangs_in_the_write_of_a_heartbeat_takes_nobody_for_dead(tmp_path: Path) -> None:
    """The server lets nobody write for a while, and answers what is read: the first write that comes through must not be a generation
    without the others."""
    store, events, threads = FullDisk(), list[str](), list[threading.Thread]()
    loops = started(tmp_path, store, events)

    def write_beats(now: float) -> None:
        threads[:] = [
            threading.Thread(target=loop.write_beat, args=(loop.beat(), store, now)) for loop in loops
        ]
        for thread in threads:
            thread.start()

    for second in range(100):
        if second == 20:
            store.writable.clear()
            write_beats(20.0)
            for _ in loops:
                assert store.hanging.acquire(timeout=60)
        elif second == 70:
            store.writable.set()
            for thread in threads:
                thread.join()
        if not 20 <= second < 70:
            for loop in loops:
                loop.write_beat(loop.beat(), store, float(second))
        for loop in loops:
            loop.tick(float(second))
    assert events.count("generation_started") == 2 and "node_lost" not in events


class HiddenFacts(PosixStore):
    """A mount that never shows what node 0 published."""

    def names(self, directory: Path) -> list[str]:
        return [name for name in super().names(directory) if not name.endswith("node-0000.done")]


def test_whoever_waits_in_the_last_row_passes_it_with_those_who_have_finished(tmp_path: Path) -> None:
    """Its mount does not show what they published there, and they have gone: they are not lost, and the run is done."""
    events = list[str]()
    loops = started(tmp_path, PosixStore(), events, Phase(0, "last"))
    loops[1].observer.store = loops[1].store = HiddenFacts()
    for second in range(40):
        for loop in loops:
            loop.write_beat(loop.beat(), PosixStore(), float(second))
            if loop.exit is None:
                loop.tick(float(second))
    assert [loop.exit and loop.exit.state for loop in loops] == ["finished", "finished"]
    assert "node_lost" not in events


def test_a_node_whose_watcher_is_silent_looks_at_all_watchers(tmp_path: Path) -> None:
    """Those of nodes 2 and 3 die together: the second one is found `suspect_s` after the first, not another `dead_s`."""
    loops = started(tmp_path, PosixStore(), [], nodes=4, watchers=2)
    for second in range(10 + 15 + 6 + 3):
        for loop in loops if second < 10 else loops[2:]:
            loop.write_beat(loop.beat(), PosixStore(), float(second))
            loop.tick(float(second))
    assert (tmp_path / "coordination" / "generations" / "gen-000003.json").exists()
    assert [loop.node.generation and loop.node.generation.ranks for loop in loops[2:]] == [(2, 3)] * 2


@pytest.mark.parametrize(
    ("state", "generation", "arrived"),
    [
        ("finished", 1, {0, 1}),
        ("finished", 0, {1}),
        ("left", 1, {1}),
        ("stopped", 1, {1}),
        ("running", 1, {1}),
    ],
)
def test_only_whoever_finished_this_generation_has_passed_its_last_row(
    tmp_path: Path, state: str, generation: int, arrived: set[int]
) -> None:
    paths, store, members = RunPaths(tmp_path), PosixStore(), (Member(0, 1), Member(1, 1))
    observer = Observer(store, paths, Program("one", (Phase(0, "last"),)), Paces(0.0, 0.0))
    observer.prepare()
    here = Generation(1, members, 0, Position(1, 0), "start", until=1)
    node = Node(1, 1, 0.0, stage=Stage.RUNNING, generation=here, position=here.start, part=RowPart.ANNOUNCED)
    store.create(paths.generation(1), here)
    store.make_dir(observer.row_dir(1, here.start))
    store.mark(observer.row_dir(1, here.start) / fact_name(1, 1), Fact(1, 1, "done"))
    store.put(paths.beat(0, 1), Beat(0, 1, 1, "host", 1, state, generation, 1, 0))
    assert observer.view(node, 0.0).arrived == arrived
