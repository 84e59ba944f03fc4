"""Removes old facts, so that a run's directory does not grow with its iterations.

A node that has passed a row of iteration 8 knows that all members have reached iteration 8, so none of them reads a member's fact of
iteration 7 again: each node removes its own. The leader's facts stay as long as their generation, which ends after `Rules.longest`
iterations: a starting node with stale listings may try to seal a row that was passed long ago, and must find the name taken
(resume.py). The leader removes the folders of older generations: once a newer generation exists, records that are created there
have no effect.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fsbarrier.coordination.observer import Observer
from fsbarrier.protocol.facts import Generation, Position
from fsbarrier.protocol.state import Entered, Rules
from fsbarrier.rundir.names import FACT, GENERATION_FOLDER, NODES_FACTS
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.record_store import Store

#: how many files of older generations are removed after each row; removing thousands at once would hold up the loop
AT_ONCE = 32
#: This generation and the one before, in which a group's caller may still read.
KEPT_GENERATIONS = 2


@dataclass
class FactRemoval:
    """What one node removes in its generation."""

    store: Store
    paths: RunPaths
    rules: Rules
    _generation: int = 0
    #: each step removes a file of an older generation
    _sweep: Iterator[None] = field(default_factory=lambda: iter(()))

    def begin(self, generation: Generation) -> None:
        """This node enters a generation."""
        if generation.number != self._generation:
            self._generation = generation.number
            self._sweep = self._remove_generations_before(generation.number + 1 - KEPT_GENERATIONS)

    def remove_old(self, rank: int, generation: Generation, passed: Position, names: Sequence[str]) -> None:
        """Node `rank` has passed a row: remove what is not needed any more. `names`: the last listing of the row. Raises OSError."""
        leads, row = generation.leader == rank, self.rules.table.rows[passed.phase]
        if row.transient or not leads:
            self._remove_own(rank, self.paths.phase(generation.number, row.index, row.name), passed, names)
        if leads and passed.iteration > generation.start.iteration:
            for _ in range(AT_ONCE):
                next(self._sweep, None)

    def _remove_own(self, rank: int, folder: Path, passed: Position, names: Sequence[str]) -> None:
        own = NODES_FACTS.build(rank)
        # Parsing is slow, and of a thousand nodes' facts only one is this node's.
        for name in (name for name in names if own in name):
            fact = FACT.parse(name)
            if fact is not None and fact.rank == rank and fact.iteration < passed.iteration:
                self.store.remove(folder / name)

    def _remove_generations_before(self, number: int) -> Iterator[None]:
        for older in sorted(GENERATION_FOLDER.parse_all(self.store.names(self.paths.coordination))):
            if older >= number:
                break
            root = self.paths.facts_of(older)
            for folder in [root / name for name in self.store.names(root)]:
                for name in self.store.names(folder):
                    self.store.remove(folder / name)
                    yield
                self.store.remove_dir(folder)
                yield
            self.store.remove_dir(root)


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
