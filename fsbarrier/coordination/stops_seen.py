"""The operators' requests to stop a run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from fsbarrier.protocol.facts import Join, Member, StopRequest
from fsbarrier.protocol.state import Node
from fsbarrier.rundir.names import STOP_REQUEST
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.record_store import Store


@dataclass
class StopsSeen:
    """The requests in stops/ that this node has seen.

    A request to stop that cannot be read still says that somebody asked. After `patience_s` it counts as one to stop at the next
    safe point, for everybody who is there. One that was unreadable before this node joined was made for an earlier session.
    """

    store: Store
    paths: RunPaths
    patience_s: float
    _requests: dict[str, StopRequest] = field(default_factory=dict)
    #: since when a request cannot be read; None: since before this node joined
    _unreadable_since: dict[str, float | None] = field(default_factory=dict)

    def look(self, now: float | None, joins: Iterable[Join]) -> None:
        """Take note of new requests. `now`: None before this node has joined. Raises OSError."""
        for name in self.store.names(self.paths.stops):
            if name not in self._requests and STOP_REQUEST.parse(name) is not None:
                self._look_at(name, now, joins)

    def _look_at(self, name: str, now: float | None, joins: Iterable[Join]) -> None:
        path = self.paths.stops / name
        request = self.store.read(path, StopRequest)
        since = None if request is not None else self._unreadable_since.setdefault(name, now)
        if now is not None and since is not None and now - since >= self.patience_s:
            why = self.store.fault(path, StopRequest).why
            starts = tuple(Member(join.rank, join.incarnation, join.host) for join in joins)
            request = StopRequest(now=False, who=f"somebody ({path} cannot be read: {why})", starts=starts)
        if request is not None:
            self._requests[name] = request

    def newest(self, node: Node) -> StopRequest | None:
        """The last request that concerns this process."""
        found = [name for name, stop in self._requests.items() if stop.concerns(node.rank, node.started_as)]
        return self._requests[max(found)] if found else None
