"""Deliberate faults in the protocol, one function each: what somebody might well have written instead.

Each takes the way of the product's own code and changes one decision in it. scripts/mutants.py runs them all, tests/test_simulator.py
the quick ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from fsbarrier.node import observer as observer_module
from fsbarrier.node.loop import NodeLoop
from fsbarrier.node.observer import Observer
from fsbarrier.node.resume import LastGeneration, _Trail
from fsbarrier.protocol import machine, situation, succession
from fsbarrier.protocol.facts import Beat, Fact, Generation, Position
from fsbarrier.protocol.membership import Ledger, Limits, Loss, losses
from fsbarrier.protocol.rows import Table
from fsbarrier.protocol.state import WATCHING, Entered, Part, Recovered, View
from fsbarrier.rundir.heartbeats import HeartbeatReader
from fsbarrier.rundir.names import FACT, START
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.sim import store
from fsbarrier.sim.store import Client
from fsbarrier.sim.work import SimWork


class Patch(Protocol):
    """Changes that can be taken back (pytest's MonkeyPatch is one)."""

    def setattr(self, target: Any, name: str, value: Any) -> None: ...

    def setitem(self, target: Any, name: str, value: Any) -> None: ...


def _seen_otherwise(patch: Patch, change: Callable[[Observer, View, Any], View]) -> None:
    """Let `change(observer, view, node)` have the last word about what a node sees of its row."""
    original = Observer.view

    def view(self: Observer, at: Any, now: float, work: Any = None) -> View:
        seen = original(self, at, now, work)
        return change(self, seen, at) if at.part in WATCHING else seen

    patch.setattr(Observer, "view", view)


def _otherwise(patch: Patch, rule: Any, instead: Any) -> None:
    """Put `instead` in a rule's place, in each stage that has it."""
    for stage, rules in machine.RULES.items():
        patch.setitem(machine.RULES, stage, tuple(instead if one is rule else one for one in rules))


def _silent(*_: Any) -> None:
    """A rule that never applies."""


def _row(observer: Observer, at: Any) -> Any:
    return observer.row_dir(at.generation.number, at.position)


def _created_without_flush(patch: Patch, concerned: Callable[[str], bool]) -> None:
    create = Client.create

    def unflushed(self: Client, path: Any, record: Any) -> bool:
        created = create(self, path, record)
        if created and concerned(path):
            self.disk.files[path].durable = False
        return created

    patch.setattr(Client, "create", unflushed)


# --- barriers and decisions ---------------------------------------------------------------------------------------------------


def count_instead_of_set(patch: Patch) -> None:
    """a barrier counts names (two will do) instead of comparing with the set of members"""

    def change(self: Observer, view: View, at: Any) -> View:
        if at.part is not Part.ANNOUNCED or len(self.store.names(_row(self, at))) < 2:
            return view
        fact = self.store.read(
            _row(self, at) / FACT.build(at.position.iteration, at.generation.leader, "done"), Fact
        )
        return replace(view, arrived=frozenset(at.generation.ranks), leaders_fact=fact)

    _seen_otherwise(patch, change)


def decision_from_ones_own_copy(patch: Patch) -> None:
    """the decision is read from one's own fact instead of the leader's"""

    def change(self: Observer, view: View, at: Any) -> View:
        own = _row(self, at) / FACT.build(at.position.iteration, at.rank, "done")
        return (
            replace(view, leaders_fact=self.store.read(own, Fact)) if view.leaders_fact is not None else view
        )

    _seen_otherwise(patch, change)


def leader_by_rank_alone(patch: Patch) -> None:
    """the leader is always rank 0, whatever the generation says"""

    def change(self: Observer, view: View, at: Any) -> View:
        if at.part is not Part.ANNOUNCED or len(view.arrived) < len(at.generation.members):
            return view
        return replace(
            view,
            leaders_fact=self.store.read(_row(self, at) / FACT.build(at.position.iteration, 0, "done"), Fact),
        )

    _seen_otherwise(patch, change)


def release_without_decision(patch: Patch) -> None:
    """who cannot read the leader's fact passes without it"""

    def change(self: Observer, view: View, at: Any) -> View:
        whole = at.part is Part.ANNOUNCED and len(view.arrived) == len(at.generation.members)
        return replace(view, leaders_fact=Fact(0, 0, "done")) if whole and view.leaders_fact is None else view

    _seen_otherwise(patch, change)


def trust_any_bytes(patch: Patch) -> None:
    """a fact that cannot be decoded counts as an empty one"""
    original = store.as_record

    def as_record(content: Any, cls: Any) -> Any:
        found = original(content, cls)
        return Fact(0, 0, "done") if found is None and cls is Fact else found

    patch.setattr(store, "as_record", as_record)


def decision_not_flushed(patch: Patch) -> None:
    """no fsync before a decision is published"""
    _created_without_flush(patch, lambda path: "/iter-" in path)


def delete_to_reset(patch: Patch) -> None:
    """a node deletes its fact of the row that it leaves, so that the directory is clean for the next time"""
    original = NodeLoop._entered

    def entered(self: Any, row: Entered) -> None:
        original(self, row)
        if not row.begins and row.position.phase:
            left = Position(row.position.iteration, row.position.phase - 1)
            path = self.observer.row_dir(row.generation.number, left) / FACT.build(
                left.iteration, self.node.rank, "done"
            )
            self.store.disk.files.pop(path, None)
            self.store.disk.dirs[path.parent].names.pop(path.name, None)
            self.store.disk.dirs[path.parent].listing = None

    patch.setattr(NodeLoop, "_entered", entered)


def wait_on_a_missing_name(patch: Patch) -> None:
    """the leader's fact is opened at every poll instead of waiting until a listing names it"""

    def change(self: Observer, view: View, at: Any) -> View:
        if at.part is Part.ANNOUNCED and at.generation.leader not in view.arrived:
            self.store.read(
                _row(self, at) / FACT.build(at.position.iteration, at.generation.leader, "done"), Fact
            )
        return view

    _seen_otherwise(patch, change)


def read_everybodys_fact(patch: Patch) -> None:
    """each node reads the facts of all members in each row"""

    def change(self: Observer, view: View, at: Any) -> View:
        for rank in view.arrived if view.leaders_fact is not None else ():
            self.store.read(_row(self, at) / FACT.build(at.position.iteration, rank, "done"), Fact)
        return view

    _seen_otherwise(patch, change)


# --- generations --------------------------------------------------------------------------------------------------------------


def no_exclusive_create(patch: Patch) -> None:
    """generations are put, not created: the last one wins"""

    def propose(self: NodeLoop, generation: Generation) -> None:
        self.store.put(self.observer.paths.generation(generation.number), generation)
        self.observer.learn(generation)
        self.observer.hurry()

    patch.setattr(NodeLoop, "_propose", propose)


def stay_in_old_generation(patch: Patch) -> None:
    """a node that the newest generation does not name goes on in its own"""
    _otherwise(patch, machine.rejoin_when_left_behind, _silent)


def no_incarnation_check(patch: Patch) -> None:
    """a generation that names a rank means whichever start of it reads the record"""

    def enter(at: Any) -> Any:
        newest = at.newer_generation
        named = newest is not None and at.node.rank in newest.ranks and not newest.verdict
        return machine._enter(at, newest) if named else None

    _otherwise(patch, machine.enter_newer_generation, enter)
    _otherwise(patch, machine.end_when_rank_is_taken, _silent)


def adopt_nothing(patch: Patch) -> None:
    """a generation's record carries no decisions of the older ones"""
    patch.setattr(succession, "kept_decisions", lambda decisions, start, table: {})


def go_on_in_the_row_under_way(patch: Patch) -> None:
    """a new generation begins with the row that was under way, not where that row says"""
    patch.setattr(Table, "resume_index", lambda self, index: index)


def generation_not_flushed(patch: Patch) -> None:
    """no fsync before a generation or a join is created"""
    _created_without_flush(patch, lambda path: "/iter-" not in path)


# --- restarts -----------------------------------------------------------------------------------------------------------------


def recover_from_start(patch: Patch) -> None:
    """a restart goes on where the last generation began, not where it was"""

    def recover(self: LastGeneration, rules: Any, now: float, seal: Any) -> Recovered:
        newest = self.observer.newest
        start = newest.start if newest else Position(1, rules.span({})[0])
        decisions, number = (newest.decisions, newest.number) if newest else ({}, 0)
        return Recovered(start, decisions, number, now, rules.span({}), sealed=True)

    patch.setattr(LastGeneration, "recover", recover)


def restart_without_a_seal(patch: Patch) -> None:
    """a restart goes on from where it saw the last generation, and does not end that one"""
    patch.setattr(_Trail, "end", lambda self, reached, seal: reached)


def unreadable_is_absent(patch: Patch) -> None:
    """a decision that cannot be read when a run goes on counts as none"""
    original = _Trail.fact

    def fact(self: _Trail, position: Position) -> Fact:
        try:
            return original(self, position)
        except OSError:
            return self.known.setdefault((self.generation.number, position), Fact(0, 0, "done"))

    patch.setattr(_Trail, "fact", fact)


def error_is_an_empty_listing(patch: Patch) -> None:
    """a directory that cannot be listed counts as empty"""
    original = Client.names

    def names(self: Client, directory: Any) -> list[str]:
        try:
            return original(self, directory)
        except OSError:
            return []

    patch.setattr(Client, "names", names)


def forget_on_error(patch: Patch) -> None:
    """an error in the middle of a look drops the actions that were still to be done"""
    original = NodeLoop.tick

    def tick(self: NodeLoop, now: float) -> bool:
        self._pending.clear()
        return original(self, now)

    patch.setattr(NodeLoop, "tick", tick)


# --- liveness -----------------------------------------------------------------------------------------------------------------


def never_dead(patch: Patch) -> None:
    """a silent node is waited for"""
    patch.setattr(
        situation,
        "losses",
        lambda *args: tuple(loss for loss in losses(*args) if "heartbeat" not in loss.why),
    )


def dead_when_suspected(patch: Patch) -> None:
    """a node that is suspected counts as lost"""
    patch.setattr(
        situation, "losses", lambda *args: losses(*args[:-1], replace(args[-1], dead_s=args[-1].suspect_s))
    )


def own_pause_is_their_silence(patch: Patch) -> None:
    """the time for which a node itself was stopped counts as the others' silence"""
    observe = Ledger.observe
    patch.setattr(
        Ledger,
        "observe",
        lambda self, beats, before, after, blind_s, *more: observe(self, beats, before, after, 1e9, *more),
    )


def nobody_watches_the_watchers(patch: Patch) -> None:
    """the first of a generation look at all heartbeats, the others at none"""

    def mutant(
        generation: Generation | None, me: int, watchers: int, *, suspecting: bool = False
    ) -> frozenset[int]:
        watching = () if generation is None else sorted(generation.ranks)[:watchers]
        return frozenset() if generation is None or me in watching else frozenset(generation.ranks) - {me}

    patch.setattr(observer_module, "left_to_others", mutant)


def unwatched_is_silent(patch: Patch) -> None:
    """the time in which others watched a member counts as its silence"""
    observe = Ledger.observe
    patch.setattr(Ledger, "observe", lambda *args: observe(*args[:6]))


def judged_by_older_looks(patch: Patch) -> None:
    """a generation's members are judged by the looks that were cast before it"""
    entered = NodeLoop._entered

    def mutant(self: NodeLoop, row: Entered) -> None:
        observer = self.observer
        entered(self, row)
        if observer.ledger.looked_at is not None and row.begins:
            again = observer.ledger.looked_at + observer.paces.beats_s
            observer._members_due = observer._beats_due = again

    patch.setattr(NodeLoop, "_entered", mutant)


def clocks_compared(patch: Patch) -> None:
    """heartbeats carry their sender's time, and their age is one's own time less that"""

    def aged(
        members: Any, me: int, joins: Any, ledger: Ledger, since: float, now: float, limits: Limits
    ) -> Any:
        found = [*losses(members, me, joins, ledger, since, now, replace(limits, dead_s=1e9))]
        for member in members:
            item = ledger.seen.get(member.rank)
            age = now - item.beat.progress["clock"] if item is not None and member.rank != me else 0.0
            if age >= limits.dead_s:
                found.append(Loss(member, f"no heartbeat for {age:.1f} s"))
        return tuple(found)

    patch.setattr(SimWork, "progress", lambda self: {"clock": self.process.clock})
    patch.setattr(situation, "losses", aged)


def one_heartbeat_file_a_rank(patch: Patch) -> None:
    """all starts of a rank write one heartbeat file"""
    patch.setattr(
        RunPaths, "beat", lambda self, rank, incarnation: self.beats / f"node-{rank:04d}.inc-0000.json"
    )
    patch.setattr(
        HeartbeatReader,
        "_newest_of",
        lambda self, starts: self.store.read(self.folder / START.build(starts[0].rank, 0), Beat),
    )


def a_failure_moves_nobody(patch: Patch) -> None:
    """a failed program's fact is not looked at"""
    _otherwise(patch, machine.end_work_after_a_failure, _silent)
    _otherwise(patch, machine.try_again_after_a_failure, _silent)
