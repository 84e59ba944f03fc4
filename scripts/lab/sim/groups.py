"""Simulates groups (`fsbarrier.join`): members with random callers, under faults, and their invariants.

The group and its member are the real ones (fsbarrier/group/); their caller's script calls, computes, regroups, gives up
and leaves at random. The invariants compare what each caller received with what the callers sent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from random import Random
from typing import cast

from fsbarrier.coordination.polling import LookWaits
from fsbarrier.errors import EXIT_SIGTERM, BarrierTimeout, Fenced, NodeError, OutOfStep, PeerLost, StoreError
from fsbarrier.group.collective import BARRIER
from fsbarrier.group.group import Group, HeartbeatThread
from fsbarrier.group.member import make_member
from fsbarrier.protocol.facts import Join
from fsbarrier.rundir.record_store import Store
from fsbarrier.store.retry import fails_or_hides, patiently
from sim.history import JournalLine
from sim.invariants import Violation, i1_nobody_passes_early, i3_only_forward, i8_only_whole_records
from sim.schedule import Crash, SimThread, Start
from sim.setup import PATHS, Setup
from sim.store import MountClient
from sim.strikes import StruckWorld
from sim.work import SimFlag

#: how long a caller waits for one call
TIMEOUT_S = 60.0
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
    """How a call ended: with objects or an error."""

    time: float
    call: Call
    ranks: tuple[int, ...]
    objects: tuple[object, ...] = ()
    error: NodeError | None = None


@dataclass
class Diary:
    """All calls and their ends."""

    calls: list[Call] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)
    #: the members that left gracefully: (rank, the last row that it passed)
    farewells: list[tuple[int, tuple[int, int]]] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)


class GroupProcess(Start):
    """One start of one member, and its caller."""

    def __init__(self, world: GroupWorld, number: int, rank: int, client: MountClient) -> None:
        super().__init__(world, number, rank, client)
        size = world.setup.nodes + (world.now < world.mistyped_until)
        here = Join(rank, 0, self.host, number, self.host, choices={"num_nodes": size})
        limits = replace(world.rules.limits, join_timeout_s=float("inf"))
        self.world = world
        self.member = make_member(cast(Store, client), PATHS, here, size, limits, world.draw.beat_s)
        self.member.loop.write_event = lambda event, node, fields: world.history.add(
            JournalLine(world.now, number, event, node, fields, world.now)
        )
        self.dice = Random(f"caller {world.seed} {number}")
        self._signalled = False
        self.main: SimThread = self.thread(self._main)

    def _main(self) -> None:
        """The user's process: it joins, calls and leaves."""
        group: Group | None = None
        try:
            patiently(
                lambda: self.member.begin(self.clock),
                TIMEOUT_S,
                passes=fails_or_hides,
                cancel=SimFlag(self.main.sleep),
                clock=lambda: self.clock,
            )
            self.joined = True
            group = Group(
                self.member,
                TIMEOUT_S,
                cast(HeartbeatThread, SimHeartbeats(self)),
                cast(LookWaits, SimWaits(self.main)),
                lambda: self.clock,
            )
            self._script(group)
            self._leave(group, EXIT_SIGTERM if self._signalled else 0, "left")
        except BarrierTimeout as error:
            # Nobody else is there any more.
            self._leave(group, 0, str(error))
        except (NodeError, OSError) as error:
            code = error.exit_code if isinstance(error, NodeError) else StoreError.exit_code
            if code not in (StoreError.exit_code, Fenced.exit_code):
                self.world.diary.unexpected.append(f"node {self.rank}: {error!r}")
            self._leave(group, code, str(error))

    def _leave(self, group: Group | None, code: int, why: str) -> None:
        if group is not None:
            group.leave()
        self.end(code, why)

    def _script(self, group: Group) -> None:
        """Raises NodeError."""
        world, dice, diary, calls_left = self.world, self.dice, self.world.diary, self.dice.randint(2, 12)
        again: Call | None = None
        number = self._first_row()
        while calls_left and not self._signalled:
            if again is None:
                self.main.sleep(dice.choice(THINKS_S))
                row = group.generation, number
                name = world.collective_of(row, group.members, dice)
                again = Call(world.now, self.number, self.rank, row, name, f"{self.number}: {row}")
                diary.calls.append(again)
            call, ranks = again, group.members
            try:
                objects = _make(group, call)
            except (PeerLost, OutOfStep, BarrierTimeout) as error:
                diary.ends.append(End(world.now, call, ranks, error=error))
                world.say(f"node {self.rank}: {call.name} {call.row}: {type(error).__name__}", ".")
                if isinstance(error, BarrierTimeout) and dice.random() < 0.6:
                    continue
                regroups = True
            else:
                diary.ends.append(End(world.now, call, ranks, objects))
                world.say(f"node {self.rank}: {call.name} {call.row}: {[*objects]}", ".")
                number, calls_left = number + 1, calls_left - 1
                regroups = calls_left > 0 and bool(group.joiners) and dice.random() < 0.5
            again = None
            if regroups:
                group.regroup()
                number = self._first_row()
        if not calls_left:
            diary.farewells.append((self.rank, call.row))

    def _first_row(self) -> int:
        generation = self.member.generation
        assert generation is not None
        return generation.start.iteration

    def signal(self) -> None:
        self._signalled = True


