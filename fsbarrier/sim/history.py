"""What happened in a simulated schedule, as the invariants and the transcript read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

from fsbarrier.protocol.facts import Fact, Generation, Join, Payload, Record
from fsbarrier.protocol.state import Node
from fsbarrier.protocol.timing import DEAD_S

#: (generation, iteration, phase)
Place = tuple[int, int, int]


@dataclass(slots=True)
class JournalLine:
    """A line of some process's journal. `process` numbers the starts of all nodes; `node` is the state at that moment; the look in
    which it happened began at `began`.
    """

    time: float
    process: int
    event: str
    node: Node
    fields: Payload
    began: float


@dataclass(slots=True)
class Write:
    """A record that the server took (heartbeats are kept apart)."""

    time: float
    host: str
    path: str
    record: Record


#: rank -> (when it was first published, the "done" fact)
Done = dict[int, tuple[float, Fact]]


class MergedGroup(NamedTuple):
    """A group of trajectories in a merged file, and where it comes from. `at`: its place in its part file."""

    task: int
    part: str
    at: int
    generation: int
    policy: str


@dataclass(slots=True)
class Merged:
    """One merge. Two merges may write the same file name; `stamp` tells them apart. `final`: the evaluation that closes a session."""

    stamp: int
    time: float
    out: str
    split: str
    iteration: int
    generation: int
    policy: str
    adopted: tuple[Payload, ...]
    entries: tuple[MergedGroup, ...]
    final: bool = False


class Used(NamedTuple):
    """A merged file that a batch was made of; `stamp` tells which."""

    time: float
    node: Node
    stamp: int


class Published(NamedTuple):
    """A merge was put under its name for people. `shown`: the records of generations that the mount of whoever did it listed then."""

    name: str
    stamp: int
    shown: tuple[str, ...]


class Served(NamedTuple):
    """model.pt was made to name a policy version. `shown`: as in Published."""

    folder: str
    version: int
    generation: int
    shown: tuple[str, ...]


class Missing(NamedTuple):
    """A folder that somebody needed and that was not there any more."""

    time: float
    process: int
    node: Node
    folder: str


class Removed(NamedTuple):
    """A fact was removed. `place`: the row that it speaks of."""

    time: float
    path: str
    place: Place


class Asked(NamedTuple):
    """A node that was at work in a generation read a fact of it that had been removed."""

    time: float
    rank: int
    path: str


class ProcessEnd(NamedTuple):
    """The end of a process: an exit code, or None where it was killed."""

    time: float
    rank: int
    code: int | None
    why: str


class Said(NamedTuple):
    """A line for people about what the world did after event number `after`. `mark`: as in fsbarrier.sim.transcript."""

    time: float
    text: str
    after: int
    mark: str


@dataclass
class History:
    """All that is remembered of one schedule. `faults`: the kinds that really struck."""

    first: int
    last: int
    dead_s: float = DEAD_S
    # a gap between two looks longer than this counts as nobody's silence
    blind_s: float = 3.0
    # the longest that a heartbeat may stay unseen on this schedule's mounts
    hidden_s: float = 0.0
    # whether this schedule's mounts remember anything
    caches: bool = False
    # split -> how many tasks an iteration rolls out
    tasks: Mapping[str, int] = field(default_factory=dict)
    events: list[JournalLine] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)
    # (rank, incarnation) -> when
    beats: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    merges: list[Merged] = field(default_factory=list)
    used: list[Used] = field(default_factory=list)
    published: list[Published] = field(default_factory=list)
    served: list[Served] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)
    removed: list[Removed] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    # generation -> how many facts lie there at the end
    left: dict[int, int] = field(default_factory=dict)
    # process -> (time, rank)
    starts: dict[int, tuple[float, int]] = field(default_factory=dict)
    ended: dict[int, ProcessEnd] = field(default_factory=dict)
    said: list[Said] = field(default_factory=list)
    faults: set[str] = field(default_factory=set)
    # the generations with which a person took the run back
    recovered: set[int] = field(default_factory=set)
    stopped_at: float | None = None
    # who still waits at the end, and for what
    stuck: list[str] = field(default_factory=list)
    misses: dict[str, int] = field(default_factory=dict)
    # host -> from when until when its mount showed nothing newer
    old_views: dict[str, tuple[float, float]] = field(default_factory=dict)
    # (host, path) -> when a read showed nothing of what lay there: garbled, or with a stale handle
    unread: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    operations: dict[str, int] = field(default_factory=dict)

    @cached_property
    def generations(self) -> dict[int, tuple[Write, Generation]]:
        """The record of each number, as it was first created."""
        found: dict[int, tuple[Write, Generation]] = {}
        for write in self.writes:
            record = write.record
            if type(record) is Generation:
                found.setdefault(record.number, (write, record))
        return found

    @cached_property
    def facts(self) -> dict[Place, Done]:
        """Who is done with which row."""
        found: dict[Place, Done] = {}
        for write in self.writes:
            fact = write.record
            if type(fact) is Fact and fact.status == "done":
                found.setdefault(row_of(write.path), {}).setdefault(fact.rank, (write.time, fact))
        return found

    @cached_property
    def openings(self) -> dict[Place, float]:
        """The leader's first fact of each iteration, and when it was published. The iteration in which a generation starts has none."""
        found = {}
        for place, done in self.facts.items():
            record = self.generations[place[0]][1]
            start = record.start.iteration, record.start.phase
            if place[2] == self.first and place[1:] > start and record.leader in done:
                found[place] = done[record.leader][0]
        return found

    @cached_property
    def joins(self) -> dict[tuple[int, int], Write]:
        """(rank, incarnation) -> its record."""
        found: dict[tuple[int, int], Write] = {}
        for write in self.writes:
            if isinstance(write.record, Join):
                found.setdefault((write.record.rank, write.record.incarnation), write)
        return found

    @cached_property
    def places(self) -> list[tuple[JournalLine, Place]]:
        """Every entry of a process into a row, and every release from one, as they happened."""
        rows = frozenset(("phase_started", "phase_finished"))
        return [(event, place_of(event.node)) for event in self.events if event.event in rows]

    @cached_property
    def passed(self) -> list[tuple[JournalLine, Place]]:
        """Every release of a process from a row: the journal's phase_finished."""
        return [(event, place) for event, place in self.places if event.event == "phase_finished"]

    @cached_property
    def entered(self) -> list[tuple[JournalLine, Place]]:
        """Every entry of a process into a row: the journal's phase_started."""
        return [(event, place) for event, place in self.places if event.event == "phase_started"]


@lru_cache(maxsize=4096)
def row_of(path: str) -> Place:
    """The row that a fact's path speaks of."""
    _, generation, phase, name = path.rsplit("/", 3)
    return int(generation[4:]), int(name[5:11]), int(phase[1:3])


def place_of(node: Node) -> Place:
    """Where a running node is."""
    generation, position = node.generation, node.position
    assert generation is not None and position is not None
    return generation.number, position.iteration, position.phase
