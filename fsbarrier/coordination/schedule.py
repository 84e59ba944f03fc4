"""When a node looks for which kind of news."""

from __future__ import annotations

from dataclasses import dataclass

from fsbarrier.coordination.paces import Paces
from fsbarrier.protocol.state import Node, Stage

AT_ONCE = float("-inf")
#: Generations, joins and requests to stop may be seen this much late, as a part of the time in which nothing happened.
LATENESS = 0.02
#: how many times as often heartbeats are read while a member is suspected, or a new generation is due
ALERT = 4.0


@dataclass
class Schedule:
    """Generations, joins and requests are looked for more and more rarely while nothing happens, down to one look in two heartbeats.

    Heartbeats are read at a steady pace. A node that joins looks more often at everything, since the others wait for it; a node in
    trouble reads heartbeats more often, since the answer depends on them.
    """

    paces: Paces
    #: a member is suspected
    suspecting: bool = False
    records_due: float = AT_ONCE
    beats_due: float = AT_ONCE
    #: the node as it was at the last look, and since when it is so
    _node: Node | None = None
    _unchanged_since: float = AT_ONCE

    def hurry(self) -> None:
        """Make everything due at the next look."""
        self.records_due = self.beats_due = AT_ONCE

    def follow(self, node: Node, now: float) -> bool:
        """Take in the node as it is now; True if it has changed. Its stage changes the pace, so the loop then calls `hurry`."""
        changed = node is not self._node
        if changed:
            self._node, self._unchanged_since = node, now
        if self._in_trouble(node):
            self.beats_due = min(self.beats_due, now + self.paces.beats_s / ALERT)
        return changed

    def records_seen(self, node: Node, now: float) -> None:
        """The node has just looked at generations, joins and requests."""
        joining = node.stage is Stage.JOINING
        quiet_s = 0.0 if joining or self._in_trouble(node) else now - self._unchanged_since
        pause_s = max(self.paces.members_s, min(LATENESS * quiet_s, 2 * self.paces.beats_s))
        self.records_due = now + pause_s / (4 if joining else 1)

    def beats_seen(self, node: Node, now: float) -> None:
        """The node has just read heartbeats."""
        hurried = (
            self.paces.eager if node.stage is Stage.JOINING else ALERT if self._in_trouble(node) else 1.0
        )
        self.beats_due = now + self.paces.beats_s / hurried

    def _in_trouble(self, node: Node) -> bool:
        return self.suspecting or node.failed_since is not None or node.trouble_since is not None
