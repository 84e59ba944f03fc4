"""How often, and when, a node looks at the shared directory for each kind of news."""

from __future__ import annotations

import random
from dataclasses import dataclass

from fsbarrier.protocol.membership import DEAD_S, OUTAGE_S
from fsbarrier.protocol.state import Node, Stage

DICE = random.Random()
AT_ONCE = float("-inf")
#: how late generations, joins and stop requests may be seen, as a fraction of the time in which nothing happened
LATENESS = 0.02
#: how many times as often heartbeats are read while a member is suspected, or a new generation is due
ALERT = 4.0


@dataclass(frozen=True, slots=True)
class PollIntervals:
    """Pauses between two looks, in seconds, and how long a node tolerates failures."""

    #: for generations, joins and stop requests while something happens; up to three times `beats_s` in a long wait
    members_s: float = 0.2
    #: for heartbeats
    beats_s: float = 1.0
    #: how much of a gap between two of this node's own heartbeats counts at most as silence of others (`Ledger.observe`)
    poll_gap_s: float = 3.0
    #: a member that is silent for this long is declared dead, after the node has looked for it once more
    dead_s: float = DEAD_S
    #: a joining node looks at heartbeats this many times as often
    join_factor: float = 10.0
    #: how long a node retries while the shared directory fails
    outage_s: float = OUTAGE_S


def next_beat_s(beat_s: float, dice: random.Random = DICE) -> float:
    """The pause before the next heartbeat. It varies, so that looks and heartbeats do not keep step: a listing that is made while names
    change may miss one of them, and should not miss the same one each time."""
    return beat_s * dice.uniform(0.9, 1.0)


def join_factor(num_nodes: int) -> float:
    """`PollIntervals.join_factor` for a run of this size: all starting nodes list all heartbeats, so in a large run each looks less
    often."""
    return min(10.0, max(1.0, 80.0 / num_nodes))


def size_factor(num_nodes: int) -> float:
    """The factor by which each node of a large run looks less often, to spare the one metadata server."""
    return max(1.0, num_nodes / 32)


@dataclass
class Schedule:
    """Generations, joins and requests are looked for more and more rarely while nothing happens, down to one look in about two heartbeats.

    Heartbeats are read at a steady pace. A node that joins looks more often at everything, since the others wait for it; a node in
    trouble reads heartbeats more often, since the answer depends on them.
    """

    intervals: PollIntervals
    records_due: float = AT_ONCE
    beats_due: float = AT_ONCE
    #: the node as it was at the last look, and since when it is so
    _node: Node | None = None
    _unchanged_since: float = AT_ONCE

    def poll_now(self) -> None:
        """Make everything due at the next look."""
        self.records_due = self.beats_due = AT_ONCE

    def follow(self, node: Node, now: float) -> bool:
        """Note the node's present state; True if it has changed. The pace depends on its stage, so the loop then calls `poll_now`."""
        changed = node is not self._node
        if changed:
            self._node, self._unchanged_since = node, now
        if self._in_trouble(node):
            self.beats_due = min(self.beats_due, now + self.intervals.beats_s / ALERT)
        return changed

    def records_seen(self, node: Node, now: float) -> None:
        """Plan the next look at generations, joins and requests, after one at `now`."""
        joining = node.stage is Stage.JOINING
        quiet_s = 0.0 if joining or self._in_trouble(node) else now - self._unchanged_since
        pause_s = max(self.intervals.members_s, min(LATENESS * quiet_s, 3 * self.intervals.beats_s))
        self.records_due = now + pause_s / (4 if joining else 1)

    def beats_seen(self, node: Node, now: float) -> None:
        """Plan the next reading of heartbeats, after one at `now`."""
        often = ALERT if self._in_trouble(node) else 1.0
        if node.stage is Stage.JOINING:
            often = self.intervals.join_factor
        self.beats_due = now + self.intervals.beats_s / often

    def _in_trouble(self, node: Node) -> bool:
        return bool(node.suspected) or node.failed_since is not None or node.trouble_since is not None
