"""Groups where something is wrong: members that call different things, operations that fail or hang, listings that are old."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from group_members import FAST, Failed, Members
from node_loops import node_loop, observer, settle
from waiting import until

import fsbarrier
from fsbarrier.group import group as group_module
from fsbarrier.group.collective import Collective, CollectiveWork
from fsbarrier.group.member import GroupMember, make_member
from fsbarrier.protocol.facts import Generation, Join, Member, Position
from fsbarrier.protocol.membership import Limits
from fsbarrier.protocol.state import Exit, Node, RowPart
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.record_store import PosixStore

# --- different calls ----------------------------------------------------------------------------------------------------------

BARRIER, GATHER = ("barrier", {}), ("all_gather", {"obj": 1})


def broadcast(src: int) -> tuple[str, dict[str, Any]]:
    return "broadcast", {"obj": "x", "src": src}


@pytest.mark.parametrize(
    ("calls", "typed"),
    [
        ((BARRIER, broadcast(0), BARRIER), ("barrier()", "broadcast(src=0)", "barrier()")),
        ((broadcast(0), broadcast(1), broadcast(1)), ("broadcast(src=0)", *["broadcast(src=1)"] * 2)),
        ((GATHER, GATHER, BARRIER), ("all_gather()", "all_gather()", "barrier()")),
    ],
    ids=["barrier and broadcast", "two sources", "gather and barrier"],
)
def test_members_that_call_different_things_are_told(
    tmp_path: Path, calls: list[tuple[str, dict[str, Any]]], typed: tuple[str, ...]
) -> None:
    with Members(tmp_path, 3) as group:
        group.start().joined()
        group.ask("barrier")
        for rank, (call, arguments) in enumerate(calls):
            group[rank].tell(call, **arguments)
        told = {rank: failed for rank in range(3) if isinstance(failed := group.outcome(rank), Failed)}
        assert told
        for rank, failed in told.items():
            assert failed.kind == "OutOfStep" and f"node {rank} " in failed.message
            assert typed[rank] in failed.message
            # It names a member that called something else, and what that was.
            assert typed[failed.rank] != typed[rank] and f"called {typed[failed.rank]}" in failed.message
        # It is over for this generation, whatever they call now, and regroup() leaves it behind.
        assert {group.ask("all_gather", rank, obj=2)[0].kind for rank in told} == {"OutOfStep"}
        assert group.ask("regroup", *told) == [[2, [0, 1, 2]]] * len(told)
        for rank in {0, 1, 2} - told.keys():
            assert group.ask("barrier", rank)[0].kind == "PeerLost"
            group.ask("regroup", rank)
        assert group.ask("all_gather", obj=3) == [[3, 3, 3]] * 3


# --- operations that fail -----------------------------------------------------------------------------------------------------


class FailingStore(PosixStore):
    """Every operation of the kind `failing` fails, in a row's directory only, from the first one on."""

    failing = ""

    def _may_fail(self, verb: str, path: Path) -> None:
        if verb == self.failing and "/p00-" in str(path):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    def names(self, directory: Path) -> list[str]:
        self._may_fail("names", directory)
        return super().names(directory)

    def must_read(self, path: Path, cls: type[Any]) -> Any:
        self._may_fail("must_read", path)
        return super().must_read(path, cls)

    def put(self, path: Path, record: Any, *, durable: bool = False) -> None:
        self._may_fail("put", path)
        super().put(path, record, durable=durable)


