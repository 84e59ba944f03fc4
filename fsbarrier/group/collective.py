"""One call of a collective, its outcome, and the WorkRunner that makes it the work of a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fsbarrier.errors import NodeError
from fsbarrier.protocol.facts import Generation, Payload, Position
from fsbarrier.protocol.rows import Row, Table
from fsbarrier.protocol.state import Node, RowPart, WorkReport

#: the group's program: one row, repeated. Each member's work is to wait for its caller.
COLLECTIVE = Row(0, "collective", each="what the caller gives", transient=True, call_key="call")
TABLE = Table("group", (COLLECTIVE,))


@dataclass(frozen=True, slots=True, eq=False)
class Collective:
    """One call of a collective in row `position` of a generation. A repeated call is another object."""

    generation: Generation
    position: Position
    #: "barrier", "all_gather" or "broadcast_2"; all members must make the same call
    call: str
    #: this member's object; None: it sends none
    json: str | None
    #: the members whose objects the call returns
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
        """Whether this is the same call again."""
        return self.value == other.value


def broadcast_from(src: int) -> str:
    return f"broadcast_{src}"


def as_typed(call: str) -> str:
    """A call as the caller wrote it."""
    name, _, src = call.rpartition("_")
    return f"{name}(src={src})" if src.isdigit() else f"{call}()"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a collective ended for this member: with objects or with an error."""

    of: Collective
    objects: tuple[Any, ...] = ()
    error: NodeError | None = None


@dataclass
class CollectiveWork:
    """The WorkRunner of a group: the work of a row is done when the caller has called a collective for it."""

    asked: Collective | None = None
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
        # The caller may have asked in a generation that this node has just left, with the same row numbers.
        if asked is None or (asked.generation.number, asked.position) != self._row:
            return None
        return WorkReport(RowPart.EACH, True, asked.value, 0.0)

    def progress(self) -> Payload:
        return {"why": self.leaving} if self.leaving else {}
