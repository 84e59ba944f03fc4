"""The history of a simulated schedule, for the invariants and the transcript."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

from fsbarrier.data.merge import Part
from fsbarrier.protocol.facts import Fact, Generation, Join, Payload, Record
from fsbarrier.protocol.membership import DEAD_S
from fsbarrier.protocol.rows import SLICE_CHOICE
from fsbarrier.protocol.state import Node

#: (generation, iteration, phase)
RowPlace = tuple[int, int, int]


@dataclass(slots=True)
class JournalLine:
    """A line of a process's journal. `process`: the number of the start; `node`: its state at that moment; `began`: when the look began
    in which it happened.
    """

    time: float
    process: int
    event: str
    node: Node
    fields: Payload
    began: float


@dataclass(slots=True)
class Write:
    """A record that was written, except heartbeats."""

    time: float
    host: str
    path: str
    record: Record


#: rank -> (when it was first published, the "done" fact)
Done = dict[int, tuple[float, Fact]]


class MergedGroup(NamedTuple):
    """A group of trajectories in a merged file, and its origin. `at`: its index in its part file."""

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
    adopted: tuple[Part, ...]
    entries: tuple[MergedGroup, ...]
    final: bool = False
    # how many rounds of tasks the nodes rolled out
    rounds: int = 1


class Used(NamedTuple):
    """A batch was made from the merge with this `stamp`."""

    time: float
    node: Node
    stamp: int


class Published(NamedTuple):
    """A merge got its public name. `shown`: the generations that the publisher's mount listed then."""

    name: str
    stamp: int
    shown: tuple[str, ...]


class Served(NamedTuple):
    """model.pt was pointed at a policy version. `shown`: as in Published."""

    folder: str
    version: int
    generation: int
    shown: tuple[str, ...]


class Missing(NamedTuple):
    """A node needed a folder that had been removed."""

    time: float
    process: int
    node: Node
    folder: str


class Removed(NamedTuple):
    """A fact was removed. `place`: its row."""

    time: float
    path: str
    place: RowPlace


class Asked(NamedTuple):
    """A member of a generation tried to read a removed fact of it."""

    time: float
    rank: int
    path: str


class Standstill(NamedTuple):
    """Nothing has happened since `since`, and nothing hindered these nodes, which are all that are alive."""

    time: float
    since: float
    nodes: tuple[Node, ...]


class ProcessEnd(NamedTuple):
    """The end of a process: an exit code, or None if it was killed."""

    time: float
    rank: int
    code: int | None
    why: str


class Said(NamedTuple):
    """A line of the transcript. `mark`: "!" for the world, "-" for one node, "=" for all nodes together."""

    time: float
    mark: str
    text: str


@dataclass
class History:
    """Everything that happened in one schedule. `faults`: the kinds that really struck."""

    first: int
    last: int
    dead_s: float = DEAD_S
    # a longer gap between two looks does not count as silence
    poll_gap_s: float = 3.0
    # the longest time that this schedule's mounts may hide a heartbeat
    hidden_s: float = 0.0
    # whether this schedule's mounts cache anything
    caches: bool = False
    # what the run began with, of the settings that later starts name
    settings: Payload = field(default_factory=dict)
    # what the first session runs, and the rows of each choice
    phases: str = "both"
    spans: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    # split -> number of tasks of an iteration
    tasks: Mapping[str, int] = field(default_factory=dict)
    # `rollout.ahead` and `rollout.in_flight`
    ahead: int = 0
    in_flight: bool = False
    # the lines of all journals
    events: list[JournalLine] = field(default_factory=list)
    # the same, and what else happened, in order
    told: list[JournalLine | Said] = field(default_factory=list)
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
    standstills: list[Standstill] = field(default_factory=list)
    # process -> (time, rank)
    starts: dict[int, tuple[float, int]] = field(default_factory=dict)
    ended: dict[int, ProcessEnd] = field(default_factory=dict)
    faults: set[str] = field(default_factory=set)
    #: see reached.py
    reached: set[str] = field(default_factory=set)
    stopped_at: float | None = None
    # the processes that still wait at the end, and for what
    stuck: list[str] = field(default_factory=list)
    misses: dict[str, int] = field(default_factory=dict)
    # whose filesystem failed, from when and until when
    outages: list[tuple[int, float, float]] = field(default_factory=list)
    # which process could not beat or look, from when and until when: it was stopped, hung in one operation, or its filesystem failed
    silenced: list[tuple[int, float, float]] = field(default_factory=list)
    # where this schedule's small files lie, which differs from process to process
    root: str = "/run"

    def add(self, line: JournalLine) -> None:
        self.events.append(line)
        self.told.append(line)

    @cached_property
    def generations(self) -> dict[int, tuple[Write, Generation]]:
        """The first record of each number."""
        found: dict[int, tuple[Write, Generation]] = {}
        for write in self.writes:
            record = write.record
            if type(record) is Generation:
                found.setdefault(record.number, (write, record))
        return found

    @cached_property
    def facts(self) -> dict[RowPlace, Done]:
        """The first "done" fact of each member in each row."""
        found: dict[RowPlace, Done] = {}
        for write in self.writes:
            fact = write.record
            if type(fact) is Fact and fact.status == "done":
                found.setdefault(row_of(write.path), {}).setdefault(fact.rank, (write.time, fact))
        return found

    def phases_of(self, record: Generation) -> str:
        """What a generation's session was started for."""
        return str(record.choices.get(SLICE_CHOICE, self.phases))

    def span(self, record: Generation) -> tuple[int, int]:
        """The first and the last row of an iteration in a generation."""
        return self.spans.get(self.phases_of(record), (self.first, self.last))

    def all_done(self, place: RowPlace, generation: Generation) -> bool:
        """Whether all members have published that they are done with a row."""
        done = self.facts.get(place, {})
        return all(member.rank in done for member in generation.members)

    @cached_property
    def joins(self) -> dict[tuple[int, int], Write]:
        """(rank, incarnation) -> its record."""
        found: dict[tuple[int, int], Write] = {}
        for write in self.writes:
            if isinstance(write.record, Join):
                found.setdefault((write.record.rank, write.record.incarnation), write)
        return found

    @cached_property
    def places(self) -> list[tuple[JournalLine, RowPlace]]:
        """Every entry into a row and every release from one, in order."""
        rows = frozenset(("phase_started", "phase_finished"))
        return [(event, place_of(event.node)) for event in self.events if event.event in rows]

    @cached_property
    def passed(self) -> list[tuple[JournalLine, RowPlace]]:
        """Every release from a row: the journal's phase_finished."""
        return [(event, place) for event, place in self.places if event.event == "phase_finished"]

    @cached_property
    def entered(self) -> list[tuple[JournalLine, RowPlace]]:
        """Every entry into a row: the journal's phase_started."""
        return [(event, place) for event, place in self.places if event.event == "phase_started"]


@lru_cache(maxsize=4096)
def row_of(path: str) -> RowPlace:
    """The row of a fact's path."""
    _, generation, phase, name = path.rsplit("/", 3)
    return int(generation[4:]), int(name[5:11]), int(phase[1:3])


def place_of(node: Node) -> RowPlace:
    """The row of a running node."""
    generation, position = node.generation, node.position
    assert generation is not None and position is not None
    return generation.number, position.iteration, position.phase
