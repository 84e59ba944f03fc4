"""One call of a collective, and the WorkRunner that makes it the work of a row."""

from __future__ import annotations

from dataclasses import dataclass

from fsbarrier.protocol.facts import Generation, Payload, Position
from fsbarrier.protocol.rows import Row, Table
from fsbarrier.protocol.state import Node, RowPart, WorkReport

#: the group's program: one row, repeated. Each member's work is to wait for its caller.
COLLECTIVE = Row(0, "collective", each="what the caller gives", transient=True)
TABLE = Table("group", (COLLECTIVE,))
#: the call whose fact needs no content
BARRIER = "barrier()"


@dataclass(frozen=True, slots=True)
class Collective:
    """One call of a collective in row `position` of a generation."""

    generation: Generation
    position: Position
    #: as typed: "barrier()", "all_gather()" or "broadcast(src=2)"; all members must make the same call
    call: str
    #: this member's object; None: it sends none
    json: str | None
    #: the members whose objects the call returns
    objects_of: tuple[int, ...]

    @property
    def value(self) -> Payload:
        """This member's fact."""
        if self.call == BARRIER:
            return {}
        return {"call": self.call} if self.json is None else {"call": self.call, "json": self.json}

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.call} no. {self.position.iteration}"


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

    @property
    def report(self) -> WorkReport | None:
        asked = self.asked
        # The rows of the next generation, which this node may have entered meanwhile, have the same numbers.
        if asked is None or (asked.generation.number, asked.position) != self._row:
            return None
        return WorkReport(RowPart.EACH, True, asked.value, 0.0)

    def progress(self) -> Payload:
        return {"why": self.leaving} if self.leaving else {}
