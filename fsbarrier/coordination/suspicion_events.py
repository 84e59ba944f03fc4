"""Journal events about heartbeats: suspected and recovered members."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from fsbarrier.coordination.observer import Observer
from fsbarrier.protocol.facts import Member, Payload
from fsbarrier.protocol.membership import FINISHED, Ledger, Limits, silent_members
from fsbarrier.protocol.state import Node, Stage


@dataclass
class SuspicionEvents:
    """Compares the ledger with the events so far. The state machine decides whether a silent member is lost."""

    observer: Observer
    #: what was compared last
    _ledger: Ledger | None = None
    _suspected: set[Member] = field(default_factory=set)

    def begin(self) -> None:
        """This node enters a generation."""
        self._suspected.clear()

    def events(self, node: Node, limits: Limits) -> Iterator[tuple[str, Payload]]:
        """New events with their fields, once after each look at the heartbeats."""
        ledger = self.observer.ledger
        if ledger is self._ledger:
            return
        self._ledger = ledger
        if node.generation is not None and node.stage is Stage.RUNNING:
            yield from self._suspicions(node, node.generation.members, limits.suspect_s)

    def _suspicions(
        self, node: Node, members: tuple[Member, ...], suspect_s: float
    ) -> Iterator[tuple[str, Payload]]:
        known, ledger = self._suspected, self.observer.ledger
        silent = silent_members(members, node.rank, ledger, node.watches_since(ledger), suspect_s)
        self.observer.schedule.suspecting = bool(silent)
        for member in members if silent or known else ():
            suspect = {"suspect": member.rank, "host": member.host}
            if member in silent:
                if member not in known and ledger.state(member) not in (FINISHED, "stopped"):
                    known.add(member)
                    yield "node_suspected", {**suspect, "silent_s": round(silent[member], 3)}
            elif member in known:
                known.discard(member)
                yield "node_recovered", suspect
