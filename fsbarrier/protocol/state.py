"""The state machine's vocabulary: what a node remembers (Node), what it can see (View), what it asks for (actions). Pure data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum

from fsbarrier.protocol.codec import Fault
from fsbarrier.protocol.facts import Fact, Generation, Join, Payload, Position, StopRequest
from fsbarrier.protocol.membership import JOINING, Ledger, Limits
from fsbarrier.protocol.rows import SLICE_CHOICE, Row, Table


class Stage(StrEnum):
    JOINING = JOINING
    RUNNING = "running"
    ENDED = "ended"


class RowPart(Enum):
    """How far this node is in the work of its row."""

    NONE = "none"
    #: its own work is under way
    EACH = "each"
    #: leader: its own work is done, the others' is not yet
    GATHER = "gather"
    #: leader: the leader's work is under way
    LEADER = "leader"
    #: its fact is published; it waits for the others
    ANNOUNCED = "announced"


#: the parts in which a node looks at what the others have published in its row
WATCHING = (RowPart.ANNOUNCED, RowPart.GATHER, RowPart.EACH)


#: setting -> the rule that follows it
CHANGING_RULES = {
    "num_nodes": "num_nodes",
    "min_nodes": "min_nodes",
    "on_node_failure": "on_node_failure",
    "coordination.retries": "retries",
}


@dataclass(frozen=True, slots=True)
class Rules:
    """By what a node acts. `slice`: the rows that a session runs unless its start chooses others. `settings`: those that may change
    between starts, by their dotted names, as the run began with them.

    `on_node_failure` is "shrink", "wait" or "abort"; in groups it is "hold": the caller hears of a loss, and decides. `regroup`: the
    number of the generation that a group's caller wants to be followed by the next.
    """

    table: Table[object]
    num_nodes: int
    slice: str = ""
    min_nodes: int = 1
    on_node_failure: str = "shrink"
    retries: int = 2
    limits: Limits = field(default_factory=Limits)
    regroup: int = 0
    settings: Payload = field(default_factory=dict)

    def under(self, settings: Payload) -> Rules:
        """These rules with the settings that are in force now."""
        if not settings:
            return self
        changed = {rule: settings[name] for name, rule in CHANGING_RULES.items() if name in settings}
        return replace(self, **changed)

    def span(self, choices: Payload) -> tuple[int, int]:
        """The first and the last row of an iteration, as a generation's choices say."""
        return self.table.span(choices.get(SLICE_CHOICE, self.slice))

    def row(self, position: Position, generation: Generation) -> Row[object]:
        """The row at a position of a generation."""
        return self.table.row(position, generation.until, generation.choices.get(SLICE_CHOICE, self.slice))

    def row_name(self, position: Position) -> str:
        return self.table.rows[position.phase].name


@dataclass(frozen=True, slots=True)
class Node:
    """What one node remembers. `since`: local time of entering this stage or generation.

    `trouble_since`: when this node noticed the trouble that it wants to answer with a new generation. `failed_since`: when it first
    saw that a member's program had failed in this row.
    """

    rank: int
    incarnation: int
    since: float
    host: str = ""
    stage: Stage = Stage.JOINING
    #: A node that joins ignores generations up to this number: they are older than its start, or go on without it. Example: an
    #: operator stopped the last session in generation 4. Without `baseline` that verdict would end each new start at once.
    baseline: int = 0
    #: This process saw members of the newest generation at work. Only then does their "finished" mean that this node came too
    #: late. Without `saw_others_at_work` the heartbeat files of yesterday's session would end today's start with a larger --iterations.
    saw_others_at_work: bool = False
    generation: Generation | None = None
    position: Position | None = None
    part: RowPart = RowPart.NONE
    result: Payload = field(default_factory=dict)
    work_s: float = 0.0
    decisions: Mapping[str, Payload] = field(default_factory=dict)
    trouble_since: float | None = None
    failed_since: float | None = None
    #: a node that joins: with how many nodes it was about to form a generation when it last looked, and since when
    starting_nodes: int = 0
    starting_since: float = 0.0
    #: the first incarnation of this process
    started_as: int = 0

    @property
    def place(self) -> tuple[Generation, Position]:
        """Generation and position of a node that is in one."""
        assert self.generation is not None and self.position is not None
        return self.generation, self.position


@dataclass(frozen=True, slots=True)
class WorkReport:
    """The end of a piece of this node's work. Not ok: `value` has "error" and "log" (its last lines)."""

    part: RowPart
    ok: bool
    value: Payload
    seconds: float


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where a run goes on: the newest generation (`generation`; 0 for none) left it there, as its facts said at local time `at`.

    `span`: the rows that the newest generation ran. `sealed`: a seal has ended it for good, so that it cannot have gone on since.
    """

    position: Position
    decisions: Mapping[str, Payload] = field(default_factory=dict)
    generation: int = 0
    at: float = 0.0
    span: tuple[int, int] = (0, 0)
    sealed: bool = False


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A record that is listed and cannot be read: why, and since which local time.

    What it says is unknown, so that nothing may be concluded from it, and least of all that it is not there.
    """

    path: str
    fault: Fault
    since: float


@dataclass(frozen=True, slots=True)
class View:
    """The facts that one node can see. `arrived`, `failed`, `leaders_fact` belong to the row that the node is in, `work` is its own."""

    newest: Generation | None = None
    #: a record that this node must act on and cannot read: of a generation after `newest`, or a fact about its row
    unreadable: Unreadable | None = None
    joins: Mapping[int, Join] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger)
    #: what this node was asked, and what the others were asked before it came (protocol/stops.py)
    stop: StopRequest | None = None
    missed_stop: StopRequest | None = None
    resume_point: ResumePoint | None = None
    arrived: frozenset[int] = frozenset()
    failed: Mapping[int, Fact] = field(default_factory=dict)
    leaders_fact: Fact | None = None
    work: WorkReport | None = None


# --- actions ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Launch:
    """Begin this node's work of its row."""

    part: RowPart


@dataclass(frozen=True, slots=True)
class CancelWork:
    """End the work under way. The node does nothing else before all of it has ended."""


@dataclass(frozen=True, slots=True)
class Publish:
    """Publish this node's fact about its row."""

    fact: Fact


@dataclass(frozen=True, slots=True)
class Propose:
    """Try to create this generation's record. Only one node can create the record of a number, and all follow that one."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class Announce:
    """Join as this incarnation."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class FindResumePoint:
    """Look where the newest generation left the run. `seal`: also end that generation there for good (node/resume.py), before the
    next one is proposed."""

    seal: bool = False


@dataclass(frozen=True, slots=True)
class Entered:
    """The node entered a row. `begins`: it is the first one of a generation."""

    position: Position
    generation: Generation
    begins: bool = False


@dataclass(frozen=True, slots=True)
class Exit:
    """The node ends. `state` is what its last heartbeat says."""

    code: int
    state: str
    reason: str


@dataclass(frozen=True, slots=True)
class Note:
    """An event for the journal. `at`: the node at the time of the event, if it has moved on since."""

    event: str
    fields: Payload = field(default_factory=dict)
    at: Node | None = None


Action = Launch | CancelWork | Publish | Propose | Announce | FindResumePoint | Entered | Exit | Note
Step = tuple[Node, Sequence[Action]]
