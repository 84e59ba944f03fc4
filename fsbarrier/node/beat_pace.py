"""How long a node waits between two of its heartbeats, in the daemon and in members of groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# A heartbeat that is unreadable for longer is not just being replaced.
HIDDEN_S = 1.0


@dataclass
class BeatPace:
    """Some mounts show a write only seconds later. If each heartbeat is replaced before anybody can read it, nobody ever reads one. So
    a node that cannot read the others' heartbeats writes its own less often, since they read through the same kind of mount.
    """

    suspect_s: float
    _hidden_s: float = 0.0

    def pause_s(self, usual_s: float, hidden_since: Mapping[int, float], now: float) -> float:
        """The pause after a heartbeat. `hidden_since`: since when which ranks' heartbeats are listed and unreadable."""
        longest_s = now - min(hidden_since.values(), default=now)
        self._hidden_s = max(self._hidden_s, min(longest_s, self.suspect_s / 2))
        return usual_s if self._hidden_s < HIDDEN_S else max(usual_s, self._hidden_s)
