"""The records that nodes leave for each other in the shared directory. Each is written once and never changed.

Heartbeats are the one exception: a node replaces its own, as a whole. How records become bytes: protocol/codec.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

#: the status of a fact that ends its generation; see Fact
SEALED = "sealed"

#: A JSON object that is only read: what a phase's work gave, what a generation adopts. Its fields are its program's own.
Payload = Mapping[str, Any]

#: A JSON object as `json.loads` gives it. Whoever reads it knows its fields, or refuses it.
JsonObject = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Member:
    """One node of a generation: which start of which rank, and where it runs."""

    rank: int
    incarnation: int
    host: str = ""


@dataclass(frozen=True, order=True, slots=True)
class Position:
    """Where in the run: iteration from 1, phase as its index in the program's rows."""

    iteration: int
    phase: int


@dataclass(frozen=True, slots=True)
class Join:
    """A node has started: who it is and how to reach it.

    `until` (the last iteration) and `choices` (the settings that each start may choose anew) are what its command line asked
    for. The run follows those of the lowest rank. `digest` tells which code it runs, `version` says so for people: only nodes of the
    same code are members of one generation.
    """

    rank: int
    incarnation: int
    host: str
    pid: int
    boot_id: str
    addresses: tuple[str, ...] = ()
    until: int | None = None
    version: str = ""
    digest: str = ""
    time: str = ""
    choices: Payload = field(default_factory=dict)
    #: the settings that its command line names and that may change between starts, by their dotted names
    stated: Payload = field(default_factory=dict)
    #: the user and host that typed it
    by: str = ""
    #: what the node can do and has left, and by name the digests of its code (node/fingerprint.py)
    fingerprint: Payload = field(default_factory=dict)

    def other_code(self, other: Join) -> list[str]:
        """The names of what differs between the code of two starts, as far as both told them."""
        ours, theirs = (join.fingerprint.get("code") for join in (self, other))
        if not isinstance(ours, dict) or not isinstance(theirs, dict):
            return []
        return [name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)]


@dataclass(frozen=True, slots=True)
class Beat:
    """A heartbeat. Its `counter` advances while the node lives; `state` tells the others how it ended; the rest is for people."""

    rank: int
    incarnation: int
    counter: int
    host: str
    pid: int
    state: str
    generation: int = 0
    iteration: int = 0
    phase: int = 0
    phase_name: str = ""
    progress: Payload = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a run ended for every node at once. `waiting`: the starts that waited to be taken in; it ends them too, and no later one."""

    exit_code: int
    reason: str
    waiting: tuple[Member, ...] = ()


@dataclass(frozen=True, slots=True)
class Revision:
    """A change of the run's settings, as a start of node 0 asked for it: who, when, and dotted name -> value.

    `generation`: the first that has it. `iteration`: the first one that begins with it. `before`: the values that it replaced.
    """

    generation: int
    iteration: int
    values: Payload
    before: Payload
    by: str = ""
    time: str = ""


@dataclass(frozen=True, slots=True)
class Generation:
    """Who takes part from now on, who leads, and from where the run goes on. Each number exists once, for ever.

    `decisions` are adopted by name from older generations: phase name -> {"iteration": i, "value": payload}.
    `attempt` counts the failed tries of `start.iteration`. A `verdict` ends the run. `revisions`: all changes of the settings up to
    here, in their order; each generation hands them on to the next.
    """

    number: int
    members: tuple[Member, ...]
    leader: int
    start: Position
    reason: str
    decisions: Mapping[str, Payload] = field(default_factory=dict)
    until: int | None = None
    choices: Payload = field(default_factory=dict)
    attempt: int = 0
    created_by: int = -1
    verdict: Verdict | None = None
    revisions: tuple[Revision, ...] = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the members, in their order."""
        return tuple([member.rank for member in self.members])

    def incarnation_of(self, rank: int) -> int | None:
        """The incarnation that this generation knows `rank` by; None for a stranger."""
        return next((m.incarnation for m in self.members if m.rank == rank), None)


@dataclass(frozen=True, slots=True)
class Fact:
    """What one node says about one phase: done or failed, with what came of it.

    `status` is "done", "failed" or SEALED. A seal lies under the name of the leader's fact, which then cannot be created any more:
    no member passes that row, and the generation has ended (see node/resume.py).

    `decisions`, in the first fact of the leader in an iteration: all that holds when the iteration begins, as in a generation's record.
    Whoever goes on from there needs no older fact, so those can be removed.
    """

    rank: int
    incarnation: int
    status: str
    value: Payload = field(default_factory=dict)
    work_s: float = 0.0
    decisions: Mapping[str, Payload] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StopRequest:
    """Somebody asked the run to end: at the next safe point, or `now`. It holds for the starts that were there (protocol/stops.py):

    `alive`, the newest start of each rank, or `ended`, where that start's last heartbeat said that it had ended.
    """

    now: bool
    who: str
    time: str = ""
    alive: tuple[Member, ...] = ()
    ended: tuple[Member, ...] = ()


Record = Join | Beat | Generation | Fact | StopRequest
R = TypeVar("R", Join, Beat, Generation, Fact, StopRequest)
