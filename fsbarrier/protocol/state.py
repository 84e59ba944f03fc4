"""The state machine's types: what a node remembers (Node), what it sees (View), and the actions that it asks for. Pure data."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum

from fsbarrier.protocol.facts import (
    Decision,
    Fact,
    Generation,
    Join,
    Member,
    Payload,
    Position,
    StopRequest,
)
from fsbarrier.protocol.membership import JOINING, Ledger, Limits
from fsbarrier.protocol.rows import SLICE_CHOICE, Row, Table


class Stage(StrEnum):
    JOINING = JOINING
    RUNNING = "running"
    ENDED = "ended"


class RowPart(Enum):
    """How far this node has come in its row."""

    #: it has entered the row
    NONE = "none"
    #: its work as a member is running
    EACH = "each"
    #: the leader waits for the other members before its work as the leader; a joining node waits before it gets ready
    GATHER = "gather"
    #: its work as the leader is running
    LEADER = "leader"
    #: it has published its fact, and waits for the others
    ANNOUNCED = "announced"


#: the parts in which a node reads what the others have published about its row
WATCHING = (RowPart.ANNOUNCED, RowPart.GATHER, RowPart.EACH)
#: the parts of a joining node that is not ready yet
UNREADY = (RowPart.GATHER, RowPart.EACH)


#: setting -> the field of Rules that has its value
CHANGING_RULES = {
    "num_nodes": "num_nodes",
    "min_nodes": "min_nodes",
    "on_node_failure": "on_node_failure",
}
#: the only field of `Limits` that a later session may change, with `--num-nodes A:B`
LAST_CALL = "coordination.last_call_s"


@dataclass(frozen=True, slots=True)
class Role:
    """A role that only some ranks can hold. The run needs at least `least` of its holders as members. `asked`: how the settings describe
    the holders, for people."""

    name: str
    holders: frozenset[int]
    least: int = 1
    asked: str = ""


@dataclass(frozen=True, slots=True)
class Rules:
    """The configuration of the state machine."""

    table: Table[object]
    num_nodes: int
    #: the slice of the rows that a session runs, unless its start chooses another
    slice: str = ""
    min_nodes: int = 1
    #: the roles of a run with these `settings`
    roles_of: Callable[[Payload], Sequence[Role]] = lambda settings: ()
    #: "shrink", "wait" or "abort"
    on_node_failure: str = "shrink"
    retries: int = 2
    #: A generation ends after so many iterations, and the same members go on in the next one. The leader's facts stay as long as their
    #: generation, so this bounds their number.
    longest: int = 100
    limits: Limits = field(default_factory=Limits)
    #: The settings that may change from session to session, by their dotted names. They have the values that the run began with, or after
    #: `under` those of the session.
    settings: Payload = field(default_factory=dict)

    def under(self, settings: Payload) -> Rules:
        """These rules with the current values of the settings."""
        if not settings:
            return self
        changed = {rule: settings[name] for name, rule in CHANGING_RULES.items() if name in settings}
        if LAST_CALL in settings:
            changed["limits"] = replace(self.limits, last_call_s=settings[LAST_CALL])
        return replace(self, settings={**self.settings, **settings}, **changed)

    def lacks(self, ranks: Collection[int]) -> str:
        """Why a run cannot go on with only these nodes, for people; "" if it can."""
        if len(ranks) < self.min_nodes:
            return f"{len(ranks)} left, --min-nodes is {self.min_nodes}"
        return self.lacks_role(ranks)

    @property
    def roles(self) -> Sequence[Role]:
        """The roles that not all nodes have, or that a single one cannot hold."""
        return self.roles_of(self.settings)

    def lacks_role(self, ranks: Collection[int]) -> str:
        """The role that too few of these nodes hold, for people; "" if there is none."""
        for role in self.roles:
            if len(role.holders.intersection(ranks)) < role.least:
                too_few = "nobody left holds" if role.least == 1 else f"fewer than {role.least} left hold"
                return f"{too_few} {role.name}{role.asked}"
        return ""

    def makers(self, row: Row[object], ranks: Collection[int]) -> frozenset[int]:
        """The nodes among `ranks` whose work makes a row's result (`Row.made_by`)."""
        if not row.made_by:
            return frozenset()
        role = next((role for role in self.roles if role.name == row.made_by), None)
        return frozenset(ranks) if role is None else role.holders.intersection(ranks)

    def span(self, choices: Payload) -> tuple[int, int]:
        """The first and the last row of an iteration, by a generation's choices."""
        return self.table.span(choices.get(SLICE_CHOICE, self.slice))

    def row(self, position: Position, generation: Generation) -> Row[object]:
        """The row at a position of a generation."""
        return self.table.row(position, generation.until, generation.choices.get(SLICE_CHOICE, self.slice))

    def has_row(self, position: Position) -> bool:
        """Whether the program has such a row. Positions in file names are checked, since anybody may have made such a file."""
        return position.phase < len(self.table.rows)

    def row_name(self, position: Position) -> str:
        """The name of the row at a position. Raises IndexError for one that `has_row` denies."""
        return self.table.rows[position.phase].name


