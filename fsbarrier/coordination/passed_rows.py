"""The rows that a node walks through in a generation: their folders, and the old facts that nobody needs once they are passed."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

from fsbarrier.coordination.fact_removal import FactRemoval
from fsbarrier.coordination.observer import Observer
from fsbarrier.protocol.facts import Generation, Position
from fsbarrier.protocol.state import Entered
from fsbarrier.rundir.record_store import Store


@dataclass
class PassedRows:
    """Makes the folder of each row that the node enters, and cleans up after those that it has passed."""

    store: Store
    observer: Observer
    fact_removal: FactRemoval
    #: the rows of this generation whose folder is there
    _made: set[int] = field(default_factory=set)
    #: the row that this node is in
    _row: Position | None = None
    #: the rows passed since the last `take_passed`, with the names that their folders showed
    _passed: list[tuple[Generation, Position, list[str]]] = field(default_factory=list)

    def enter(self, row: Entered) -> None:
        """Raises OSError. Entering the same row again after an error changes nothing."""
        if row.begins:
            self._made.clear()
            self._row = None
            self.fact_removal.begin(row.generation)
        if row.position.phase not in self._made:
            self.store.make_dir(self.observer.row_dir(row.generation.number, row.position))
            self._made.add(row.position.phase)
        if self._row != row.position:
            if self._row is not None and not row.begins:
                names = self.observer.row.names_in(row.generation, self._row)
                self._passed.append((row.generation, self._row, names))
            self._row = row.position

    def take_passed(self) -> list[tuple[Generation, Position, list[str]]]:
        """What `remove_old_facts` is to clean up."""
        passed, self._passed = self._passed, []
        return passed

    def remove_old_facts(self, rank: int, passed: list[tuple[Generation, Position, list[str]]]) -> None:
        """Remove the facts that nobody needs any more, and empty `passed`. What is not removed now is removed an iteration later."""
        for generation, position, names in passed:
            with contextlib.suppress(OSError):
                self.fact_removal.remove_old(rank, generation, position, names)
        passed.clear()
