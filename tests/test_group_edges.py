"""Groups where something is wrong: members that call different things, operations that fail or hang, listings that are old."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Container
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fuse import mounting
from group_members import DEADLINE_S, Failed, Member, Members

import fsbarrier
from fsbarrier.group import bounded_wait
from fsbarrier.group import group as group_module
from fsbarrier.group import member as member_module
from fsbarrier.group.bounded_wait import BoundedWait
from fsbarrier.group.collective import Collective
from fsbarrier.group.member_threads import MemberThreads
from fsbarrier.group.noted_store import NotedStore
from fsbarrier.protocol.facts import Join, Position
from fsbarrier.protocol.membership import Limits
from fsbarrier.protocol.state import Exit
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.record_store import PosixStore

QUICK = {"beat_s": 0.1, "suspect_s": 0.3, "dead_s": 0.6, "timeout_s": 40.0}

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
def test_members_that_call_different_things_are_all_told(
    tmp_path: Path, calls: list[tuple[str, dict[str, Any]]], typed: tuple[str, ...]
) -> None:
    with Members(tmp_path, 3) as group:
        group.start().joined()
        group.ask("barrier")
        for rank, (call, arguments) in enumerate(calls):
            group[rank].tell(call, **arguments)
        told = [group.outcome(rank) for rank in range(3)]
        for rank, failed in enumerate(told):
            assert isinstance(failed, Failed) and failed.kind == "OutOfStep", failed
            assert f"node {rank} " in failed.message and typed[rank] in failed.message
            # Everybody names at least one member that called something else, and what that was.
            other = failed.rank
            assert typed[other] != typed[rank]
            assert f"node {other} " in failed.message and f"called {typed[other]}" in failed.message
        # It is over for this generation, whatever they call now, and regroup() leaves it behind.
        assert {failed.kind for failed in group.ask("all_gather", obj=2)} == {"OutOfStep"}
        group.ask("regroup")
        assert group.ask("all_gather", obj=3) == [[3, 3, 3]] * 3


# --- operations that fail -----------------------------------------------------------------------------------------------------


class FailingStore(NotedStore):
    """Every operation of the kind `failing` fails, in a row's directory only, from the first one on."""

    failing = ""

    def _may_fail(self, verb: str, path: Path) -> None:
        if verb == self.failing and "/p00-" in str(path):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    def names(self, directory: Path) -> list[str]:
        self._may_fail("names", directory)
        return super().names(directory)

    def read(self, path: Path, cls: type[Any]) -> Any:
        self._may_fail("read", path)
        return super().read(path, cls)

    def put(self, path: Path, record: Any, *, durable: bool = False) -> None:
        self._may_fail("put", path)
        super().put(path, record, durable=durable)


