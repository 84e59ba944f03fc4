"""Who is given up, and who may be taken in: a node that says that it waits, and nobody who still believes to be a member."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from fsbarrier.node.observer import Observer
from fsbarrier.program import PHASE_NAMES, Phase, Program
from fsbarrier.protocol.codec import encode
from fsbarrier.protocol.facts import Beat, Generation, Join, Member, Position, StopRequest
from fsbarrier.protocol.membership import JOINING, Ledger, Limits, left_to_others, live_joiners, losses
from fsbarrier.protocol.state import Node
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.store import PosixStore


def joiners(states: list[str], *, incarnation: int = 2, seconds_ago: float = 0.0) -> dict[int, Member]:
    """What a node sees of node 0, whose second start has joined, after heartbeats in these states."""
    ledger = Ledger()
    for counter, state in enumerate(states):
        beat = Beat(0, incarnation, counter, "a", 1, state)
        ledger = ledger.observe({0: beat}, float(counter), float(counter), 60.0)
    joins = {0: Join(0, 2, "a", 1, "boot")}
    return live_joiners(joins, ledger, len(states) - 1 + seconds_ago, Limits())


def test_one_that_waits_and_beats_is_taken_in() -> None:
    assert joiners([JOINING, JOINING]) == {0: Member(0, 2, "a")}


@pytest.mark.parametrize("state", ["running", "leaving", "left", "finished", "stopped", "broken"])
def test_one_in_another_state_is_not(state: str) -> None:
    """A stopped node that wakes beats as the member it was, until it learns that the others went on: it comes back anew."""
    assert joiners([JOINING, state]) == {}


def test_a_file_that_lies_about_is_no_sign_of_life() -> None:
    assert joiners([JOINING]) == {}
    assert joiners([JOINING, JOINING], seconds_ago=7.0) == {}
    assert joiners([JOINING, JOINING], incarnation=1) == {}


@pytest.mark.parametrize("known", [1, 2])
def test_whoever_beats_as_a_newer_start_is_not_silent(known: int) -> None:
    """I7: the heartbeat of a second start may be read before its record; that is a restart, and no silence since the generation began."""
    ledger = Ledger().observe({0: Beat(0, 2, 1, "b", 1, JOINING)}, 100.0, 100.0, 60.0)
    joins = {0: Join(0, known, "a", 1, "boot")}
    (loss,) = losses([Member(0, 1, "a")], 1, joins, ledger, since=0.0, now=100.0, limits=Limits())
    assert loss.why == "restarted as incarnation 2"


def test_one_whose_heartbeat_cannot_be_read_is_not_taken_for_dead_yet() -> None:
    """I7: half a heartbeat may be news. But a dead node's may stay torn for ever, so that this holds for `blind_s` and no longer."""
    ledger = Ledger().observe({0: Beat(0, 1, 5, "a", 1, "running")}, 0.0, 0.0, 3.0)
    for second in range(1, 20):
        ledger = ledger.observe({0: Beat(0, 1, 5, "a", 1, "running")}, float(second), float(second), 3.0)

    def lost(ledger: Ledger, now: float) -> bool:
        return bool(losses([Member(0, 1, "a")], 1, {}, ledger, since=0.0, now=now, limits=Limits()))

    assert lost(ledger, 19.0)
    torn = ledger.observe({}, 20.0, 20.0, 3.0, unread={0})
    assert not lost(torn, 20.0)
    heard = torn.observe({0: Beat(0, 1, 6, "a", 1, "running")}, 21.0, 21.0, 3.0)
    assert not lost(heard, 21.0)
    for second in (21.0, 22.0, 23.0):
        torn = torn.observe({}, second, second, 3.0, unread={0})
        assert lost(torn, second) == (second >= 23.0)


def test_one_that_was_for_others_to_watch_is_silent_only_from_the_first_look_on() -> None:
    """I7: whoever becomes a watcher has old news of most members, or none; that is no silence."""
    member, beat = Member(0, 1, "a"), Beat(0, 1, 5, "a", 1, "running")
    for known in ({0: beat}, {}):
        ledger = Ledger().observe(known, 0.0, 0.0, 3.0)
        for second in range(1, 31):
            ledger = ledger.observe({}, float(second), float(second), 3.0, left_out={0})
        for second in range(31, 46):
            ledger = ledger.observe({0: beat} if second > 32 else {}, float(second), float(second), 3.0)
            lost = losses([member], 1, {}, ledger, since=0.0, now=float(second), limits=Limits())
            assert bool(lost) == (bool(known) and second == 45), second
        assert ledger.age(member, 46.0) == (16.0 if known else 13.0)


def test_the_first_members_watch_all_and_all_watch_them() -> None:
    members = tuple(Member(rank, 1) for rank in (2, 3, 5, 8, 13))
    generation = Generation(1, members, 2, Position(1, 0), "start")
    left_out = {rank: left_to_others(generation, rank, 2) for rank in generation.ranks}
    assert left_out == {2: set(), 3: set(), 5: {8, 13}, 8: {5, 13}, 13: {5, 8}}
    assert left_to_others(generation, 13, 5) == left_to_others(None, 13, 2) == frozenset()


