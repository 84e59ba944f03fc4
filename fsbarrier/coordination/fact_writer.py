"""How a node publishes its fact about a row, and publishes it again while it waits for the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fsbarrier.coordination.observer import Observer
from fsbarrier.protocol.codec import decode, encode
from fsbarrier.protocol.facts import Fact
from fsbarrier.protocol.state import Node, RowPart, Rules
from fsbarrier.rundir.names import fact_name
from fsbarrier.rundir.record_store import Store

#: the pause before a fact is written again; each further pause is twice as long
REPEAT_S = 0.5
#: a wait from which on the journal tells when this node's work was done
LONG_S = 5.0


@dataclass
class FactWriter:
    """Writes this node's facts.

    Some clients cache a directory listing until the directory's modification time changes, and that time may be coarse. Example: node 0
    lists the row, and within the same second node 1's "done" appears. Node 0's client sees the same time and shows the old listing.
    So a node that waits writes its fact again, which changes the time. On mounts that refresh a listing only when their own host changes
    the folder, this shows the node what the others have published.
    """

    store: Store
    observer: Observer
    rules: Rules
    #: the fact that was published last
    _fact: Fact | None = None
    _published_at: float = 0.0
    _repeat_at: float = float("inf")
    _pause_s: float = REPEAT_S
    _was_long: bool = False

    def publish(self, node: Node, fact: Fact, now: float) -> None:
        """Write this node's fact about the row that it is in. Raises OSError."""
        self._write(node, fact)
        self._fact, self._published_at, self._was_long = fact, now, False
        self._pause_s, self._repeat_at = REPEAT_S, now + REPEAT_S

    def repeat(self, node: Node, now: float, on_long_wait: Callable[[Fact], None]) -> None:
        """Write the fact again if the others are still awaited and that is due. Once after `LONG_S`, call `on_long_wait`. Raises
        OSError."""
        if now < self._repeat_at or self._fact is None or node.part is not RowPart.ANNOUNCED:
            return
        self._write(node, self._fact, again=True)
        if not self._was_long and now - self._published_at >= LONG_S:
            self._was_long = True
            on_long_wait(self._fact)
        self._pause_s *= 2
        self._repeat_at = now + self._pause_s

    def _write(self, node: Node, fact: Fact, *, again: bool = False) -> None:
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
        elif not again and row.needs_only_a_name(fact):
            self.store.mark(path, fact)
        else:
            # A group's caller goes on without a member that lost power, so a transient row needs no flush.
            self.store.put(path, fact, durable=not row.transient)
