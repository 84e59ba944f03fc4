"""Simulates groups (`fsbarrier.join`): members with random callers, under faults, and their invariants.

The member is the real one (fsbarrier/group/member.py). This module replaces its clock, and a caller that calls, computes, regroups,
gives up and leaves at random replaces the user's script. As in a real group, nobody looks while its caller computes. The invariants
compare what each caller received with what the callers sent.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from random import Random
from typing import TYPE_CHECKING, cast

from fsbarrier.errors import NodeError, OutOfStep, PeerLost, StoreError
from fsbarrier.group.collective import BARRIER, Collective
from fsbarrier.group.member import make_member
from fsbarrier.protocol.facts import Generation, Join
from fsbarrier.protocol.state import Exit
from fsbarrier.rundir.record_store import Store
from fsbarrier.sim.faults import Crash, Livelock
from fsbarrier.sim.invariants import Violation, i1_nobody_passes_early, i3_only_forward, i8_only_whole_records
from fsbarrier.sim.process import Process
from fsbarrier.sim.setup import PATHS, Setup
from fsbarrier.sim.store import MountClient
from fsbarrier.sim.world import World

if TYPE_CHECKING:
    from fsbarrier.sim.faults import Trouble

#: how long a caller waits for one call
TIMEOUT_S = 60.0
#: the pause after a look that failed
FAILED_S = 0.2
GATHER = "all_gather()"
#: how long a script computes between two collectives
THINKS_S = (0.0, 0.0, 0.01, 0.3, 2.0, 5.0)


@dataclass(frozen=True, slots=True)
class Call:
    """A caller's call of a collective, with the object that it sent. The row is (generation, number)."""

    time: float
    process: int
    rank: int
    row: tuple[int, int]
    name: str
    given: str


def objects_of_call(name: str, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """The members whose objects a call returns."""
    if name in (BARRIER, GATHER):
        return ranks if name == GATHER else ()
    return (int(name.removeprefix("broadcast(src=").removesuffix(")")),)


@dataclass(frozen=True, slots=True)
class End:
    """How a call ended: with objects or an error. `left`: the members that have left, by the error."""

    time: float
    call: Call
    generation: Generation
    objects: tuple[object, ...] = ()
    error: str = ""
    about: int | None = None
    left: bool = False


@dataclass
class Diary:
    """All calls and their ends."""

    calls: list[Call] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)
    #: the members that left gracefully: (process, rank, the last row that it passed)
    farewells: list[tuple[int, int, tuple[int, int]]] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)


