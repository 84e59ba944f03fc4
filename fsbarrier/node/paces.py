"""How often a node looks at the shared directory for each kind of news."""

from __future__ import annotations

from dataclasses import dataclass

from fsbarrier.protocol.timing import OUTAGE_S
from fsbarrier.settings.sections import Settings


@dataclass(frozen=True, slots=True)
class Paces:
    """How often to look, in seconds."""

    #: at generations, joins and stop requests while something happens; later more rarely, down to once in twice `beats_s`
    members_s: float = 0.2
    #: at heartbeats
    beats_s: float = 1.0
    #: a longer time without a look counts as nobody's silence (`Ledger.observe`)
    blind_s: float = 3.0
    #: so many times as often a node that joins looks at heartbeats
    eager: float = 10.0
    #: so many members of a generation read all heartbeats, each of the others that of one of these (`left_to_others`)
    watchers: int = 4
    #: whether this node shows a pulse, and believes the others' (`HeartbeatReader`)
    pulses: bool = True
    #: a request to stop that could not be read for so long counts as one to stop at the next safe point
    unreadable_s: float = 15.0
    #: for so long a node that cannot write its own heartbeats counts nobody's silence
    outage_s: float = OUTAGE_S

    def unheard(self, since: float | None, now: float) -> bool:
        """Whether nobody's silence counts, since this node has tried to write a heartbeat from `since` on (None: it is written)."""
        return since is not None and self.blind_s <= now - since < self.outage_s


def eagerness(num_nodes: int) -> float:
    """For `Paces.eager`. While they start, all nodes read all heartbeats: the more nodes, the less often each may do it."""
    return min(10.0, max(1.0, 80.0 / num_nodes))


def crowding(num_nodes: int) -> float:
    """How many times as rarely each node of a large run looks: all of them together have one metadata server."""
    return max(1.0, num_nodes / 32)


def make_paces(settings: Settings) -> Paces:
    """How often to look for each kind of news. Nodes of a large run look less often, to spare the metadata server."""
    coordination = settings.coordination
    crowd = crowding(settings.num_nodes)
    eager = eagerness(settings.num_nodes)
    return Paces(
        members_s=0.1 * crowd,
        # The heartbeats of this node stop when its loop has not looked for half of `suspect_s`.
        beats_s=min(coordination.beat_s, coordination.suspect_s / 3),
        blind_s=1.5 * coordination.beat_s,
        eager=eager,
        unreadable_s=coordination.dead_s,
        outage_s=coordination.outage_s,
    )
