"""Removes old facts, so that a run's directory does not grow with its iterations.

A node that has passed a row of iteration 8 knows that all members have reached iteration 8, so none of them reads a member's fact of
iteration 7 again: each node removes its own. The leader's facts stay as long as their generation, which ends after `Rules.longest`
iterations: a starting node with stale listings may try to seal a row that was passed long ago, and must find the name taken
(resume.py). The leader removes the folders of older generations: once a newer generation exists, records that are created there
have no effect.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fsbarrier.protocol.facts import Generation, Position
from fsbarrier.protocol.state import Rules
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