PING = Program("ping", tuple(Phase(index, name) for index, name in enumerate(PHASE_NAMES)))


class Frozen(PosixStore):
    """A mount on which the listing of one directory never changes any more (two changes within one tick of its time)."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.known = directory, super().names(directory)

    def names(self, directory: Path) -> list[str]:
        return self.known if directory == self.directory else super().names(directory)


def test_of_two_starts_of_a_rank_the_newer_is_heard_and_the_older_told(tmp_path: Path) -> None:
    """I7: each has a heartbeat file of its own, and by its name the older learns of the newer, however old its listings of `joins/` are."""
    paths, store = RunPaths(tmp_path), PosixStore()
    for folder in (paths.joins, paths.beats):
        store.make_dir(folder)
    for incarnation in (1, 2):
        join = Join(1, incarnation, "ab"[incarnation - 1], 1, "boot")
        store.put(paths.join(1, incarnation), join)
        if incarnation == 1:
            frozen = Frozen(paths.joins)
    others, older = Observer(store, paths, PING), Observer(frozen, paths, PING)
    for observer in (others, older):
        observer.prepare()
    for counter in range(20):
        for incarnation in (2, 1):  # the older one always beats last
            beat = Beat(1, incarnation, counter, "ab"[incarnation - 1], 1, JOINING)
            store.put(paths.beat(1, incarnation), beat)
        seen = others.view(Node(0, 1, 0.0), float(counter)).ledger.seen[1]
        assert (seen.beat.incarnation, seen.since) == (2, float(counter))
        known = older.view(Node(1, 1, 0.0), float(counter)).joins[1]
        assert known.incarnation == 2


def test_half_a_heartbeat_is_known_as_such(tmp_path: Path) -> None:
    """Whatever an older start of that rank says; and it is looked at again at the next look, however quick."""
    paths, store = RunPaths(tmp_path), PosixStore()
    for folder in (paths.joins, paths.beats):
        store.make_dir(folder)
    for incarnation in (1, 2):
        store.put(paths.join(1, incarnation), Join(1, incarnation, "a", 1, "boot"))
    observer, me = Observer(store, paths, PING), Node(0, 1, 0.0)
    observer.prepare()

    def beat(incarnation: int, counter: int) -> Beat:
        return Beat(1, incarnation, counter, "a", 1, JOINING)

    store.put(paths.beat(1, 1), beat(1, 7))
    for counter in (1, 2):  # it is seen to move: quick looks spare it
        store.put(paths.beat(1, 2), beat(2, counter))
        assert observer.view(me, float(counter)).ledger.unsure == {}
    paths.beat(1, 2).write_bytes(encode(beat(2, 3))[:-9])
    torn = observer.view(me, 3.0).ledger
    assert (torn.seen[1].beat.counter, torn.unsure) == (2, {1: 3.0 + observer.paces.blind_s})
    store.put(paths.beat(1, 2), beat(2, 3))
    again = observer.view(me, 3.0 + observer.paces.beats_s / observer.paces.eager).ledger
    assert (again.seen[1].beat.counter, again.unsure) == (3, {})


def test_a_stop_that_is_asked_for_while_a_start_is_tried_again_is_heeded(tmp_path: Path) -> None:
    """One that was there before is not: the run was started again after it."""

    class Failing(PosixStore):
        left = 1

        def names(self, directory: Path) -> list[str]:
            if directory.name == "joins" and self.left:
                self.left -= 1
                raise OSError(errno.EIO, "the server is away")
            return super().names(directory)

    paths = RunPaths(tmp_path)
    PosixStore().make_dir(paths.stops)
    PosixStore().put(paths.stops / "000001.json", StopRequest(True, "before"))
    observer = Observer(Failing(), paths, PING)
    with pytest.raises(OSError, match="away"):
        observer.prepare()
    assert observer.stop is None
    PosixStore().put(paths.stops / "000002.json", StopRequest(True, "meanwhile"))
    observer.prepare()
    assert observer.view(Node(0, 1, 0.0), 0.0).stop == StopRequest(True, "meanwhile")


def test_work_knows_the_joins_of_all_members(tmp_path: Path) -> None:
    """The generation names them, so they are there, even where the listing never shows them: who shares a host rests on it."""
    paths = RunPaths(tmp_path)
    frozen = Frozen(paths.joins)
    observer = Observer(frozen, paths, PING)
    observer.prepare()
    frozen.create(paths.join(1, 2), Join(1, 2, "b", 1, "boot"))
    generation = Generation(1, (Member(1, 2),), 1, Position(1, 0), "start")
    assert observer.joins_of(generation)[1].host == "b"
    with pytest.raises(OSError, match="cannot be read"):
        observer.joins_of(Generation(1, (Member(0, 1),), 0, Position(1, 0), "start"))