@pytest.mark.parametrize("verb", ["names", "put", "read"])
def test_the_same_call_after_a_failure_is_the_same_collective(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """Whichever operation of a collective fails until StoreError is raised, the next call is paired with the right one."""
    failing, this_thread = FailingStore(), threading.current_thread()
    monkeypatch.setattr(
        group_module,
        "NotedStore",
        lambda: failing if threading.current_thread() is this_thread else NotedStore(),
    )

    def other() -> list[list[int]]:
        with fsbarrier.join(tmp_path, node_rank=1, num_nodes=2, **QUICK) as group:
            return [group.all_gather(100 + number) for number in range(4)]

    with ThreadPoolExecutor(1) as pool:
        gathered = pool.submit(other)
        with fsbarrier.join(tmp_path, node_rank=0, num_nodes=2, **QUICK) as group:
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
        assert gathered.result(60) == [[number, 100 + number] for number in range(4)]


# --- a mount that hangs -------------------------------------------------------------------------------------------------------

needs_fuse = pytest.mark.skipif(bool(mounting.missing()), reason=mounting.missing() or "")
# Long enough for members to join on a busy machine, and far below what the test waits for an answer.
TIMEOUT_S = 6.0


@needs_fuse
def test_every_call_ends_on_a_mount_that_hangs(tmp_path: Path) -> None:
    """The mount's server answers no more: each call raises StoreError in its time, goes on when the mount does, and keeps nobody alive."""
    backing, mount = tmp_path / "backing", tmp_path / "mount"
    backing.mkdir()
    mount.mkdir()
    program = (
        sys.executable,
        str(Path(mounting.__file__).with_name("passthrough.py")),
        str(backing),
        str(mount),
    )
    with ExitStack() as stack:
        server = stack.enter_context(
            mounting.serving(program, "mounted", before_end=lambda: mounting.unmount(mount))
        )
        group = stack.enter_context(
            Members(mount / "group", 4, beat_s=0.2, suspect_s=60.0, dead_s=90.0, timeout_s=TIMEOUT_S)
        )
        group.start().joined()
        late = Member(mount / "other", 0, 2, timeout_s=TIMEOUT_S).ready()
        stack.callback(late.close)
        os.kill(server, signal.SIGUSR1)
        calls = {0: "barrier", 1: "all_gather", 2: "broadcast", 3: "regroup"}
        arguments: dict[str, dict[str, Any]] = {"all_gather": {"obj": 1}, "broadcast": {"obj": 1}}
        for rank, call in calls.items():
            group[rank].tell(call, **arguments.get(call, {}))
        late.join()
        for rank, call in calls.items():
            failed = group.outcome(rank)
            assert isinstance(failed, Failed) and failed.kind == "StoreError", failed
            assert f"{call}(" in failed.message and f"{mount}/group has not answered" in failed.message
            assert "while " in failed.message
        with pytest.raises(Failed, match=r"join\(\): .*/other has not answered") as refused:
            late.answer()
        assert refused.value.kind == "StoreError"
        # An interpreter ends although its threads hang.
        group[3].quit()
        assert group[3].process.wait(DEADLINE_S) == 0
        os.kill(server, signal.SIGUSR1)
        # The mount goes on, and the same calls with it: now the members see that they called different things.
        for rank in range(3):
            failed = group.ask(calls[rank], rank, **arguments.get(calls[rank], {}))[0]
            assert isinstance(failed, Failed) and failed.kind in ("OutOfStep", "PeerLost"), failed


# --- listings that are old ----------------------------------------------------------------------------------------------------


class OldListings(PosixStore):
    """Shows each row as it was when it was first listed, while `old`."""

    old = True

    def __init__(self) -> None:
        self._known: dict[Path, list[str]] = {}

    def names(self, directory: Path) -> list[str]:
        now = super().names(directory)
        return self._known.setdefault(directory, now) if self.old and "/gen-" in str(directory) else now


def hand_driven(tmp_path: Path, store: PosixStore, rank: int) -> member_module.GroupMember:
    limits = Limits(1.0, 15.0, 1.0, join_timeout_s=float("inf"))
    here = Join(rank, 0, f"host{rank}", 100 + rank, "boot")
    return group_module.make_member(store, RunPaths(tmp_path), here, 3, limits, 0.5)


class Trio:
    """Three members without threads; node 2's listings of rows are old."""

    def __init__(self, tmp_path: Path) -> None:
        self.now, self.old = 0.0, OldListings()
        stores = (PosixStore(), PosixStore(), self.old)
        self.members = [hand_driven(tmp_path, store, rank) for rank, store in enumerate(stores)]
        for member in self.members:
            assert member.begin(self.now)
        while any(member.snapshot.node.generation is None for member in self.members):
            self.look()

    def look(self, *ranks: int) -> None:
        """Half a second later, these (all, if none is named) have beaten and looked."""
        self.now += 0.5
        for rank in ranks or (0, 1, 2):
            member = self.members[rank]
            member.loop.write_beat(member.beat(self.now), member.loop.store, self.now)
        for rank in ranks or (0, 1, 2):
            self.members[rank].look(self.now)

    def call(self, rank: int, number: int) -> None:
        generation = self.members[rank].snapshot.node.generation
        assert generation is not None
        self.members[rank].work.asked = Collective(
            generation, Position(number, 0), "all_gather", json.dumps(rank), generation.ranks
        )

    def leave(self, rank: int) -> None:
        member = self.members[rank]
        member.loop.exit = Exit(0, "left", "left")
        member.loop.write_beat(member.beat(self.now), member.loop.store, self.now)

    def outcome(self, rank: int) -> Any:
        outcome = self.members[rank].snapshot.outcome
        assert outcome is not None and outcome.of is self.members[rank].asked
        return outcome.error or list(outcome.objects)


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
        assert trio.members[2].snapshot.outcome is None
    while trio.members[2].snapshot.outcome is None and trio.now < 80.0:
        trio.look(2)
    assert isinstance(trio.outcome(2), fsbarrier.PeerLost)


class Stopped(threading.Condition):
    """What a caller waits at, in a process that is stopped for ten seconds in each wait of which there is a number in `stops`."""

    def __init__(self, stops: Container[int]) -> None:
        super().__init__()
        self.now, self.waits, self._stops = 0.0, 0, stops

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None and self.waits < 1000, "the wait does not end"
        self.now += 10.0 if self.waits in self._stops else timeout
        self.waits += 1
        return False


@pytest.mark.parametrize(("stops", "found_at"), [((), 20), ((19,), 21)], ids=["not", "last"])
def test_what_the_last_look_shows_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stops: Container[int], found_at: int
) -> None:
    threads = MemberThreads(hand_driven(tmp_path, PosixStore(), 0), NotedStore(), 0.5)
    news = Stopped(stops)
    threads.news = news
    monkeypatch.setattr(bounded_wait.time, "monotonic", lambda: news.now)
    wait = BoundedWait(threads, 10.0, "barrier()")
    assert wait.until(lambda _: news.waits if news.waits == found_at else None) == found_at


