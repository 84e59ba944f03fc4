"""How often a node looks at the shared directory for each kind of news."""

from __future__ import annotations

from dataclasses import dataclass

from fsbarrier.protocol.timing import OUTAGE_S
from fsbarrier.settings.sections import Settings


@dataclass(frozen=True, slots=True)
class Paces:
    """Pauses between two looks, in seconds, how looks are shared, and how long a node puts up with failures."""

    #: for generations, joins and stop requests while something happens; up to twice `beats_s` in a long wait
    members_s: float = 0.2
    #: for heartbeats
    beats_s: float = 1.0
    #: a longer gap between two looks does not count as silence (`Ledger.observe`)
    blind_s: float = 3.0
    #: a joining node looks at heartbeats this many times as often
    eager: float = 10.0
    #: how many members read all heartbeats; the others read that of one watcher (`left_to_others`)
    watchers: int = 4
    #: this node shows a pulse, and trusts the others' (`HeartbeatReader`)
    pulses: bool = True
    #: a request to stop that is unreadable for this long counts as a request to stop at the next safe point
    unreadable_s: float = 15.0
    #: how long a node retries while the shared directory fails; if it cannot write its heartbeats, it ignores the others' silence as long
    outage_s: float = OUTAGE_S

    def unheard(self, since: float | None, now: float) -> bool:
        """Whether the others' silence is ignored, because this node has been trying to write a heartbeat since `since` (None: it has
        written it)."""
        return since is not None and self.blind_s <= now - since < self.outage_s


def eagerness(num_nodes: int) -> float:
    """`Paces.eager` for a run of this size. All starting nodes read all heartbeats, so in a large run each must read less often."""
    return min(10.0, max(1.0, 80.0 / num_nodes))


def crowding(num_nodes: int) -> float:
    """The factor by which each node of a large run looks less often, to spare the one metadata server."""
    return max(1.0, num_nodes / 32)


def make_paces(settings: Settings) -> Paces:
    """The pauses that follow from the run's settings."""
    coordination = settings.coordination
    crowd = crowding(settings.num_nodes)
    eager = eagerness(settings.num_nodes)
    return Paces(
        members_s=0.1 * crowd,
        # Well below half of `suspect_s`, after which a node stops its own heartbeats because its loop seems to hang.
        beats_s=min(coordination.beat_s, coordination.suspect_s / 3),
        blind_s=1.5 * coordination.beat_s,
        eager=eager,
        unreadable_s=coordination.dead_s,
        outage_s=coordination.outage_s,
    )
