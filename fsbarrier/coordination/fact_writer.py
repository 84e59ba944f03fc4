"""How a node publishes its fact about a row, and refreshes its listing of the row while it waits for the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fsbarrier.coordination.observer import Observer
from fsbarrier.protocol.codec import decode, encode
from fsbarrier.protocol.facts import Fact
from fsbarrier.protocol.state import Node, RowPart, Rules
from fsbarrier.rundir.names import fact_name
from fsbarrier.rundir.record_store import Store

#: A listing is refreshed after so many seconds, then whenever the wait is an eighth longer, at least so often: a row that is done is
#: seen late by an eighth of its wait at most, where listings are late.
REFRESH_S, LONGEST_S, LATE = 0.5, 30.0, 1 / 8
#: a wait from which on the journal tells when this node's work was done
LONG_S = 5.0


@dataclass
class FactWriter:
    """Writes this node's facts.

    Some clients cache a directory listing until the directory's modification time changes, and that time may be coarse. Example: node 0
    lists the row, and within the same second node 1's "done" appears. Node 0's client sees the same time and shows the old listing.
    So a node that waits makes and removes a folder in the row's, which changes the time. On mounts that refresh a listing only when their
    own host changes the folder, this shows the node what the others have published.
    """

    store: Store
    observer: Observer
    rules: Rules
    #: the fact that was published last
    _fact: Fact | None = None
    _published_at: float = 0.0
    #: the row and the part of it in which this node waits, and since when
    _waits_in: tuple[object, ...] = ()
    _since: float = 0.0
    _refresh_at: float = 0.0
    _was_long: bool = False

    def publish(self, node: Node, fact: Fact, now: float) -> None:
        """Write this node's fact about the row that it is in. Raises OSError."""
        self._write(node, fact)
        self._fact, self._published_at, self._was_long = fact, now, False

    def refresh(self, node: Node, now: float, on_long_wait: Callable[[Fact], None]) -> None:
        """Refresh this node's listing of the row if the others are still awaited and that is due. Once after `LONG_S`, call
        `on_long_wait`. Raises OSError."""
        if node.part not in (RowPart.GATHER, RowPart.ANNOUNCED):
            return
        generation, position = node.place
        if (here := (generation.number, position, node.part)) != self._waits_in:
            self._waits_in, self._since, self._refresh_at = here, now, now + REFRESH_S
        if now < self._refresh_at:
            return
        passing = self.observer.row_dir(generation.number, position) / f".node-{node.rank:04d}"
        self.store.make_dir(passing)
        self.store.remove_dir(passing)
        self._refresh_at = now + min(max(REFRESH_S, LATE * (now - self._since)), LONGEST_S)
        told = self._fact if node.part is RowPart.ANNOUNCED else None
        if told is not None and not self._was_long and now - self._published_at >= LONG_S:
            self._was_long = True
            on_long_wait(told)

    def _write(self, node: Node, fact: Fact) -> None:
        """The leader's fact is created and never replaced: a seal may lie under its name, and must stay.

        What others read of a fact is flushed before the fact has its name. Example: after a loss of power only the name is left. All
        members count as done, and the leader cannot read what its own work needs.
        """
        generation, position = node.place
        row = self.rules.row(position, generation)
        name = fact_name(position.iteration, node.rank, fact.status)
        path = self.observer.row_dir(generation.number, position) / name
        leads = generation.leader == node.rank
        if leads and not row.transient:
            if self.store.create(path, fact):
                # The others read it as JSON, where a tuple is a list.
                self.observer.row.created = path, decode(encode(fact), Fact)
        elif row.needs_only_a_name(fact):
            self.store.mark(path, fact)
        else:
            # A group's caller goes on without a member that lost power, so a transient row needs no flush.
            self.store.put(path, fact, durable=not row.transient)
