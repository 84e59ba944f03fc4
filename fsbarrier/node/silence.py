"""Journal events about heartbeats: suspected and recovered members, and heartbeats that this mount does not show."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from fsbarrier.node.observer import Observer
from fsbarrier.protocol.facts import Member, Payload
from fsbarrier.protocol.membership import FINISHED, Limits, silent_members
from fsbarrier.protocol.state import Node, Stage


@dataclass
class Silence:
    """Compares the ledger with the events so far. The state machine decides whether a silent member is lost."""

    observer: Observer
    #: the time of the last look that was compared
    _looked_at: float | None = None
    _suspected: set[Member] = field(default_factory=set)
    _hidden_was_told: bool = False

    def begin(self) -> None:
        """This node enters a generation."""
        self._suspected.clear()

    def events(self, node: Node, now: float, limits: Limits) -> Iterator[tuple[str, Payload]]:
        """New events with their fields, once after each look at the heartbeats."""
        if self.observer.ledger.looked_at == self._looked_at:
            return
        self._looked_at = self.observer.ledger.looked_at
        if node.generation is not None and node.stage is Stage.RUNNING:
            yield from self._suspicions(node, node.generation.members, now, limits.suspect_s)
        yield from self._hidden_heartbeats(now, limits.suspect_s)

    def _suspicions(
        self, node: Node, members: tuple[Member, ...], now: float, suspect_s: float
    ) -> Iterator[tuple[str, Payload]]:
        known, ledger = self._suspected, self.observer.ledger
        silent = silent_members(members, node.rank, ledger, node.watches_since(ledger), now, suspect_s)
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

    def _hidden_heartbeats(self, now: float, suspect_s: float) -> Iterator[tuple[str, Payload]]:
        """Say once why the run does not go on: other nodes' heartbeats exist, and this mount does not show them."""
        hidden = {rank: now - since for rank, since in self.observer.hidden_beats.items()}
        silent = [rank for rank, hidden_s in hidden.items() if hidden_s >= suspect_s]
        if silent and not self._hidden_was_told:
            self._hidden_was_told = True
            yield (
                "heartbeats_hidden",
                {"hidden": sorted(silent), "hidden_s": round(max(hidden.values()), 3)},
            )
