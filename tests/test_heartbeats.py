"""Heartbeats: names that nodes rename, one listing that shows all, and the eight rules by which that is safe (docs/protocol.md)."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from itertools import pairwise
from pathlib import Path

import pytest
from node_loops import NO_PAUSES, PING, node_loop, observer, settle

from fsbarrier.coordination.life import NodeLife
from fsbarrier.coordination.loop import NodeLoop
from fsbarrier.coordination.observer import Observer
from fsbarrier.coordination.own_facts import OwnFacts
from fsbarrier.coordination.poll_intervals import PollIntervals, next_beat_s
from fsbarrier.group.collective import CollectiveWork
from fsbarrier.program import Phase, Program
from fsbarrier.protocol.codec import encode
from fsbarrier.protocol.facts import Beat, Fact, Generation, Member, Position, Pulse, Record, StopRequest
from fsbarrier.protocol.state import Exit, Node, RowPart, Rules, Stage, WorkReport
from fsbarrier.rundir.heartbeats import HeartbeatReader, live_nodes, read_beats
from fsbarrier.rundir.names import PULSE, StartName, fact_name
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.record_store import PosixStore
from fsbarrier.store.retry import Backoff


def beat(rank: int, incarnation: int, counter: int = 1, state: str = "running") -> Beat:
    return Beat(rank, incarnation, counter, "host", 1, state)


def written(root: Path, *beats: Beat) -> RunPaths:
    paths, store = RunPaths(root), PosixStore()
    store.make_dir(paths.status)
    for one in beats:
        store.put(paths.beat(one.rank, one.incarnation), one)
    return paths


# --- what nodes say beside their heartbeats, for whoever does not beat -------------------------------------------------------------


def test_of_each_rank_the_newest_start_that_can_be_read(tmp_path: Path) -> None:
    paths = written(tmp_path, beat(0, 1), beat(0, 2), beat(1, 1))
    reader = HeartbeatReader(PosixStore(), paths.status)
    assert dict(reader.read()) == {StartName(0, 2): beat(0, 2), StartName(1, 1): beat(1, 1)}
    paths.beat(0, 3).write_bytes(encode(beat(0, 3))[:-5])
    paths.beat(2, 1).write_bytes(encode(beat(7, 1)))
    (paths.status / "node-0001.inc-0002.json~").write_bytes(encode(beat(1, 2)))
    assert dict(reader.read()) == {
        StartName(0, 3): beat(0, 2),
        StartName(1, 1): beat(1, 1),
        StartName(2, 1): None,
    }
    assert [start.rank for start, _ in reader.read(lambda newest: newest.incarnation > 2)] == [0]
    assert read_beats(tmp_path) == {0: beat(0, 2), 1: beat(1, 1)}
    assert read_beats(tmp_path, 1) == {1: beat(1, 1)} and read_beats(tmp_path, 2) == {}


def test_rule_6_whoever_does_not_beat_reads_contents_and_no_listing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mount may show an old listing for half a minute to a host that renames nothing in the folder."""
    paths, (loop, *_) = RunPaths(tmp_path), started(tmp_path, PosixStore(), [])
    stop, names = threading.Event(), PosixStore.names

    def keep_beating() -> None:
        while not stop.wait(0.01):
            loop.write_beat(loop.beat(), 0.0)

    def old(store: PosixStore, folder: Path) -> list[str]:
        return [] if folder == paths.beats else names(store, folder)

    loop.write_beat(loop.beat(), 0.0)
    monkeypatch.setattr(PosixStore, "names", old)
    thread = threading.Thread(target=keep_beating)
    thread.start()
    try:
        assert [node.rank for node in live_nodes(tmp_path, 60.0)] == [0]
    finally:
        stop.set()
        thread.join()


class FullDisk(PosixStore):
    """A shared directory in which nothing can be written while `full`; a heartbeat's write hangs until `writable` where that is clear."""

    full = False

    def __init__(self) -> None:
        self.writable, self.hanging = threading.Event(), threading.Semaphore(0)
        self.writable.set()

    def _write(self) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        if not self.writable.is_set():
            self.hanging.release()
            self.writable.wait()

    def put(self, path: Path, record: Record, *, durable: bool = False) -> None:
        self._write()
        super().put(path, record, durable=durable)

    def rename(self, path: Path, new: Path) -> bool:
        self._write()
        return super().rename(path, new)

    def create(self, path: Path, record: Record) -> bool:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().create(path, record)


