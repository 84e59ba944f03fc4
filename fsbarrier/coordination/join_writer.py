"""How a node joins: it creates a join record under the name of an incarnation that nobody has had."""

from __future__ import annotations

from dataclasses import dataclass

from fsbarrier.protocol.codec import decode, encode
from fsbarrier.protocol.facts import Join
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.record_store import Store


@dataclass
class JoinWriter:
    """Creates this process's join records.

    A create may be ambiguous. Example: the server creates the record, its answer is lost, and the client reports EIO. The next try
    finds the name taken. It reads the record and compares it with its own; otherwise the node would believe that another process
    has its rank, and end.
    """

    store: Store
    paths: RunPaths
    #: The incarnation that heartbeats may name: the last one whose record surely is this process's. While this node tries to join
    #: as the next one, another process of its rank may take that number.
    announced: int = 0
    #: the incarnation whose create ended in an error
    _ambiguous: int = 0

    def create(self, join: Join) -> bool:
        """Join as `join.incarnation`; False where another process has that. Raises OSError."""
        path = self.paths.join(join.rank, join.incarnation)
        try:
            mine = self.store.create(path, join)
        except OSError:
            self._ambiguous = join.incarnation
            raise
        if not mine and self._ambiguous == join.incarnation:
            # As others read it: a tuple in it is a list there.
            mine = self.store.read(path, Join) == decode(encode(join), Join)
        if mine:
            self.announced = join.incarnation
        return mine
