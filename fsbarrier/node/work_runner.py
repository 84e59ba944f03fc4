"""What a node's loop asks of whoever does its work: a daemon's jobs, a group's caller, the simulator."""

from __future__ import annotations

from typing import Protocol

from fsbarrier.protocol.facts import Payload
from fsbarrier.protocol.state import Node, RowPart, WorkReport


class WorkRunner(Protocol):
    """Does a node's work outside the loop: in a thread, or simulated."""

    def launch(self, node: Node, part: RowPart) -> None: ...

    def cancel(self) -> None:
        """End the work under way completely; its report is never given."""

    def report(self) -> WorkReport | None:
        """How the work launched last ended; None while it runs. The same answer until the next launch."""

    def progress(self) -> Payload: ...