ENDLESS = Phase(0, "work", each=lambda node: {})


def started(
    root: Path, store: PosixStore, events: list[str], row: Phase = ENDLESS, nodes: int = 2
) -> list[NodeLoop]:
    """The nodes of a run of one row."""
    rules = Rules(Program("one", (row,)), nodes)
    seen = [observer(root, store, rules.table, intervals=NO_PAUSES) for _ in range(nodes)]

    def noted(event: str, node: object, fields: object) -> None:
        events.append(event)

    return [node_loop(one, rank, rules, tell=noted, until=1, time="") for rank, one in enumerate(seen)]


def play(loops: list[NodeLoop], seconds: range, silent: frozenset[int] = frozenset()) -> None:
    """Let the nodes beat and look once a second; those that are `silent` do neither."""
    for second in seconds:
        for loop in loops:
            if loop.node.rank not in silent:
                loop.write_beat(loop.beat(), float(second))
                with contextlib.suppress(OSError):
                    settle(loop.tick, float(second))


def generations(root: Path) -> list[str]:
    return sorted(os.listdir(RunPaths(root).generations))


# --- the eight rules ---------------------------------------------------------------------------------------------------------------


def test_rule_1_a_folder_is_listed_by_its_path_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A descriptor that is kept open shows an old listing for ever on some mounts, and so may the folder's modification time."""
    listed, listdir = list[object](), os.listdir

    def noted(folder: object) -> list[str]:
        listed.append(folder)
        return listdir(folder)  # type: ignore[arg-type, return-value]

    def refused(*_: object, **__: object) -> None:
        raise AssertionError("only the listing counts")

    monkeypatch.setattr(os, "listdir", noted)
    for name in ("stat", "scandir", "open"):
        monkeypatch.setattr(os, name, refused)
    for count in range(3):
        assert PosixStore().names(tmp_path) == [], count
    monkeypatch.undo()
    assert listed == [tmp_path] * 3


def test_rule_2_a_node_s_heartbeat_is_one_file_that_it_renames_among_the_others(tmp_path: Path) -> None:
    loops, paths = started(tmp_path, PosixStore(), []), RunPaths(tmp_path)
    play(loops, range(10))
    found = sorted(PULSE.parse_all(os.listdir(paths.beats)))
    assert [(one.rank, one.counter, one.state, one.generation) for one in found] == [
        (0, 10, "running", 1),
        (1, 10, "running", 1),
    ]
    assert len(os.listdir(paths.beats)) == 2


@pytest.mark.parametrize("state", ["finished", "left"])
def test_how_a_node_ended_stands_in_the_name(tmp_path: Path, state: str) -> None:
    (loop, *_), paths = started(tmp_path, PosixStore(), []), RunPaths(tmp_path)
    for ended in (None, Exit(0, state, "it ended")):
        loop.exit = ended
        loop.write_beat(loop.beat(), 0.0)
        (found,) = PULSE.parse_all(os.listdir(paths.beats))
        assert found.state == (state if ended else Stage.JOINING)


@pytest.mark.parametrize("renamed", [True, False], ids=["done all the same", "not done"])
def test_a_rename_that_ends_in_an_error_leaves_one_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renamed: bool
) -> None:
    store = PosixStore()
    loop, *_ = started(tmp_path, store, [])

    def failing(path: Path, new: Path) -> bool:
        if renamed:
            with contextlib.suppress(FileNotFoundError):
                path.rename(new)
        raise OSError(errno.EIO, "Input/output error")

    for number in range(1, 7):
        with monkeypatch.context() as patched:
            if number in (2, 3, 4):
                patched.setattr(store, "rename", failing)
            loop.write_beat(loop.beat(), float(number))
        assert loop.observer.beaten_at == (1.0 if number in (2, 3, 4) else float(number))
    assert [one.counter for one in PULSE.parse_all(os.listdir(RunPaths(tmp_path).beats))] == [6]