class SimHeartbeats:
    """A member's heartbeats, with the methods of HeartbeatThread."""

    def __init__(self, process: GroupProcess) -> None:
        self._process, self._left = process, False

    def start(self) -> None:
        self._thread = self._process.thread(self._write)

    def end(self, why: str, within_s: float) -> None:
        self._left, self._process.member.work.leaving = True, why
        # Killed in a wait, it says nothing.
        if not why.startswith(Crash.__name__):
            self._beat()

    def _write(self) -> None:
        while not self._left and not isinstance(self._process.member.failure, Fenced):
            self._thread.sleep(self._beat() / self._process.rate)

    def _beat(self) -> float:
        process = self._process
        draw, rng = process.schedule.draw, process.schedule.rng
        return process.member.beat(process.clock, draw.beat_s, last=self._left, dice=rng)


class SimWaits:
    """A caller's waits, with the methods of LookWaits."""

    def __init__(self, thread: SimThread) -> None:
        self._thread = thread

    def wait(self, pause_s: float, *, hints: bool = True) -> None:
        self._thread.sleep(pause_s)

    def close(self) -> None:
        """Nothing is open."""


def _make(group: Group, call: Call) -> tuple[object, ...]:
    """Make a call; returns what it gives."""
    if call.name == BARRIER:
        group.barrier()
        return ()
    if call.name == GATHER:
        return tuple(group.all_gather(call.given))
    return (group.broadcast(call.given, objects_of_call(call.name, ())[0]),)


class GroupWorld(StruckWorld):
    """One schedule of a group."""

    # Its strikes are bound to times.
    rows = False

    def __init__(self, seed: int, setup: Setup) -> None:
        mix = setup.mix - {"stop", "program", "version"}
        setup = replace(setup, iterations=1, phases="both", policy="shrink", min_nodes=1, mix=mix)
        super().__init__(seed, setup)
        self.diary = Diary()
        self.history.first = self.history.last = 0
        self.sessions_left = 0
        self.odd_rate = self.rng.choice((0.0, 0.0, 0.0, 0.02)) if setup.mix else 0.0
        # Until then all are started with one node too many; then they are killed and started again.
        own = Random(f"mistyped {seed}")
        self.mistyped_until = (
            own.choice((2.0, 5.0, 13.0)) if "crash" in setup.mix and own.random() < 0.3 else 0.0
        )
        if self.mistyped_until:
            self.at(self.mistyped_until, self._start_rightly)

    def _start_rightly(self) -> None:
        self.history.faults.add("crash")
        for rank in range(self.setup.nodes):
            self.start(rank, self.rng.random() * self.rng.choice((0.01, 1.0, 30.0)))
        for process in self.of(None):
            process.kill("it was started with one node too many")

    def collective_of(self, row: tuple[int, int], ranks: tuple[int, ...], dice: Random) -> str:
        """The collective that all members call in a row; sometimes one of them calls another."""
        drawn = Random(f"row {self.seed} {row}") if dice.random() >= self.odd_rate else dice
        src = drawn.choice(ranks)
        return drawn.choice((BARRIER, GATHER, f"broadcast(src={src})"))

    def new_process(self, rank: int, client: MountClient) -> Start:
        return GroupProcess(self, len(self.processes), rank, client)

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
    calls_by_row: defaultdict[tuple[int, int], dict[int, Call]] = defaultdict(dict)
    for call in diary.calls:
        if call.rank in calls_by_row[call.row]:
            yield f"node {call.rank} called twice in {call.row}"
        calls_by_row[call.row][call.rank] = call
    passed: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
    for end in diary.ends:
        if not end.error:
            passed[end.call.row].add(end.call.rank)
    for end in diary.ends:
        if end.error:
            continue
        calls, ranks, call_name = calls_by_row[end.call.row], end.ranks, end.call.name
        for rank in ranks:
            other = calls.get(rank)
            if other is None or other.time > end.time:
                yield f"node {end.call.rank} passed {end.call.row} before node {rank} called"
                return
        senders = objects_of_call(call_name, ranks)
        for rank in senders:
            if calls[rank].name != call_name:
                yield f"node {end.call.rank} passed {end.call.row} as {call_name}, node {rank} called {calls[rank].name}"
                return
        if len({calls[rank].name for rank in ranks}) > 1 and passed[end.call.row] == {*ranks}:
            yield f"all have passed {end.call.row}, although they made different calls"
            return
        right = tuple(calls[rank].given for rank in senders)
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
        timed_out = isinstance(end.error, BarrierTimeout)
        if isinstance(end.error, OutOfStep) and len(names[end.call.row]) < 2:
            yield f"node {end.call.rank} was told that others called something else in {end.call.row}; nobody did"
        if timed_out and len(names[end.call.row]) > 1 and not struck:
            yield f"node {end.call.rank} was not told that others called something else in {end.call.row}"
        if timed_out and not struck and not world.history.caches:
            yield f"node {end.call.rank} waited in vain in {end.call.row}"


def lost_rightly(diary: Diary) -> Iterator[str]:
    """A member that leaves after a row is not lost for those that are still in it, however stale their listings are."""
    last = {(rank, row[0]): row for rank, row in diary.farewells}
    for end in diary.ends:
        error = end.error
        if isinstance(error, PeerLost) and "it left the group" in str(error):
            passed = last.get((error.rank or 0, end.call.row[0]))
            if passed is not None and passed >= end.call.row:
                yield f"node {end.call.rank} lost node {error.rank} in {end.call.row}, which that one had passed"
