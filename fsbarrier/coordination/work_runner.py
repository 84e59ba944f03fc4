"""The interface between a node's loop and its work, which a daemon, a group and the simulator implement."""

from __future__ import annotations

from typing import Protocol

from fsbarrier.protocol.facts import Payload
from fsbarrier.protocol.state import Node, RowPart, WorkReport


class WorkRunner(Protocol):
    """Does a node's work outside the loop, in a thread or simulated."""

    def launch(self, node: Node, part: RowPart) -> None: ...

    def cancel(self) -> None:
        """End the running work completely and discard its report."""

    def report(self) -> WorkReport | None:
        """How the last launched work ended; None while it runs. The answer stays the same until the next launch."""

    def progress(self) -> Payload: ...