@pytest.mark.parametrize("full_s", [60, 200])
def test_rule_3_whoever_cannot_write_a_heartbeat_takes_nobody_for_dead(tmp_path: Path, full_s: int) -> None:
    """A shared disk is full for a while: the first node that can write again must not go on without the others."""
    store, events = FullDisk(), list[str]()
    loops = started(tmp_path, store, events)
    play(loops, range(10))
    store.full = True
    play(loops, range(10, 10 + full_s))
    with pytest.raises(OSError, match="could not write its heartbeat for"):
        # So each wait ends: the daemon ends when that has lasted for `outage_s`.
        settle(loops[0].tick, 10.0 + full_s)
    store.full = False
    play(loops, range(10 + full_s, 40 + full_s))
    assert "node_lost" not in events and generations(tmp_path) == ["gen-000001.json"]


class NoRoom(PosixStore):
    """While `full`, a name can be changed and nothing can be made. While `slow`, what is made takes three seconds of the time `now`."""

    full = slow = False
    now = 0.0

    def _make(self) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device", "/shared/run/new")
        self.now += 3.0 * self.slow

    def make_dir(self, path: Path) -> None:
        self._make()
        super().make_dir(path)

    def put(self, path: Path, record: Record, *, durable: bool = False) -> None:
        if self.full:
            self._make()
        super().put(path, record, durable=durable)

    def mark(self, path: Path, record: Record) -> None:
        self._make()
        super().mark(path, record)

    def create(self, path: Path, record: Record) -> bool:
        self._make()
        return super().create(path, record)


def living(loop: NodeLoop, said: list[str]) -> NodeLife:
    return NodeLife(loop, lambda: None, 2.0, Backoff(0.1, 0.1), 0.0, say=said.append)


def test_who_has_no_room_to_publish_lives(tmp_path: Path) -> None:
    """Node 1 has done its work and cannot publish that; node 0 works on. Nobody is lost, and both say at once what is wrong, and where."""
    store, events, said = NoRoom(), list[str](), list[str]()
    loops = started(tmp_path, store, events)
    lives = [living(loop, said) for loop in loops]

    def journal(event: str, node: object, fields: object) -> None:
        if store.full:
            raise OSError(errno.EDQUOT, "Disk quota exceeded", "/shared/run/events")
        events.append(event)

    for loop in loops:
        loop.write_event = journal
    report = WorkReport(RowPart.EACH, True, {}, 0.0, ({"event": "figures"},))
    done = property(lambda work: report if work is loops[1].work else None)
    with pytest.MonkeyPatch.context() as patched:
        for second in range(100):
            if second == 20:
                patched.setattr(CollectiveWork, "report", done)
            store.full = 20 <= second < 60
            for life in lives:
                for _ in range(10):
                    life.tick(float(second))
                life.beat(float(second))
            if second == 21:
                assert [text[:40] for text in said] == [
                    f"node {n} cannot write in /shared/run: {why}" for n, why in ((0, "No s"), (1, "Disk"))
                ]
            if store.full and second > 22:
                assert {pulse.state for pulse in PULSE.parse_all(os.listdir(RunPaths(tmp_path).beats))} == {
                    "unwritable"
                }
    assert "node_lost" not in events and "node_suspected" not in events
    assert sorted(said[2:]) == [f"node {n} can use the shared directory again" for n in (0, 1)]


def test_a_leader_that_is_always_busy_looks_between_any_two_actions(tmp_path: Path) -> None:
    """On a slow disk each of its rows takes seconds, and whenever it is done with one, all are in it. It beats all the same, and sees
    a request to stop within two actions."""
    store, rules = NoRoom(), Rules(PING, 1)
    loop = node_loop(observer(tmp_path, store, PING, intervals=NO_PAUSES), 0, rules, until=50)
    life, looks = living(loop, []), list[float]()
    store.slow = True
    while loop.exit is None:
        looks.append(store.now)
        life.tick(store.now)
        before = loop.counter
        life.beat(store.now)
        assert loop.counter == before + 1
        if len(looks) == 100:
            store.make_dir(RunPaths(tmp_path).stops)
            PosixStore().put(
                RunPaths(tmp_path).stops / "000001.json",
                StopRequest(True, "somebody", starts=(Member(0, 1),)),
            )
    assert max(after - before for before, after in pairwise(looks)) <= 3.0 and looks[-1] - looks[0] > 60
    assert loop.exit.state == "stopped" and len(looks) < 110