def test_whoever_leaves_after_a_collective_is_not_lost_to_one_with_old_listings(tmp_path: Path) -> None:
    trio = Trio(tmp_path)
    trio.call(2, 1)
    trio.look(2)
    trio.look(2)  # its listing of the row is from before the others came
    for rank in (0, 1):
        trio.call(rank, 1)
    trio.look(0, 1)
    trio.look(0, 1)
    assert trio.outcome(0) == trio.outcome(1) == [0, 1, 2]
    trio.leave(0)
    trio.leave(1)
    trio.look(2)
    trio.look(2)
    assert trio.outcome(2) == [0, 1, 2]


def test_whoever_could_not_give_its_part_until_its_generation_was_removed_is_fenced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trio = Trio(tmp_path)
    member, paths = trio.members[0], RunPaths(tmp_path)
    first = member.snapshot.node.generation
    assert first is not None

    def failing(store: PosixStore, path: Path, *_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, "the mount fails", str(path))

    with monkeypatch.context() as outage:
        outage.setattr(type(member.loop.store), "put", failing)
        trio.call(0, 1)
        member.look(trio.now)
        assert "the mount fails" in member.snapshot.trouble
    # Meanwhile the others have gone on without it.
    for number in (2, 3):
        members = tuple(one for one in first.members if one.rank != 0)
        PosixStore().create(
            paths.generation(number), replace(first, number=number, members=members, leader=1)
        )
    shutil.rmtree(paths.facts_of(1))
    member.look(trio.now + 0.5)
    assert isinstance(member.snapshot.failure, fsbarrier.Fenced)


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
            assert trio.outcome(2) == [0, 1, 2]
            trio.leave(0)
            trio.old.old = True
    for rank in (1, 2):
        error = trio.outcome(rank)
        assert isinstance(error, fsbarrier.PeerLost) and error.rank == 0 and "it left the group" in str(error)