@pytest.mark.parametrize("verb", ["names", "put", "must_read"])
def test_the_same_call_after_a_failure_is_the_same_collective(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """Whichever operation of a collective fails until StoreError is raised, the next call is paired with the right one."""
    failing, this_thread = FailingStore(), threading.current_thread()
    monkeypatch.setattr(
        group_module,
        "PosixStore",
        lambda: failing if threading.current_thread() is this_thread else PosixStore(),
    )

    def other() -> list[list[int]]:
        with fsbarrier.join(tmp_path, node_rank=1, num_nodes=2, **FAST) as group:
            return [group.all_gather(100 + number) for number in range(4)]

    with ThreadPoolExecutor(1) as pool:
        gathered = pool.submit(other)
        with fsbarrier.join(tmp_path, node_rank=0, num_nodes=2, **FAST) as group:
            failed, number = 0, 0
            while number < 4:
                failing.failing = verb if number and not failed else ""
                try:
                    assert group.all_gather(number) == [number, 100 + number]
                    number += 1
                except fsbarrier.StoreError as error:
                    assert "all_gather() no. " in str(error) and f"'{tmp_path}" in str(error)
                    failed += 1
                    failing.failing = ""
                    # The other member may have read what this one gave: with another object it would be another call.
                    with pytest.raises(fsbarrier.StoreError):
                        group.all_gather("another")
        assert failed == 1
        assert gathered.result() == [[number, 100 + number] for number in range(4)]


# --- listings that are old ----------------------------------------------------------------------------------------------------


class OldListings(PosixStore):
    """Shows each row as it was when it was first listed, while `old`."""

    old = True

    def __init__(self) -> None:
        self._known: dict[Path, list[str]] = {}

    def names(self, directory: Path) -> list[str]:
        now = super().names(directory)
        return self._known.setdefault(directory, now) if self.old and "/gen-" in str(directory) else now


def hand_driven(tmp_path: Path, store: PosixStore, rank: int) -> GroupMember:
    limits = Limits(1.0, 15.0, 1.0, join_timeout_s=float("inf"))
    here = Join(rank, 0, f"host{rank}", 100 + rank, "boot")
    return make_member(store, RunPaths(tmp_path), here, 3, limits, 0.5)


class Trio:
    """Three members without threads; node 2's listings of rows are old."""

    def __init__(self, tmp_path: Path) -> None:
        self.now, self.old = 0.0, OldListings()
        #: what the last call of each member gave, or its error
        self.ends: dict[int, Any] = {}
        stores = (PosixStore(), PosixStore(), self.old)
        self.members = [hand_driven(tmp_path, store, rank) for rank, store in enumerate(stores)]
        for member in self.members:
            member.begin(self.now)
        while any(member.generation is None for member in self.members):
            self.look()

    def look(self, *ranks: int) -> None:
        """Half a second later, these (all, if none is named) have beaten and looked."""
        self.now += 0.5
        for rank in ranks or (0, 1, 2):
            member = self.members[rank]
            member.loop.write_beat(member.loop.beat(), self.now)
        for rank in ranks or (0, 1, 2):
            settle(self.members[rank].tick, self.now)
            asked = self.members[rank].work.asked
            if asked is not None and rank not in self.ends:
                try:
                    objects = self.members[rank].outcome(asked)
                except fsbarrier.PeerLost as error:
                    self.ends[rank] = error
                else:
                    if objects is not None:
                        self.ends[rank] = list(objects)

    def call(self, rank: int, number: int) -> None:
        generation = self.members[rank].generation
        assert generation is not None
        self.ends.pop(rank, None)
        self.members[rank].work.asked = Collective(
            generation, Position(number, 0), "all_gather()", json.dumps(rank), generation.ranks
        )

    def leave(self, rank: int) -> None:
        member = self.members[rank]
        member.loop.exit = Exit(0, "left", "left")
        member.loop.write_beat(member.loop.beat(), self.now)


def test_a_member_whose_look_hangs_does_not_look_alive(tmp_path: Path) -> None:
    """The others should not wait for ever. It still says that it leaves."""
    member, beats = hand_driven(tmp_path, PosixStore(), 0), RunPaths(tmp_path).beats
    member.begin(0.0)
    member.looking_since = 0.0
    said = []
    for now, last in ((0.1, False), (1000.0, False), (2000.0, True)):
        member.beat(now, 2.0, last=last)
        said.append([name.split(".")[2:4] for name in os.listdir(beats)])
    assert said == [[["beat-1", "joining"]], [["beat-1", "joining"]], [["beat-2", "left"]]]


def test_a_member_that_was_stopped_counts_that_time_as_nobodys_silence(tmp_path: Path) -> None:
    """I7, for members of whom it has never seen a heartbeat."""
    trio = Trio(tmp_path)
    observer = trio.members[2].loop.observer
    observer.ledger = replace(observer.ledger, seen={})
    for folder in (observer.paths.beats, observer.paths.status):
        for path in folder.iterdir():
            if "node-0002" not in path.name:
                path.unlink()
    trio.call(2, 1)
    trio.now += 40.0
    for _ in range(6):
        trio.look(2)
        assert not trio.ends
    while not trio.ends and trio.now < 80.0:
        trio.look(2)
    assert isinstance(trio.ends[2], fsbarrier.PeerLost)


def test_whoever_leaves_after_a_collective_is_not_lost_to_one_with_old_listings(tmp_path: Path) -> None:
    trio = Trio(tmp_path)
    trio.call(2, 1)
    trio.look(2)
    trio.look(2)  # its listing of the row is from before the others came
    for rank in (0, 1):
        trio.call(rank, 1)
    trio.look(0, 1)
    trio.look(0, 1)
    assert trio.ends[0] == trio.ends[1] == [0, 1, 2]
    trio.leave(0)
    trio.leave(1)
    trio.look(2)
    trio.look(2)
    assert trio.ends[2] == [0, 1, 2]


def test_whoever_could_not_give_its_part_until_its_generation_was_removed_is_fenced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trio = Trio(tmp_path)
    member, paths = trio.members[0], RunPaths(tmp_path)
    first = member.generation
    assert first is not None

    def failing(store: PosixStore, path: Path, *_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, "the mount fails", str(path))

    with monkeypatch.context() as outage:
        outage.setattr(type(member.loop.store), "put", failing)
        trio.call(0, 1)
        with pytest.raises(OSError, match="the mount fails"):
            settle(member.tick, trio.now)
    # Meanwhile the others have gone on without it.
    for number in (2, 3):
        members = tuple(one for one in first.members if one.rank != 0)
        PosixStore().create(
            paths.generation(number), replace(first, number=number, members=members, leader=1)
        )
    shutil.rmtree(paths.facts_of(1))
    with pytest.raises(fsbarrier.Fenced):
        settle(member.tick, trio.now + 0.5)


def test_whoever_leaves_before_a_collective_is_lost_all_the_same(tmp_path: Path) -> None:
    trio = Trio(tmp_path)
    for number in (1, 2):
        for rank in range(3):
            if (rank, number) != (0, 2):
                trio.call(rank, number)
        trio.old.old = False
        for _ in range(3):
            trio.look(*((0, 1, 2) if number == 1 else (1, 2)))
        if number == 1:
            assert trio.ends[2] == [0, 1, 2]
            trio.leave(0)
            trio.old.old = True
    for rank in (1, 2):
        error = trio.ends[rank]
        assert isinstance(error, fsbarrier.PeerLost) and error.rank == 0 and "it left the group" in str(error)


# --- joining at the same moment as others ---------------------------------------------------------------------------------------


def test_a_node_that_refuses_and_leaves_before_its_first_heartbeat_is_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beat = GroupMember.beat

    def only_the_last(member: GroupMember, *args: Any, last: bool = False, **kwargs: Any) -> float:
        is_quiet = member.loop.join.rank == 1 and not last
        return 0.01 if is_quiet else beat(member, *args, last=last, **kwargs)

    def refused(rank: int, num_nodes: int) -> str:
        with pytest.raises(ValueError, match="all must give the same") as caught:
            fsbarrier.join(tmp_path, node_rank=rank, num_nodes=num_nodes, **FAST)
        return str(caught.value)

    monkeypatch.setattr(GroupMember, "beat", only_the_last)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(refused, 1, 3)
        until(lambda: any(RunPaths(tmp_path).joins.glob("*")))
        assert "num_nodes=2" in refused(0, 2)
        assert "num_nodes=3" in first.result()


class StaleJoins(PosixStore):
    """A mount that does not show the newest starts yet."""

    def names(self, directory: Path) -> list[str]:
        return [name for name in super().names(directory) if not name.endswith("inc-0002.json")]


def test_no_heartbeat_bears_another_process_s_incarnation(tmp_path: Path) -> None:
    """A node that was left behind tries to join anew while its successor has just done so."""
    paths, store = RunPaths(tmp_path), StaleJoins()
    loop = node_loop(observer(tmp_path, store))
    here = loop.join
    for number, members in ((1, (Member(0, 1), Member(1, 1))), (2, (Member(1, 1),))):
        if number == 2:
            store.create(paths.join(0, 2), replace(here, incarnation=2, host="new", pid=2))
        record = Generation(number, members, members[0].rank, Position(1, 0), "")
        store.create(paths.generation(number), record)
        loop.observer.schedule.poll_now()
        with contextlib.suppress(fsbarrier.Fenced):
            settle(loop.tick, float(number))
    assert loop.node.incarnation == 2 and loop.beat().incarnation == 1


def test_what_was_offered_to_a_generation_is_not_given_to_the_next() -> None:
    """The caller may ask in a generation that is over; rows are numbered alike in both."""
    work, at = CollectiveWork(), Position(1, 0)
    second = Generation(2, (Member(0, 1), Member(1, 1)), 0, at, "regrouped")
    node = replace(Node(0, 1, 0.0), generation=second, position=at)
    first = replace(second, number=1)
    work.asked = Collective(first, at, "broadcast(src=1)", None, (1,))
    work.launch(node, RowPart.EACH)
    assert work.report is None
    work.asked = Collective(second, at, "all_gather()", "1", (0, 1))
    report = work.report
    assert report is not None and report.value == {"call": "all_gather()", "json": "1"}