class Missing(PosixStore):
    """A mount that does not show some names. `shown_at`: the listings of the heartbeats that it shows all the same, counted from 0."""

    hidden = ""
    shown_at = range(0)
    listings = 0

    def names(self, directory: Path) -> list[str]:
        found = super().names(directory)
        if directory.name != "beats":
            return found
        self.listings += 1
        shown = not self.hidden or self.listings - 1 in self.shown_at
        return found if shown else [name for name in found if self.hidden not in name]


@pytest.mark.parametrize(
    ("silent", "status", "lost"),
    [
        pytest.param(frozenset[int](), True, False, id="its status moves"),
        pytest.param(frozenset[int](), False, True, id="nothing of it is shown"),
        pytest.param(frozenset({1}), True, True, id="it is dead"),
    ],
)
def test_rule_4_before_a_death_the_status_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent: frozenset[int], status: bool, lost: bool
) -> None:
    """Node 0's mount does not list node 1's heartbeats any more."""
    events, mount = list[str](), Missing()
    loops = started(tmp_path, PosixStore(), events)
    play(loops, range(10))
    loops[0].observer.store, mount.hidden = mount, "node-0001"
    if not status:
        monkeypatch.setattr(HeartbeatReader, "read", lambda *_: iter(()))
    play(loops, range(10, 60), silent)
    assert ("node_lost" in events) == lost == (len(generations(tmp_path)) > 1)


