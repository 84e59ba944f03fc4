"""What the journal is told of silence: members that fall silent and are heard again, and heartbeats that this mount does not show."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from fsbarrier.node.observer import Observer
from fsbarrier.protocol.facts import Member, Payload
from fsbarrier.protocol.membership import FINISHED, Limits, silent_members
from fsbarrier.protocol.state import Node, Stage


@dataclass
class Silence:
    """Finds what is new after each look at the heartbeats. Whether a silent member is lost, the state machine decides."""

    observer: Observer
    #: when the heartbeats were read that were considered last
    _looked_at: float | None = None
    _suspected: set[Member] = field(default_factory=set)
    _hidden_was_told: bool = False

    def begin(self) -> None:
        """This node enters a generation, and suspects members only by what it sees from now on."""
        self._suspected.clear()

    def events(self, node: Node, now: float, limits: Limits) -> Iterator[tuple[str, Payload]]:
        """The events that follow from the last look at the heartbeats, with their fields; none where it was considered before."""
        if self.observer.ledger.looked_at == self._looked_at:
            return
        self._looked_at = self.observer.ledger.looked_at
        if node.generation is not None and node.stage is Stage.RUNNING:
            yield from self._suspects(node, node.generation.members, now, limits.suspect_s)
        yield from self._hidden(now, limits.suspect_s)

    def _suspects(
        self, node: Node, members: tuple[Member, ...], now: float, suspect_s: float
    ) -> Iterator[tuple[str, Payload]]:
        known, ledger = self._suspected, self.observer.ledger
        silent = silent_members(members, node.rank, ledger, node.since, now, suspect_s)
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

    def _hidden(self, now: float, suspect_s: float) -> Iterator[tuple[str, Payload]]:
        """Once: why nothing goes on. Others beat, and this mount does not show what they write."""
        hidden = {rank: now - since for rank, since in self.observer.hidden_beats.items()}
        silent = [rank for rank, hidden_s in hidden.items() if hidden_s >= suspect_s]
        if silent and not self._hidden_was_told:
            self._hidden_was_told = True
            yield (
                "heartbeats_hidden",
                {"hidden": sorted(silent), "hidden_s": round(max(hidden.values()), 3)},
            )
