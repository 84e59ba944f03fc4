"""Removes old facts, so that a run's directory does not grow with its iterations.

What may go. A node that has passed a row of iteration 8 knows that all members have reached iteration 8, so none of them reads iteration
7 again. A node that starts now does not either: the leader's first fact of iteration 8 has a snapshot of all decisions. So each node,
when it has passed a row, removes its own fact about that row in the iteration before.

Why each iteration has an `open-` folder. A starting node with stale listings may try to seal row 5 of iteration 3 while the others are
in iteration 8. While the leader's fact about that row exists, the seal cannot be created (node/resume.py). But the fact has been
removed, so the create succeeds although the leader had published. Therefore the leader makes open-000003 before anybody can reach
iteration 3, and removes it before it removes its first fact of iteration 3. After sealing, a node asks the server for that folder. If it
exists, the leader has removed nothing, and the seal holds. If not, the others went on long ago.

The leader keeps its facts about the first iteration of a generation, so that iteration needs no such folder. The leader also removes the
folders of older generations: once a newer generation exists, records that are created there have no effect.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from fsbarrier.protocol.facts import Generation, Position
from fsbarrier.protocol.state import Rules
from fsbarrier.rundir.names import CALL_FACT, FACT, GENERATION_FOLDER, NODES_FACTS
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
    #: the iterations whose `open-` folder this node has made and not yet removed
    _open: set[int] = field(default_factory=set)
    #: each step removes a file of an older generation
    _sweep: Iterator[None] = field(default_factory=lambda: iter(()))

    def begin(self, generation: Generation) -> None:
        """This node enters a generation."""
        if generation.number != self._generation:
            self._generation, self._open = generation.number, set()
            self._sweep = self._remove_generations_before(generation.number + 1 - KEPT_GENERATIONS)

    def open(self, generation: Generation, iteration: int) -> None:
        """The leader is about to let the members enter this iteration. Raises OSError."""
        if iteration not in self._open and self._lasting(generation) is not None:
            self.store.make_dir(self.paths.open(generation.number, iteration), durable=True)
            self._open.add(iteration)

    def remove_old(self, rank: int, generation: Generation, passed: Position, names: Sequence[str]) -> None:
        """Node `rank` has passed a row: remove what is not needed any more. `names`: the last listing of the row. Raises OSError."""
        leads = generation.leader == rank
        lasting = self._lasting(generation)
        if leads and lasting is not None and passed.phase >= lasting:
            self._close_before(generation, passed.iteration)
        kept = {generation.start.iteration, *self._open} if leads and lasting is not None else set()
        folder = self.paths.phase(generation.number, passed.phase, self.rules.row_name(passed))
        own = NODES_FACTS.build(rank)
        # Parsing is slow, and of a thousand nodes' facts only one is this node's.
        for name in (name for name in names if own in name):
            fact = FACT.parse(name) or CALL_FACT.parse(name)
            if fact is None or fact.rank != rank or fact.iteration >= passed.iteration:
                continue
            if fact.iteration not in kept:
                self.store.remove(folder / name)
        if leads and passed.iteration > generation.start.iteration:
            for _ in range(AT_ONCE):
                next(self._sweep, None)

    def _lasting(self, generation: Generation) -> int | None:
        return self.rules.table.first_lasting(self.rules.span(generation.choices))

    def _close_before(self, generation: Generation, iteration: int) -> None:
        for closed in sorted(self._open):
            if closed < iteration:
                self.store.remove_dir(self.paths.open(generation.number, closed))
                self._open.discard(closed)

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
