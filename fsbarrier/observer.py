"""Turns what lies in the shared directory into the View that the state machine decides from. Reads only; no clock of its own.

Each kind of news is looked for at its own pace: the row's facts at every poll, generations, joins, beats and stop requests when
a look at them is due. Immutable records are read once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from fsbarrier.facts import (
    Beat,
    CorruptRecord,
    Fact,
    Generation,
    Join,
    Payload,
    Position,
    R,
    StopRequest,
    decode,
)
from fsbarrier.membership import Ledger
from fsbarrier.paths import RunPaths
from fsbarrier.program import Program
from fsbarrier.state import Node, Part, Recovered, Rules, Stage, View
from fsbarrier.store import Store

_JOIN = re.compile(r"node-(\d{4,})\.inc-(\d{4,})\.json")
_BEAT = re.compile(r"node-(\d{4,})\.json")
_GENERATION = re.compile(r"gen-(\d{6,})\.json")
_FACT = re.compile(r"node-(\d{4,})\.(done|failed)")
_ITERATION = re.compile(r"iter-(\d{6,})")
_PHASE = re.compile(r"p(\d{2})-(\w+)")


@dataclass
class Paces:
    """How often to look, in seconds."""

    members_s: float = 0.2  # generations, joins, stop requests
    beats_s: float = 1.0
    blind_s: float = 3.0  # a gap between two looks above which the death clocks pause


@dataclass
class Observer:
    """One node's eyes. `joining` looks more often, since a start is worth waiting less for."""

    store: Store
    paths: RunPaths
    program: Program
    paces: Paces = field(default_factory=Paces)
    newest: Generation | None = None
    joins: dict[int, Join] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger)
    stop: StopRequest | None = None
    recovered: Recovered | None = None
    _old_stops: frozenset[str] = frozenset()
    _looked: float = float("-inf")
    _looked_at_beats: float = float("-inf")

    def prepare(self) -> None:
        """Make the directories that will be listed, and note what was there before this start. Raises OSError."""
        for directory in (self.paths.joins, self.paths.beats, self.paths.generations, self.paths.stops):
            self.store.make_dir(directory)
        self._old_stops = frozenset(self.store.names(self.paths.stops))
        self._look_at_members()

    def hurry(self) -> None:
        """Look at everything at the next view, whatever its pace."""
        self._looked = self._looked_at_beats = float("-inf")

    def view(self, node: Node, now: float, after: float | None = None) -> View:
        """What the node can see at `now`. Raises OSError when the filesystem fails."""
        joining = node.stage is Stage.JOINING
        if now - self._looked >= self.paces.members_s / (4 if joining else 1):
            self._look_at_members()
            self._looked = now
        if now - self._looked_at_beats >= self.paces.beats_s / (10 if joining else 1):
            self._look_at_beats(node.rank, now)
            self._looked_at_beats = now
        view = View(newest=self.newest, joins=self.joins, ledger=self.ledger, stop=self.stop, recovered=self.recovered)
        return view if node.generation is None else self._with_row(view, node)

    def _with_row(self, view: View, node: Node) -> View:
        generation, position = node.generation, node.position
        assert generation is not None and position is not None
        if node.part not in (Part.ANNOUNCED, Part.GATHER, Part.EACH):
            return view
        directory = self.row_dir(generation.number, position)
        arrived: set[int] = set()
        failed: dict[int, Fact] = {}
        leaders_fact = None
        for name in self.store.names(directory):
            match = _FACT.fullmatch(name)
            if match is None or int(match[1]) not in generation.ranks:
                continue
            rank = int(match[1])
            if match[2] == "failed":
                fact = self.read(directory / name, Fact)
                if fact is not None:
                    failed[rank] = fact
            else:
                arrived.add(rank)
        if node.part is Part.ANNOUNCED and arrived.issuperset(generation.ranks):
            leaders_fact = self.read(directory / fact_name(generation.leader, "done"), Fact)
        return replace(view, arrived=frozenset(arrived), failed=failed, leaders_fact=leaders_fact)

    def phase_name(self, index: int) -> str:
        return self.program.rows[index].name

    def row_dir(self, generation: int, position: Position) -> Path:
        """Where the facts about one row are."""
        return self.paths.phase(generation, position.iteration, position.phase, self.phase_name(position.phase))

    def reports(self, generation: int, position: Position, ranks: tuple[int, ...]) -> Mapping[int, Payload]:
        """What each of `ranks` published about a row that this node has passed. Raises OSError."""
        directory = self.row_dir(generation, position)
        facts = {rank: self.read(directory / fact_name(rank, "done"), Fact) for rank in ranks}
        return {rank: fact.value for rank, fact in facts.items() if fact is not None}

    def read(self, path: Path, cls: type[R]) -> R | None:
        """A record, or None while it cannot be had whole."""
        data = self.store.read(path)
        if data is None:
            return None
        try:
            return decode(data, cls)
        except CorruptRecord:
            return None

    def _look_at_members(self) -> None:
        numbers = sorted(_numbers(_GENERATION, self.store.names(self.paths.generations)), reverse=True)
        for number in numbers:
            if self.newest is not None and number <= self.newest.number:
                break
            record = self.read(self.paths.generation(number), Generation)
            if record is not None and record.number == number:
                self.newest = record
                break
        for name in self.store.names(self.paths.joins):
            match = _JOIN.fullmatch(name)
            if match is None:
                continue
            rank, incarnation = int(match[1]), int(match[2])
            if rank in self.joins and self.joins[rank].incarnation >= incarnation:
                continue
            join = self.read(self.paths.joins / name, Join)
            if join is not None and (join.rank, join.incarnation) == (rank, incarnation):
                self.joins[rank] = join
        for name in self.store.names(self.paths.stops):
            if name not in self._old_stops:
                self.stop = self.read(self.paths.stops / name, StopRequest) or self.stop

    def _look_at_beats(self, me: int, now: float) -> None:
        beats = {}
        for rank in _numbers(_BEAT, self.store.names(self.paths.beats)):
            beat = self.read(self.paths.beat(rank), Beat) if rank != me else None
            if beat is not None and beat.rank == rank:
                beats[rank] = beat
        self.ledger = self.ledger.observe(beats, now, now, self.paces.blind_s)

    def recover(self, rules: Rules) -> Recovered:
        """Where the newest generation was when it ended, as far as its facts on disk tell. Raises OSError."""
        generation = self.newest
        if generation is None:
            return Recovered(Position(1, rules.first))
        position, decisions = generation.start, dict(generation.decisions)
        root = self.paths.facts_of(generation.number)
        iterations = sorted(_numbers(_ITERATION, self.store.names(root)))
        for iteration in iterations[
            -2:
        ]:  # the last one is under way; the one before holds the latest whole set of decisions
            entered = self._phases(generation.number, iteration)
            for phase in entered:
                value = self._decided(generation, Position(iteration, phase))
                if value:
                    decisions[self.phase_name(phase)] = {"iteration": iteration, "value": value}
            if entered:
                position = max(position, Position(iteration, entered[-1]))
        if position.phase == rules.last and self._all_done(generation, position):
            return Recovered(Position(position.iteration + 1, rules.first), decisions)
        resumed = max(rules.first, rules.program.resume_index(position.phase))
        return Recovered(Position(position.iteration, resumed), decisions)

    def _phases(self, generation: int, iteration: int) -> list[int]:
        names = self.store.names(self.paths.iteration(generation, iteration))
        return sorted(n for n in _numbers(_PHASE, names) if n < len(self.program.rows))

    def _decided(self, generation: Generation, position: Position) -> Payload | None:
        """The leader's value for a row, if all members were done with it."""
        if not self._all_done(generation, position):
            return None
        return self.reports(generation.number, position, (generation.leader,)).get(generation.leader)

    def _all_done(self, generation: Generation, position: Position) -> bool:
        directory = self.row_dir(generation.number, position)
        names = set(self.store.names(directory))
        return all(fact_name(rank, "done") in names for rank in generation.ranks)


def fact_name(rank: int, status: str) -> str:
    """The file name of a node's fact in its row's directory."""
    return f"node-{rank:04d}.{status}"


def _numbers(pattern: re.Pattern[str], names: list[str]) -> list[int]:
    return [int(match[1]) for match in map(pattern.fullmatch, names) if match]
