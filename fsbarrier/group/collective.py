"""One call of a collective, what became of it, and the work that it is for the node's loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fsbarrier.errors import NodeError
from fsbarrier.protocol.facts import Generation, Payload, Position
from fsbarrier.protocol.rows import Row, Table
from fsbarrier.protocol.state import Node, RowPart, WorkReport

#: the group's program: one row, over and over. Each member's work is what its caller gives.
COLLECTIVE = Row(0, "collective", each="what the caller gives", transient=True, call_key="call")
TABLE = Table("group", (COLLECTIVE,))


@dataclass(frozen=True, slots=True, eq=False)
class Collective:
    """One call of a collective in row `position` of a generation. A call that is repeated is another object.

    `call` is what all members must have called alike: "barrier", "all_gather", "broadcast_2". `json` is what this member gives
    (None: nothing). `objects_of`: the members whose objects the call returns.
    """

    generation: Generation
    position: Position
    call: str
    json: str | None
    objects_of: tuple[int, ...]

    @property
    def value(self) -> Payload:
        """This member's fact."""
        return {"call": self.call} if self.json is None else {"call": self.call, "json": self.json}

    @property
    def name(self) -> str:
        """For messages."""
        return f"{as_typed(self.call)} no. {self.position.iteration}"

    def repeats(self, other: Collective) -> bool:
        """Whether the caller calls the same once more."""
        return self.value == other.value


def broadcast_from(src: int) -> str:
    return f"broadcast_{src}"


def as_typed(call: str) -> str:
    """A call as its caller wrote it."""
    name, _, src = call.rpartition("_")
    return f"{name}(src={src})" if src.isdigit() else f"{call}()"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a collective ended for this member: with the objects that its caller asked for, or with an error."""

    of: Collective
    objects: tuple[Any, ...] = ()
    error: NodeError | None = None


@dataclass
class CollectiveWork:
    """The WorkRunner of a group: the work of a row is done once the caller has called a collective for it."""

    asked: Collective | None = None
    #: generation and number of the last collective that ended well here
    passed: tuple[int, int] | None = None
    #: why this member leaves, for the others
    leaving: str = ""
    _row: tuple[int, Position] | None = None

    def launch(self, node: Node, part: RowPart) -> None:
        generation, position = node.place
        self._row = generation.number, position

    def cancel(self) -> None:
        self._row = None

    def report(self) -> WorkReport | None:
        asked = self.asked
        # The caller may have asked in a generation that this node has just left; rows are numbered alike in both.
        if asked is None or (asked.generation.number, asked.position) != self._row:
            return None
        return WorkReport(RowPart.EACH, True, asked.value, 0.0)

    def progress(self) -> Payload:
        passed = {} if self.passed is None else {"passed": [*self.passed]}
        return {**passed, "why": self.leaving} if self.leaving else passed
