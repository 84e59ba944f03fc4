"""The state machine's vocabulary: what a node remembers (Node), what it can see (View), what it asks for (actions). Pure data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any, TypeVar

from fsbarrier.program import SLICES, Program
from fsbarrier.protocol.facts import Fact, Generation, Join, Payload, Position, StopRequest
from fsbarrier.protocol.membership import JOINING, Ledger, Limits
from fsbarrier.protocol.records import record


class Stage(StrEnum):
    JOINING = JOINING
    RUNNING = "running"
    ENDED = "ended"


class Part(Enum):
    """How far this node is in the work of its row."""

    NONE = "none"
    EACH = "each"  # its own work is under way
    GATHER = "gather"  # leader: own work done, the others' not yet
    LEADER = "leader"  # leader: the leader's work is under way
    ANNOUNCED = "announced"  # its fact is published; it waits for the others


# Names are looked up several times as fast as in an enumeration.
RUNNING, ENDED = Stage.RUNNING, Stage.ENDED
NONE, EACH, GATHER, LEADER, ANNOUNCED = Part
#: the parts in which a node looks at what the others have published in its row
WATCHING = (ANNOUNCED, GATHER, EACH)


@dataclass(frozen=True)
class Rules:
    """What does not change while a node lives."""

    program: Program
    first: int
    last: int
    num_nodes: int
    min_nodes: int = 1
    on_node_failure: str = "shrink"  # "shrink" | "wait" | "abort"; groups: "hold"
    retries: int = 2
    limits: Limits = field(default_factory=Limits)
    regroup: int = 0  # groups: the caller asked that this generation be followed by the next

    def span(self, choices: Payload) -> tuple[int, int]:
        """The first and the last row of an iteration, as a generation's choices say."""
        chosen = SLICES.get(choices.get("rl_phase", "")) if choices else None
        return chosen or (self.first, self.last)


@record
class Node:
    """What one node remembers. `since`: local time of entering this stage or generation.

    (Where a class has a default that is an object of Python's, the interpreter looks up the field the slow way: hence factories.)
    """

    rank: int
    incarnation: int
    since: float
    host: str = ""
    stage: Stage = field(default_factory=lambda: Stage.JOINING)
    baseline: int = 0  # generations up to this number ended before this incarnation began
    met: bool = False  # the newest generation was seen at work since this process began
    generation: Generation | None = None
    position: Position | None = None
    part: Part = field(default_factory=lambda: Part.NONE)
    result: Payload = field(default_factory=dict)
    work_s: float = 0.0
    decisions: Mapping[str, Payload] = field(default_factory=dict)
    trouble_since: float | None = None
    failed_since: float | None = None  # when a member's program was first seen to have failed in this row


@record
class WorkReport:
    """The end of a piece of this node's work. Not ok: `value` has "error" and "log" (its last lines)."""

    part: Part
    ok: bool
    value: Payload
    seconds: float


@record
class Recovered:
    """Where the newest generation (`generation`; 0 for none) left the run, as its facts on disk told at local time `at`."""

    position: Position
    decisions: Mapping[str, Payload] = field(default_factory=dict)
    generation: int = 0
    at: float = 0.0
    span: tuple[int, int] = (0, 0)  # the rows that the newest generation ran
    sealed: bool = False  # it cannot have gone on since


@record
class View:
    """The facts that one node can see. `arrived`, `failed`, `leaders_fact` are those of the row the node is in, `work` is its own.

    `void`: generations up to this number that are newer than `newest` have no readable record, and had none for long.
    """

    newest: Generation | None = None
    void: int = 0
    joins: Mapping[int, Join] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger)
    stop: StopRequest | None = None
    recovered: Recovered | None = None
    arrived: frozenset[int] = frozenset()
    failed: Mapping[int, Fact] = field(default_factory=dict)
    leaders_fact: Fact | None = None
    work: WorkReport | None = None

    def with_work(self, work: WorkReport) -> View:
        """The same, and how the node's own work ended."""
        row = self.arrived, self.failed, self.leaders_fact
        return View(self.newest, self.void, self.joins, self.ledger, self.stop, self.recovered, *row, work)


T = TypeVar("T", Node, View)
_new = object.__new__


def changed(old: T, **changes: Any) -> T:
    """As dataclasses.replace, several times as fast: a node looks a thousand times a second when it waits.

    A dictionary of its own: of one that is shared with the class's other objects the interpreter looks up each field the slow way.
    """
    copy = _new(type(old))
    copy.__dict__ = {**old.__dict__, **changes}
    return copy


# --- actions ------------------------------------------------------------------------------------------------------------


@record
class Launch:
    """Begin this node's work of its row."""

    part: Part


@record
class CancelWork:
    """End the work under way, completely, before anything else is done."""


@record
class Publish:
    """Publish this node's fact about its row."""

    fact: Fact


@record
class Propose:
    """Try to create this generation's record; whoever comes first decides."""

    generation: Generation


@record
class Announce:
    """Join as this incarnation."""

    incarnation: int


@record
class Recover:
    """Look where the newest generation left the run; `for_good`: and end it there, before the next one is proposed."""

    for_good: bool = False


@record
class Entered:
    """The node entered a row (for the journal and the live view)."""

    position: Position
    generation: Generation
    left: Position | None


@record
class Exit:
    """The node ends. `state` is what its last heartbeat says."""

    code: int
    state: str
    reason: str


@record
class Note:
    """An event for the journal. `at`: the node as it was then, where it has moved on since."""

    event: str
    fields: Payload = field(default_factory=dict)
    at: Node | None = None


Action = Launch | CancelWork | Publish | Propose | Announce | Recover | Entered | Exit | Note
Step = tuple[Node, Sequence[Action]]
