"""The work of a group's member in a row: to wait until its caller contributes a value."""

from __future__ import annotations

from dataclasses import dataclass

from fsbarrier.protocol.facts import Payload, Position
from fsbarrier.protocol.state import Node, Part, WorkReport


@dataclass
class CollectiveWork:
    """The WorkRunner of a group: the work of a row is done once the caller has contributed to it.

    A contribution names its generation, because the caller may contribute to one that the looking thread has just left.
    """

    contributed: tuple[int, Position, Payload] | None = None
    row: tuple[int, Position] | None = None
    #: why this member leaves, for the others
    leaving: str = ""

    def launch(self, node: Node, part: Part) -> None:
        assert node.generation is not None and node.position is not None
        self.row = node.generation.number, node.position

    def cancel(self) -> None:
        self.contributed = self.row = None

    def report(self) -> WorkReport | None:
        contributed = self.contributed
        if contributed is None or contributed[:2] != self.row:
            return None
        return WorkReport(Part.EACH, True, contributed[2], 0.0)

    def progress(self) -> Payload:
        return {"why": self.leaving} if self.leaving else {}
