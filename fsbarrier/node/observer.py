"""Turns what lies in the shared directory into the View that the state machine decides from. Reads only; no clock of its own.

Each kind of news is looked for at its own pace: the row's facts at every poll, generations, joins, beats and stop requests when
a look at them is due. Immutable records are read once.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from fsbarrier.program import PHASE_NAMES, Phase, Program
from fsbarrier.protocol.facts import (
    Beat,
    Fact,
    Generation,
    Join,
    Payload,
    Position,
    R,
    StopRequest,
)
from fsbarrier.protocol.membership import Ledger, left_to_others
from fsbarrier.protocol.state import ANNOUNCED, WATCHING, Node, Recovered, Stage, View
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.store import Store

_INCARNATION = re.compile(r"node-(\d{4,})\.inc-(\d{4,})\.json")
_GENERATION = re.compile(r"gen-(\d{6,})\.json")
_FAILED = re.compile(r"node-(\d{4,})\.failed")
_JOINING = Stage.JOINING

_AT_ONCE = float("-inf")


@dataclass
class Paces:
    """How often to look, in seconds."""

    members_s: float = 0.2  # generations, joins, stop requests
    beats_s: float = 1.0
    blind_s: float = 3.0  # of a gap between two looks, at most this much counts as somebody's silence
    eager: float = 10.0  # how many times as often heartbeats are looked at by a node that joins
    watchers: int = 8  # so many members of a generation look at all heartbeats, the others only at theirs
    void_s: float = 10.0  # a generation's record that cannot be read for this long never will be


def eagerness(num_nodes: int) -> float:
    """For `Paces.eager`: all read all heartbeats when they start, so that many must not do it as often as a few."""
    return min(10.0, max(1.0, 80.0 / num_nodes))


@dataclass(slots=True)
class _Row:
    """The row that the node is in, and what its directory showed when it was last listed."""

    generation: Generation
    position: Position
    directory: Path
    ranks: Mapping[str, int]  # the name of a member's fact -> its rank
    names: list[str] | None  # None: not listed yet
    arrived: frozenset[int]
    failed: Mapping[int, Fact]


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
    void: int = 0
    _unreadable: dict[int, float] = field(default_factory=dict)
    _view: View = field(default_factory=View)
    _news: bool = True  # something was seen that `_view` does not show
    _shown: _Row | None = None  # the row that it shows
    _row: _Row | None = None
    _known_beats: list[str] = field(default_factory=list)
    _filed: set[str] = field(default_factory=set)  # of them, what is in `_beat_files`, or is no heartbeat
    _beat_files: dict[int, list[tuple[int, Path]]] = field(default_factory=dict)  # the newest start first
    _known_generations: list[str] = field(default_factory=list)
    _known_joins: list[str] = field(default_factory=list)
    _learnt: set[str] = field(default_factory=set)  # names in joins/ that need not be looked at again
    _old_stops: frozenset[str] | None = None  # asked for before this start
    _due: float = _AT_ONCE  # the next look at members or beats, whichever comes first
    _members_due: float = _AT_ONCE
    _beats_due: float = _AT_ONCE
    _looked_at_all: float = _AT_ONCE

    def prepare(self) -> None:
        """Make the directories that will be listed, and note what was there before this start. Raises OSError; may be tried again."""
        for directory in (self.paths.joins, self.paths.beats, self.paths.generations, self.paths.stops):
            self.store.make_dir(directory)
        if self._old_stops is None:
            self._old_stops = frozenset(self.store.names(self.paths.stops))
        self.read_beats()
        self._look_at_members(None)

    def learn(self, generation: Generation | None) -> None:
        """Take a generation's record for known, however it was come by."""
        if generation is not None and (self.newest is None or generation.number > self.newest.number):
            self.newest, self._news = generation, True

    def found(self, recovered: Recovered) -> None:
        """Take for known where the newest generation left the run."""
        self.recovered, self._news = recovered, True

    def newest_number(self) -> int:
        """The number of the newest generation that can be seen now. Raises OSError."""
        listed = numbered(_GENERATION, self.store.names(self.paths.generations))
        return max([*listed, self.newest.number if self.newest is not None else 0])

    def hurry(self) -> None:
        """Look at everything at the next view, whatever its pace."""
        self._due = self._members_due = self._beats_due = _AT_ONCE
        self._news = True

    def view(self, node: Node, now: float) -> View:
        """What the node can see at `now`; the same object while nothing is new. Raises OSError when the filesystem fails."""
        if now >= self._due:
            self._look(node, now)
        if node.generation is None or node.part not in WATCHING:
            return self._without_row()
        return self._with_row(node)

    def _without_row(self) -> View:
        if self._news or self._shown is not None:
            self._view = View(self.newest, self.void, self.joins, self.ledger, self.stop, self.recovered)
            self._news, self._shown = False, None
        return self._view

    def _look(self, node: Node, now: float) -> None:
        """Look at what is due beside the row. (A node that enters a generation, or leaves one, hurries: its pace is another.)"""
        joining, paces = node.stage is _JOINING, self.paces
        if now >= self._members_due:
            self._look_at_members(now)
            self._members_due = now + paces.members_s / (4 if joining else 1)
        if now >= self._beats_due:
            self._look_at_beats(node, now, joining)
            self._beats_due, self._news = now + paces.beats_s / (paces.eager if joining else 1), True
        self._due = min(self._members_due, self._beats_due)

    def _with_row(self, node: Node) -> View:
        generation, position, row = node.generation, node.position, self._row
        assert generation is not None and position is not None
        if row is None or row.position is not position or row.generation is not generation:
            row = self._enter(generation, position)
        names = self.store.names(row.directory)
        if names != row.names:
            ranks = row.ranks
            arrived = frozenset([ranks[name] for name in names if name in ranks])
            failed = {} if len(names) == len(arrived) else self._failed(row.directory, names, generation)
            if failed is None:
                return self._without_row()
            row.names, row.arrived, row.failed = names, arrived, failed
            self._news = True
        leaders_fact = None
        if node.part is ANNOUNCED and len(row.arrived) == len(generation.ranks):
            leaders_fact = self.store.read(row.directory / fact_name(generation.leader, "done"), Fact)
        elif self._shown is row and not self._news:
            return self._view
        self._view = view = View(
            self.newest,
            self.void,
            self.joins,
            self.ledger,
            self.stop,
            self.recovered,
            row.arrived,
            row.failed,
            leaders_fact,
        )
        self._news, self._shown = False, row
        return view

    def enter(self, generation: Generation, position: Position) -> Path:
        """Where the facts about a row are that the node is in from now on."""
        return self._enter(generation, position).directory

    def _enter(self, generation: Generation, position: Position) -> _Row:
        before, directory = self._row, self.row_dir(generation.number, position)
        if before is not None and before.generation is generation:
            ranks = before.ranks
        else:
            ranks = {fact_name(rank, "done"): rank for rank in generation.ranks}
        self._row = row = _Row(generation, position, directory, ranks, None, frozenset(), {})
        return row

    def _failed(self, directory: Path, names: list[str], generation: Generation) -> dict[int, Fact] | None:
        """The members' facts of failure; None while one of them cannot be read."""
        failed = {}
        for match in filter(None, map(_FAILED.fullmatch, names)):
            fact = self.store.read(directory / match[0], Fact) if int(match[1]) in generation.ranks else None
            if fact is not None:
                failed[int(match[1])] = fact
            elif int(match[1]) in generation.ranks:
                return None
        return failed

    def row_dir(self, generation: int, position: Position) -> Path:
        """Where the facts about one row are."""
        row = self._row
        if row is not None and row.position is position and row.generation.number == generation:
            return row.directory
        name = self.program.rows[position.phase].name
        return self.paths.phase(generation, position.iteration, position.phase, name)

    def reports(self, node: Node, phase_name: str) -> Mapping[int, Payload]:
        """What each member published about a row of this iteration that `node` has passed, or in which it leads.

        Raises OSError, also for a fact that cannot be read.
        """
        generation, position = node.generation, node.position
        assert generation is not None and position is not None
        at = Position(position.iteration, PHASE_NAMES.index(phase_name))
        # In its own row the leader's result is not published yet: it goes on to the leader's work first.
        own = {node.rank: node.result} if at == position else {}
        directory = self.row_dir(generation.number, at)
        others = [rank for rank in generation.ranks if rank not in own]
        return own | {
            rank: self.must_read(directory / fact_name(rank, "done"), Fact).value for rank in others
        }

    def must_read(self, path: Path, cls: type[R]) -> R:
        """A record that is known to be there. Raises OSError where it cannot be read (now): it is not to be taken for absent."""
        record = self.store.read(path, cls)
        if record is None:
            raise OSError(errno.EAGAIN, "this record cannot be read", str(path))
        return record

    def joins_of(self, generation: Generation) -> Mapping[int, Join]:
        """All joins that are known, and those of all members: the generation's record names them, so they are there.

        Nothing is changed here: work asks in a thread of its own. Raises OSError, also for one that cannot be read.
        """
        found = dict(self.joins)
        for member in generation.members:
            known = found.get(member.rank)
            if known is None or known.incarnation < member.incarnation:
                found[member.rank] = self.must_read(self.paths.join(member.rank, member.incarnation), Join)
        return found

    def _look_at_members(self, now: float | None) -> None:
        names = self.store.names(self.paths.generations)
        if names != self._known_generations and self._look_at_generations(names, now):
            self._known_generations = names
        names = self.store.names(self.paths.joins)
        if names != self._known_joins:
            for name in names:
                if name in self._learnt:
                    continue
                start = start_named(name)
                if start is None or self._learn_join(*start):
                    self._learnt.add(name)
            if self._learnt.issuperset(names):
                self._known_joins = names
        for name in self.store.names(self.paths.stops):
            if name not in (self._old_stops or ()):
                self.stop = self.store.read(self.paths.stops / name, StopRequest) or self.stop
                self._news = True

    def _look_at_generations(self, names: list[str], now: float | None) -> bool:
        """Learn the newest of them that can be read; True if none is newer."""
        numbers = sorted(numbered(_GENERATION, names), reverse=True)
        known = self.newest.number if self.newest is not None else 0
        for number in numbers:
            if number <= known:
                break
            if self._read_generation(number):
                known = number
            elif now is not None and now - self._unreadable.setdefault(number, now) >= self.paces.void_s:
                self.void, self._news = max(self.void, number), True
        return max(numbers, default=0) <= known

    def _read_generation(self, number: int) -> bool:
        """Learn a generation from its record; False while it cannot be read."""
        record = self.store.read(self.paths.generation(number), Generation)
        if record is None or record.number != number or record.start.phase >= len(self.program.rows):
            return False
        self.learn(record)
        return True

    def _learn_join(self, rank: int, incarnation: int) -> bool:
        known = self.joins.get(rank)
        if known is not None and known.incarnation >= incarnation:
            return True
        join = self.store.read(self.paths.join(rank, incarnation), Join)
        if join is None or (join.rank, join.incarnation) != (rank, incarnation):
            return False
        self.joins[rank], self._news = join, True
        return True

    def _look_at_beats(self, node: Node, now: float, joining: bool) -> None:
        """While nodes gather, looks come fast: one that was seen to be alive is looked at again at the usual pace."""
        left_out = left_to_others(node.generation, node.rank, self.paces.watchers)
        spared = {node.rank, *left_out}
        if joining and now - self._looked_at_all < self.paces.beats_s:
            seen, unsure = self.ledger.seen, self.ledger.unsure
            spared.update(rank for rank, item in seen.items() if item.moved and rank not in unsure)
        else:
            self._looked_at_all = now
        beats, unread = self.read_beats(spared)
        self.ledger = self.ledger.observe(beats, now, now, self.paces.blind_s, unread, left_out)

    def read_beats(self, spared: Set[int] = frozenset()) -> tuple[dict[int, Beat], set[int]]:
        """The others' heartbeats, of each rank its newest start's, and that of a newer start of a `spared` rank.

        And the ranks whose newest known start could not be read, whatever an older one says. What the others have seen exists: it
        can be opened, however old this node's listings are.
        """
        names = self.store.names(self.paths.beats)
        beats: dict[int, Beat] = {}
        unread: set[int] = set()
        newest = self.newest.number if self.newest is not None else 0
        if names != self._known_beats:
            self._file_beats(names)
        for rank, files in self._beat_files.items():
            join = self.joins.get(rank)
            known = join.incarnation if join is not None else 0
            if rank in spared and files[0][0] <= known:
                continue
            beat = self._newest_beat(rank, files)
            if beat is None:
                if known:
                    unread.add(rank)
                continue
            beats[rank] = beat
            if beat.incarnation > known:
                self._learn_join(rank, beat.incarnation)
            elif beat.incarnation < known:
                unread.add(rank)
            if beat.generation > newest and self._read_generation(beat.generation):
                newest = beat.generation
        return beats, unread

    def _file_beats(self, names: list[str]) -> None:
        """Sort the names of heartbeats by rank and start; only what is new, since at a large start each of many looks shows one more."""
        if not self._filed.issubset(names):
            self._filed, self._beat_files = set(), {}
        new = [name for name in names if name not in self._filed]
        for name in new:
            if (start := start_named(name)) is not None:
                files = self._beat_files.setdefault(start[0], [])
                files.append((start[1], self.paths.beats / name))
                files.sort(reverse=True)
        self._filed.update(new)
        self._known_beats = names

    def _newest_beat(self, rank: int, files: list[tuple[int, Path]]) -> Beat | None:
        for incarnation, path in files:
            beat = self.store.read(path, Beat)
            if beat is not None and beat.incarnation == incarnation and beat.rank == rank:
                return beat
        return None


def decides(row: Phase) -> bool:
    """Whether the leader's fact about this row may hold a value: then it outlives a loss of power."""
    return (row.each is not None or row.leader is not None) and not row.transient


@lru_cache(maxsize=4096)
def start_named(name: str) -> tuple[int, int] | None:
    """The rank and the incarnation that a file in joins/ or beats/ speaks of; None for a name that is none of ours."""
    match = _INCARNATION.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


@lru_cache(maxsize=4096)
def fact_name(rank: int, status: str) -> str:
    """The file name of a node's fact in its row's directory."""
    return f"node-{rank:04d}.{status}"


def numbered(pattern: re.Pattern[str], names: list[str]) -> list[int]:
    """The numbers in those of the names that are of this kind."""
    return [number for name in names if (number := _number(pattern, name)) is not None]


@lru_cache(maxsize=4096)
def _number(pattern: re.Pattern[str], name: str) -> int | None:
    match = pattern.fullmatch(name)
    return int(match[1]) if match else None