class GroupProcess(Process):
    """One start of one member, and its caller."""

    def __init__(
        self, world: GroupWorld, number: int, rank: int, client: MountClient, trouble: Trouble
    ) -> None:
        super().__init__(world, number, rank, client, trouble)
        here = Join(rank, 0, self.host, number, self.host)
        limits = replace(world.rules.limits, join_timeout_s=float("inf"))
        store = cast(Store, client)
        self.member = make_member(store, PATHS, here, world.setup.nodes, limits, world.beat_s)
        self.loop, self.observer = self.member.loop, self.member.loop.observer
        self.loop.write_event = self._record
        self.group_world = world
        self.dice = Random(f"caller {world.seed} {number}")
        self.calls_left = self.dice.randint(2, 12)
        self.generation: Generation | None = None
        self.next_number = 1
        self.asked: tuple[Collective, Call] | None = None
        self.regrouping = False
        self.since = world.now

    # --- a look ---

    def _look(self) -> str:
        self.ticked_at = self.world.now
        member = self.member
        try:
            if not self.joined:
                member.begin(self.clock)
                self.joined = True
                return "joined"
            if self.generation is not None and not self.regrouping and self.asked is None:
                return ""
            if self.news_at is not None and self.news_at <= self.world.now:
                self.news_at = None
                self.observer.hurry()
            member.look(self.clock)
            self._react()
        except OSError:
            self.wake(self.world.now + FAILED_S)
            self._give_up_in_time()
        except NodeError as failure:
            if failure.exit_code not in (3, 6):
                self.group_world.diary.unexpected.append(f"node {self.rank}: {failure!r}")
            self.world.end(self, failure.exit_code, str(failure))
        except Crash:
            return "crash"
        except Livelock as error:
            self.world.history.stuck.append(f"node {self.rank}: {error}")
            return "crash"
        return ""

    def _write_journal(self) -> None:
        """A group has none."""

    def put_beat(self) -> float:
        """A member's thread writes heartbeats whatever its caller does, unless a look hangs."""
        if self.held_look is None:
            self.life.looked_at = self.clock
        return super().put_beat()

    # --- the caller ---

    def _react(self) -> None:
        """The script: look at what has become of the call, and go on. Raises OSError."""
        if self.generation is None or self.regrouping:
            now = self.member.generation
            if now is not None and now != self.generation:
                self._enter(now)
                self._think()
        elif self.asked is not None:
            collective, call = self.asked
            try:
                objects = self.member.outcome(collective)
            except (PeerLost, OutOfStep) as error:
                self._ended(call, (), error)
                return
            if objects is not None:
                self._ended(call, tuple(objects), None)
        self._give_up_in_time()

    def _give_up_in_time(self) -> None:
        """A call ends at its time."""
        if self.world.now - self.since <= TIMEOUT_S:
            return
        if not self.joined:
            self.world.end(self, StoreError.exit_code, "cannot join")
        elif self.generation is None or self.regrouping:
            self._leave()
        elif self.asked is not None:
            self._ended(self.asked[1], (), None, timed_out=True)

    def _enter(self, generation: Generation) -> None:
        self.generation, self.next_number = generation, generation.start.iteration
        self.regrouping, self.asked = False, None

    def _ended(
        self, call: Call, objects: tuple[object, ...], error: Exception | None, *, timed_out: bool = False
    ) -> None:
        assert self.generation is not None
        diary, said = self.group_world.diary, type(error).__name__ if error is not None else ""
        about = getattr(error, "rank", None)
        left = "it left the group" in str(error)
        end = End(
            self.world.now, call, self.generation, objects, "timed out" if timed_out else said, about, left
        )
        diary.ends.append(end)
        self.world.say(f"node {self.rank}: {call.name} {call.row}: {end.error or list(objects)}", ".")
        self.asked = None
        if not end.error:
            self.next_number += 1
            self.calls_left -= 1
            if self.calls_left <= 0:
                diary.farewells.append((self.number, self.rank, call.row))
                self._leave()
            elif self.member.joiners and self.dice.random() < 0.5:
                self._regroup()
            else:
                self._think()
        elif isinstance(error, PeerLost | OutOfStep) or self.dice.random() < 0.4:
            self._regroup()
        else:
            self._call(again=call)

    def _regroup(self) -> None:
        assert self.generation is not None
        self.regrouping, self.since = True, self.world.now
        self.member.regroup(self.generation)
        self.wake(self.world.now + 0.001)

    def _think(self) -> None:
        self.world.after(self.dice.choice(THINKS_S), self._call)

    def _call(self, again: Call | None = None) -> None:
        if not self.up or self.loop.exit is not None or self.generation is None:
            return
        if self.paused:
            self.deferred.append(self._call)
            return
        if self.regrouping or self.asked is not None:
            return
        row = self.generation.number, self.next_number
        name = self.group_world.collective_of(row, self.generation, self.dice)
        given = json.dumps(f"{self.number}: {row}")
        if again is not None:
            name, given = again.name, again.given
        objects_of = objects_of_call(name, self.generation.ranks)
        gives = name == GATHER or objects_of == (self.rank,)
        position = replace(self.generation.start, iteration=self.next_number)
        collective = Collective(self.generation, position, name, given if gives else None, objects_of)
        call = again or Call(self.world.now, self.number, self.rank, row, name, given)
        if again is None:
            self.group_world.diary.calls.append(call)
        self.asked, self.since = (collective, call), self.world.now
        self.member.work.asked = collective
        self.wake(self.world.now + 0.0005)
        self.world.after(TIMEOUT_S + 1.0, lambda: self.wake(self.world.now))

    def _leave(self) -> None:
        self.loop.exit = Exit(0, "left", "left")