@dataclass(frozen=True, slots=True)
class Node:
    """What one node remembers. All times are local."""

    rank: int
    incarnation: int
    #: when it entered this stage or generation
    since: float
    host: str = ""
    stage: Stage = Stage.JOINING
    #: A joining node ignores generations up to this number: they are older than its start, or went on without it. Example: an
    #: operator stopped the last session in generation 4. Without the baseline that verdict would end each new start at once.
    baseline: int = 0
    #: This process has seen members of the newest generation at work, so their "finished" means that it came too late. Without
    #: this flag, the heartbeat files of yesterday's session would end today's start with a larger --iterations.
    saw_others_at_work: bool = False
    generation: Generation | None = None
    position: Position | None = None
    part: RowPart = RowPart.NONE
    #: the result of its work in this row so far, and how long that took
    result: Payload = field(default_factory=dict)
    work_s: float = 0.0
    #: each row's newest decision before this node's position
    decisions: Mapping[str, Decision] = field(default_factory=dict)
    #: when it noticed the loss (or seal) that it wants to answer with a new generation
    trouble_since: float | None = None
    #: the lost members that the journal names
    told_lost: frozenset[Member] = frozenset()
    #: the members that were silent for `suspect_s` at the last look, which the journal calls suspected
    suspected: frozenset[Member] = frozenset()
    #: when it first saw that a member's program had failed in this row
    failed_since: float | None = None
    #: while joining: how many nodes were present at the last look, and since when
    starting_nodes: int = 0
    starting_since: float = 0.0
    #: the first incarnation of this process
    started_as: int = 0
    #: `Ledger.missed_s` at `since`
    missed_s: float = 0.0

    @property
    def place(self) -> tuple[Generation, Position]:
        """The generation and position of a node that is RUNNING."""
        assert self.generation is not None and self.position is not None
        return self.generation, self.position

    def watches_since(self, ledger: Ledger) -> float:
        """The time from which the silence of a member that was never heard counts: `since`, later by the time in which this node could
        not look. Example: this node entered a generation and was stopped for 18 s before its next look."""
        return self.since + ledger.missed_s - self.missed_s


@dataclass(frozen=True, slots=True)
class WorkReport:
    """How a piece of this node's work ended. If not `ok`, `value` has "error" and "log" (the last lines)."""

    part: RowPart
    ok: bool
    value: Payload
    seconds: float
    #: lines for the journal; the protocol does not know them
    events: Sequence[Payload] = ()


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where a run resumes, according to the newest generation's facts."""

    position: Position
    decisions: Mapping[str, Decision] = field(default_factory=dict)
    #: the number of that generation; 0 before the first
    generation: int = 0
    #: the local time at which its facts were read
    at: float = 0.0
    #: the rows that it ran
    span: tuple[int, int] = (0, 0)
    #: whether a seal fences that generation, so that it cannot have gone on since
    sealed: bool = False


@dataclass(frozen=True, slots=True)
class View:
    """The input of a decision: what one node sees of the shared directory and of its own work."""

    newest: Generation | None = None
    joins: Mapping[int, Join] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger)
    #: a request to stop this node
    stop: StopRequest | None = None
    #: where the newest generation left the run; None if a joining node has not read it yet
    resume_point: ResumePoint | None = None
    #: in the node's row: the members that are done, the failures, and the leader's fact once all are done; in a row with makers at once
    arrived: frozenset[int] = frozenset()
    failed: Mapping[int, Fact] = field(default_factory=dict)
    leaders_fact: Fact | None = None
    #: how the node's own work ended
    work: WorkReport | None = None


# --- actions ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Launch:
    """Start this node's work in its row. `at`: for a joining node, the member as which it does the work."""

    part: RowPart
    at: Node | None = None


@dataclass(frozen=True, slots=True)
class CancelWork:
    """End the running work. The node does nothing else until all of it has ended."""


@dataclass(frozen=True, slots=True)
class Publish:
    """Publish this node's fact about its row."""

    fact: Fact


@dataclass(frozen=True, slots=True)
class Propose:
    """Try to create this generation's record. Only one node can create a number's record, and all nodes follow it."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class Announce:
    """Join as this incarnation."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class FindResumePoint:
    """Find where the newest generation left the run. `seal`: also fence it there, before the next one is proposed (resume.py)."""

    seal: bool = False


@dataclass(frozen=True, slots=True)
class Entered:
    """The node has entered a row. `begins`: its first one in this generation."""

    position: Position
    generation: Generation
    begins: bool = False


@dataclass(frozen=True, slots=True)
class Exit:
    """The node ends. Its last heartbeat shows `state`."""

    code: int
    state: str
    reason: str


@dataclass(frozen=True, slots=True)
class Note:
    """An event for the journal. `at`: the node at the time of the event, if it has moved on since then."""

    event: str
    fields: Payload = field(default_factory=dict)
    at: Node | None = None


Action = Launch | CancelWork | Publish | Propose | Announce | FindResumePoint | Entered | Exit | Note
Step = tuple[Node, Sequence[Action]]