def test_rule_4_before_a_death_the_heartbeats_are_listed_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listing that is made while names change may miss one of them, but not twice running."""
    events, mount = list[str](), Missing()
    loops = started(tmp_path, PosixStore(), events)
    play(loops, range(10))
    loops[0].observer.store, mount.hidden = mount, "node-0001"
    monkeypatch.setattr(HeartbeatReader, "read", lambda *_: iter(()))
    # The tenth look would find it silent for `dead_s`; its second listing shows it. Two looks list once more, as it is suspected and
    # heard again.
    mount.shown_at = range(11, 12)
    play(loops, range(10, 20))
    assert "node_lost" not in events and mount.listings == 13


def test_rule_5_looks_and_heartbeats_do_not_keep_step() -> None:
    pauses = [next_beat_s(2.0) for _ in range(100)]
    assert len(set(pauses)) > 90 and 1.8 <= min(pauses) < 1.9 < max(pauses) <= 2.0


@pytest.mark.parametrize("part", [RowPart.ANNOUNCED, RowPart.GATHER])
def test_rule_8_who_waits_refreshes_its_listing_soon_and_then_more_rarely(
    tmp_path: Path, part: RowPart
) -> None:
    """On some mounts a node sees what others have published only once it has changed the folder itself; the leader too, which waits for
    the others before its own work and has published nothing."""
    changed_at, now = list[float](), 0.0

    class Counting(PosixStore):
        def make_dir(self, path: Path) -> None:
            super().make_dir(path)
            changed_at.append(now)

    rules, store, members = Rules(Program("one", (ENDLESS,)), 2), Counting(), (Member(0, 1), Member(1, 1))
    observer = Observer(store, RunPaths(tmp_path), rules.table)
    here = Generation(1, members, 0, Position(1, 0), "start")
    node = Node(1, 1, 0.0, stage=Stage.RUNNING, generation=here, position=here.start, part=part)
    row = observer.row.row_dir(1, here.start)
    store.make_dir(row)
    changed_at.clear()
    facts = OwnFacts(store, observer.row, rules)
    for step in range(3000):
        now = step / 10
        facts.refresh(node, now)
    late = [after - before - max(0.5, before / 8) for before, after in pairwise([0.0, *changed_at])]
    assert max(late) <= 0.11 and len(changed_at) < 60 and changed_at[-1] > 265
    assert [*row.iterdir()] == []


# --- what follows from them --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", ["create", "journal"])
def test_a_proposal_that_failed_is_made_anew_from_what_is_seen_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """Node 1 was silent, and node 0 could not create the generation without it. When it can, node 1 has been heard again. Meanwhile its
    work has ended, of which the journal tells once."""
    store, events = FullDisk(), list[str]()
    done = WorkReport(RowPart.EACH, True, {}, 0.0, ({"event": "figures"},))
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
    if fails == "create":
        of_node_0 = loops[0].work
        reported = property(lambda work: done if failing and work is of_node_0 else None)
        monkeypatch.setattr(CollectiveWork, "report", reported)
    loops[0].write_event = noting
    for second in range(60):
        failing = 20 <= second < 40
        for loop in loops[: 1 if 10 <= second < 30 else 2]:
            loop.write_beat(loop.beat(), float(second))
            with contextlib.suppress(OSError):
                settle(loop.tick, float(second))
    assert events.count("generation_started") == 2 and "node_lost" in events
    assert events.count("figures") == (fails == "create")
    assert os.listdir(tmp_path / "coordination" / "generations") == ["gen-000001.json"]


def test_rule_3_whoever_hangs_in_the_write_of_a_heartbeat_takes_nobody_for_dead(tmp_path: Path) -> None:
    """The server lets nobody write for a while, and answers what is read: the first write that comes through must not be a generation
    without the others."""
    store, events, threads = FullDisk(), list[str](), list[threading.Thread]()
    loops = started(tmp_path, store, events)

    def write_beats(now: float) -> None:
        threads[:] = [threading.Thread(target=loop.write_beat, args=(loop.beat(), now)) for loop in loops]
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
                loop.write_beat(loop.beat(), float(second))
        for loop in loops:
            with contextlib.suppress(OSError):
                settle(loop.tick, float(second))
    assert events.count("generation_started") == 2 and "node_lost" not in events


@pytest.mark.parametrize("again", [False, True], ids=["start", "rejoin"])
def test_a_join_whose_answer_was_lost_is_this_node_s_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """It does not take its own record for another process's. Until it has joined again, nobody may admit what it was before."""
    loop, create = started(tmp_path, PosixStore(), [], nodes=1)[0], PosixStore.create
    lost: list[Path] = []

    def created_and_an_error(store: PosixStore, path: Path, record: Record) -> bool:
        won = create(store, path, record)
        if path.parent.name == "joins" and path not in lost:
            lost.append(path)
            raise OSError(errno.EIO, "Input/output error")
        return won

    monkeypatch.setattr(PosixStore, "create", created_and_an_error)
    if again:
        others = Generation(1, (Member(1, 1),), 1, Position(1, 0), "start")
        now = Generation(2, (Member(1, 1),), 1, Position(1, 0), "went on")
        create(PosixStore(), loop.observer.paths.generation(2), now)
        loop.node = Node(0, 1, 0.0, stage=Stage.RUNNING, generation=others, position=others.start)
        with pytest.raises(OSError, match="Input/output"):
            settle(loop.tick, 1.0)
        assert (loop.beat().incarnation, loop.beat().state) == (1, "leaving")
        settle(loop.tick, 2.0)
    else:
        with pytest.raises(OSError, match="Input/output"):
            loop.start(1.0)
        loop.start(2.0)
    assert (loop.exit, loop.node.incarnation) == (None, 2)
    assert (loop.beat().incarnation, loop.beat().state) == (2, "joining")


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
            loop.write_beat(loop.beat(), float(second))
            if loop.exit is None:
                settle(loop.tick, float(second))
    assert [loop.exit and loop.exit.state for loop in loops] == ["finished", "finished"]
    assert "node_lost" not in events


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
    observer = Observer(store, paths, Program("one", (Phase(0, "last"),)), PollIntervals(0.0, 0.0))
    observer.prepare()
    here = Generation(1, members, 1, Position(1, 0), "start", until=1)
    node = Node(1, 1, 0.0, stage=Stage.RUNNING, generation=here, position=here.start, part=RowPart.ANNOUNCED)
    store.create(paths.generation(1), here)
    store.make_dir(observer.row.row_dir(1, here.start))
    store.create(observer.row.row_dir(1, here.start) / fact_name(1, 1), Fact(1, 1, "done"))
    paths.pulse(Pulse(0, 1, 1, state, generation, 1, 0)).touch()
    assert observer.view(node, 0.0).arrived == arrived