class GroupWorld(World):
    """One schedule of a group."""

    def __init__(self, seed: int, setup: Setup) -> None:
        super().__init__(seed, replace(setup, iterations=1, phases="both", policy="shrink", min_nodes=1))
        self.seed, self.diary = seed, Diary()
        self.history.first = self.history.last = 0
        # A strike that is bound to a phase of an iteration gets a time instead.
        self.awaited = []
        self.strikes = [
            replace(strike, iteration=0, time=self.rng.uniform(0.0, 30.0))
            for strike in self.strikes
            if strike.kind not in ("stop", "program")
        ]
        self.taken_back_to, self.sessions_left = None, 0
        self.odd_rate = self.rng.choice((0.0, 0.0, 0.0, 0.02)) if setup.mix else 0.0

    def collective_of(self, row: tuple[int, int], generation: Generation, dice: Random) -> str:
        """The collective that all members call in a row; sometimes one of them calls another."""
        drawn = Random(f"row {self.seed} {row}") if dice.random() >= self.odd_rate else dice
        src = drawn.choice(generation.ranks)
        return drawn.choice((BARRIER, GATHER, f"broadcast(src={src})"))

    def new_process(self, rank: int, client: MountClient, trouble: Trouble) -> Process:
        return GroupProcess(self, len(self.processes), rank, client, trouble)

    def over(self) -> bool:
        return {ended.code for ended in self.history.ended.values()} <= {0, 6}


# --- what must hold ---------------------------------------------------------------------------------------------------------


def check_groups(world: GroupWorld) -> list[Violation]:
    """All violations in a finished schedule."""
    history = world.history
    found = [Violation("I1", what) for what in i1_nobody_passes_early(history)]
    found += [Violation("I3", what) for what in i3_only_forward(history)]
    found += [Violation("I8", what) for what in i8_only_whole_records(history)]
    found += [Violation("I2", what) for what in everybodys_values(world.diary)]
    found += [Violation("I6", what) for what in (*history.stuck, *typed_ends(world))]
    return found + [Violation("I7", what) for what in lost_rightly(world.diary)]


def everybodys_values(diary: Diary) -> Iterator[str]:
    """A caller that passed a collective received what the members of its generation sent in this row. If they made different calls, at
    least one of them has not passed it, and whoever sent what others received has made their call."""
    given: defaultdict[tuple[int, int], dict[int, Call]] = defaultdict(dict)
    for call in diary.calls:
        if call.rank in given[call.row]:
            yield f"node {call.rank} called twice in {call.row}"
        given[call.row][call.rank] = call
    passed: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
    for end in diary.ends:
        if not end.error:
            passed[end.call.row].add(end.call.rank)
    for end in diary.ends:
        if end.error:
            continue
        calls, ranks, name = given[end.call.row], end.generation.ranks, end.call.name
        for rank in ranks:
            other = calls.get(rank)
            if other is None or other.time > end.time:
                yield f"node {end.call.rank} passed {end.call.row} before node {rank} called"
                return
        senders = objects_of_call(name, ranks)
        for rank in senders:
            if calls[rank].name != name:
                yield f"node {end.call.rank} passed {end.call.row} as {name}, node {rank} called {calls[rank].name}"
                return
        if len({calls[rank].name for rank in ranks}) > 1 and passed[end.call.row] == {*ranks}:
            yield f"all have passed {end.call.row}, although they made different calls"
            return
        right = tuple(json.loads(calls[rank].given) for rank in senders)
        if end.objects != right:
            yield f"node {end.call.rank} was given {end.objects} in {end.call.row}; it should be {right}"


def typed_ends(world: GroupWorld) -> Iterator[str]:
    """Every call ended with its objects or with an error that the schedule explains."""
    diary, struck = world.diary, world.history.faults
    yield from diary.unexpected
    names: defaultdict[tuple[int, int], set[str]] = defaultdict(set)
    for call in diary.calls:
        names[call.row].add(call.name)
    for end in diary.ends:
        if end.error == "OutOfStep" and len(names[end.call.row]) < 2:
            yield f"node {end.call.rank} was told that others called something else in {end.call.row}; nobody did"
        if end.error == "timed out" and len({*names[end.call.row]}) > 1 and not struck:
            yield f"node {end.call.rank} was not told that others called something else in {end.call.row}"
        if end.error == "timed out" and not struck and not world.history.caches:
            yield f"node {end.call.rank} waited in vain in {end.call.row}"


def lost_rightly(diary: Diary) -> Iterator[str]:
    """A member that leaves after a row is not lost for those that are still in it, however stale their listings are."""
    last = {(rank, row[0]): row for _, rank, row in diary.farewells}
    for end in diary.ends:
        if end.error == "PeerLost" and end.left and end.about is not None:
            passed = last.get((end.about, end.call.row[0]))
            if passed is not None and passed >= end.call.row:
                yield f"node {end.call.rank} lost node {end.about} in {end.call.row}, which that one had passed"
