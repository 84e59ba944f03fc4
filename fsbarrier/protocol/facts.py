"""The records that nodes leave for each other in the shared directory. A record is written once and never changed.

Only what a node says about itself beside its heartbeat (`Beat`) is replaced. protocol/codec.py turns records into bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, NotRequired, TypedDict, TypeVar

from msgspec import Meta

#: the status of a fact that fences its generation; see Fact
SEALED = "sealed"

#: a read-only JSON object, such as a result of a phase's work; the protocol does not know its keys
Payload = Mapping[str, Any]

#: a JSON object as `json.loads` returns it
JsonObject = dict[str, Any]

#: a rank, a counter, a number of something
Count = Annotated[int, Meta(ge=0, le=2**53)]


class Decision(TypedDict):
    """A leader's decision in a row: the iteration, the row's result, and the decision before this one."""

    iteration: Count
    value: Payload
    before: NotRequired[Decision]


@dataclass(frozen=True, slots=True)
class Member:
    """One node of a generation: a start of a rank (`incarnation`), and the host that it runs on."""

    rank: Count
    incarnation: Count
    host: str = ""


@dataclass(frozen=True, order=True, slots=True)
class Position:
    """A place in the run: the iteration, from 1, and the index of the program's row."""

    iteration: Count
    phase: Count


@dataclass(frozen=True, slots=True)
class Join:
    """A node has started: who it is, how to reach it, and what its command line asks for."""

    rank: Count
    incarnation: Count
    host: str
    pid: Count
    boot_id: str
    addresses: tuple[str, ...] = ()
    #: the last iteration that its command line asks for; the run follows that of the lowest rank
    until: Count | None = None
    version: str = ""
    #: the digest of its code; all members of a generation have the same
    digest: str = ""
    #: when it started, by its own clock: for people
    time: str = ""
    #: the settings that each start may choose anew; the run follows those of the lowest rank
    choices: Payload = field(default_factory=dict)
    #: the settings on its command line that may change from session to session, by their dotted names
    stated: Payload = field(default_factory=dict)
    #: the user and host that typed the command
    by: str = ""
    #: the node's packages, devices and disk space, and the digests of its code by name (run/fingerprint.py)
    fingerprint: Payload = field(default_factory=dict)
    #: the frozen engines that it offers to other nodes: the port and the key of each, by name
    engines: Payload = field(default_factory=dict)

    def other_code(self, other: Join) -> list[str]:
        """The names of the code that differs between two starts, if both have listed their digests."""
        ours, theirs = (join.fingerprint.get("code") for join in (self, other))
        if not isinstance(ours, dict) or not isinstance(theirs, dict):
            return []
        return [name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)]


@dataclass(frozen=True, slots=True, order=True)
class Pulse:
    """A heartbeat: the name of a file that its node renames at each beat. For one start, a higher counter is newer.

    `state` says what the node does or how it ended. The last three fields say where it is in the run.
    """

    rank: Count
    incarnation: Count
    counter: Count
    state: str
    generation: Count = 0
    iteration: Count = 0
    phase: Count = 0


@dataclass(frozen=True, slots=True)
class Beat:
    """A node's status, written with each heartbeat: for people, and as second evidence before a node is declared dead."""

    rank: Count
    incarnation: Count
    counter: Count
    host: str
    pid: Count
    state: str
    generation: Count = 0
    iteration: Count = 0
    phase: Count = 0
    phase_name: str = ""
    progress: Payload = field(default_factory=dict)

    @property
    def pulse(self) -> Pulse:
        """The heartbeat with which this status was written."""
        place = self.generation, self.iteration, self.phase
        return Pulse(self.rank, self.incarnation, self.counter, self.state, *place)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The end of a run, for all members at once, and for the nodes that wait to join them."""

    exit_code: int
    reason: str


@dataclass(frozen=True, slots=True)
class FailedProgram:
    """A program failed on node `rank`: in which attempt at the iteration, in which row, and with which message (`what`).

    Attempt 0 marks failures before a node was dismissed for them. They do not count as attempts of the remaining nodes.
    """

    attempt: Count
    rank: Count
    phase: Count
    what: str
    #: the program only noticed that its partner on another node was gone, so the cause is on that node
    noticed: bool = False


@dataclass(frozen=True, slots=True)
class Generation:
    """A generation: its members, their leader, and the position where the run goes on. A number is never used twice.

    Other protocols call it an epoch or a view.
    """

    number: Count
    members: tuple[Member, ...]
    leader: Count
    start: Position
    reason: str
    #: decisions adopted from older generations: phase name -> {"iteration": i, "value": payload}
    decisions: Mapping[str, Decision] = field(default_factory=dict)
    #: the last iteration
    until: Count | None = None
    choices: Payload = field(default_factory=dict)
    #: the failures of `start.iteration` so far
    failures: tuple[FailedProgram, ...] = ()
    #: members of the last generation that this one leaves out, because their programs failed in each attempt; they end (attempts.py)
    dismissed: tuple[Member, ...] = ()
    created_by: Count = 0
    #: if set, the run ends
    verdict: Verdict | None = None
    #: the settings of its session that differ from those that the run began with, by dotted names
    settings: Payload = field(default_factory=dict)
    #: The number of the first generation of its era. A generation that only renews a long one with the same members continues its era,
    #: and nodes keep their processes, such as the trainer's, for an era.
    era: Count = 0

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the members, in their order."""
        return tuple([member.rank for member in self.members])

    @property
    def attempt(self) -> int:
        """How often `start.iteration` has failed."""
        return max((failure.attempt for failure in self.failures), default=0)

    def incarnation_of(self, rank: int) -> int | None:
        """The incarnation of member `rank`; None if it is no member."""
        return next((m.incarnation for m in self.members if m.rank == rank), None)


@dataclass(frozen=True, slots=True)
class Fact:
    """One node's result in one row. `status` is "done", "failed" or SEALED.

    A seal has the name of the leader's fact, which then cannot be created any more: no member passes that row, and the generation
    is fenced (coordination/resume.py).
    """

    rank: Count
    incarnation: Count
    status: str
    value: Payload = field(default_factory=dict)
    #: how long the node's work in the row took
    work_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StopRequest:
    """An operator asked the run to stop: at the next safe point, or `now`. `starts`: the newest start of each rank at that time."""

    now: bool
    who: str
    time: str = ""
    starts: tuple[Member, ...] = ()

    def concerns(self, rank: int, started_as: int) -> bool:
        """Whether a process that joined first as `started_as` had joined when the request was made. It may have rejoined since.

        So a request that a stale listing shows late ends no node of a later session.
        """
        return any(start.rank == rank and start.incarnation >= started_as for start in self.starts)


Record = Join | Beat | Generation | Fact | StopRequest
R = TypeVar("R", Join, Beat, Generation, Fact, StopRequest)
