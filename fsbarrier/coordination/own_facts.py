"""A node's writes in the folders of its rows: it makes the folders, publishes its facts, refreshes its listing, and removes old files.

**Refreshing.** Some clients cache a directory listing until the directory's modification time changes, and that time may be coarse.
Example: node 0 lists the row, and within the same second node 1's "done" appears. Node 0's client sees the same time and shows the old
listing. So a node that waits makes and removes a folder in the row's, which changes the time. On mounts that refresh a listing only when
their own host changes the folder, this shows the node what the others have published.

**Removing.** A node that has passed a row of iteration 8 knows that all members have reached iteration 8, so none of them reads a
member's fact of iteration 7 again: each node removes its own. The leader's facts stay as long as their generation, which ends after
`Rules.longest` iterations: a starting node with stale listings may try to seal a row that was passed long ago, and must find the name
taken (resume.py). The leader removes the folders of older generations: once a newer generation exists, records that are created there
have no effect.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from fsbarrier.coordination.row_watch import RowWatch
from fsbarrier.protocol.facts import Fact, Generation, Position
from fsbarrier.protocol.state import Entered, Node, RowPart, Rules
from fsbarrier.rundir.names import GENERATION_FOLDER, fact_name
from fsbarrier.rundir.record_store import Store

#: A listing is refreshed after REFRESH_S, then each time the wait has grown by an eighth, and at least every LONGEST_S. So on a mount
#: with late listings a finished row is seen late by at most an eighth of its wait.
REFRESH_S, LONGEST_S, LATE = 0.5, 30.0, 1 / 8
#: how many files of older generations are removed after each row; removing thousands at once would hold up the loop
AT_ONCE = 32
#: Kept are this generation and the one before, which a member that entered this one late may still read.
KEPT_GENERATIONS = 2


def refresh_listing(store: Store, directory: Path, rank: int) -> None:
    """Make the next listing of a directory a fresh one. Raises OSError."""
    passing = directory / f".node-{rank:04d}"
    store.make_dir(passing)
    store.remove_dir(passing)


@dataclass
class OwnFacts:
    """Writes and removes one node's facts, and makes the folders for them."""

    store: Store
    watch: RowWatch
    rules: Rules
    #: the row that this node is in
    _generation: int = 0
    _row: Position | None = None
    #: the indices of the rows of this generation whose folder was made
    _made: set[int] = field(default_factory=set)
    #: the rows that were passed since the last `clean_up`, and those passed before it, whose old facts the next one removes
    _passed: list[tuple[Generation, Position]] = field(default_factory=list)
    _passed_before: list[tuple[Generation, Position]] = field(default_factory=list)
    #: removes one file of an older generation at each step
    _sweep: Iterator[None] = field(default_factory=lambda: iter(()))
    #: the row and the part of it in which this node waits, and since when
    _waits_in: tuple[object, ...] = ()
    _since: float = 0.0
    _refresh_at: float = 0.0

    def enter(self, row: Entered) -> None:
        """Make the folder of a row. Raises OSError. Entering the same row again after an error changes nothing."""
        generation, position = row.generation, row.position
        if generation.number != self._generation:
            self._generation, self._row = generation.number, None
            self._made.clear()
            self._sweep = self._remove_generations_before(generation.number + 1 - KEPT_GENERATIONS)
        if position.phase not in self._made:
            self.store.make_dir(self.watch.row_dir(generation.number, position))
            self._made.add(position.phase)
        if self._row is not None and self._row != position:
            self._passed.append((generation, self._row))
        self._row = position

    def publish(self, node: Node, fact: Fact) -> None:
        """Write this node's fact about the row that it is in. Raises OSError.

        The leader's fact is created and never replaced, since a seal may have its name and must stay. If others read a fact's content,
        the content is flushed before the fact gets its name. Otherwise a power failure could leave only the name: all members would
        count as done, and the leader could not read what its own work needs.
        """
        generation, position = node.place
        row, table = self.rules.row(position, generation), self.rules.table
        path = self.watch.row_dir(generation.number, position) / fact_name(
            position.iteration, node.rank, fact.status
        )
        if generation.leader == node.rank and not table.transient:
            if self.store.create(path, fact):
                self.watch.created = path, fact
        elif table.needs_only_a_name(row, fact):
            self.store.mark(path, fact)
        else:
            self.store.put(path, fact, durable=not table.transient)

    def refresh(self, node: Node, now: float) -> None:
        """Refresh this node's listing of the row if it waits for the others and a refresh is due. Raises OSError."""
        if node.generation is None or node.part not in (RowPart.GATHER, RowPart.ANNOUNCED):
            return
        generation, position = node.place
        if (here := (generation.number, position, node.part)) != self._waits_in:
            self._waits_in, self._since, self._refresh_at = here, now, now + REFRESH_S
        if now < self._refresh_at:
            return
        refresh_listing(self.store, self.watch.row_dir(generation.number, position), node.rank)
        self._refresh_at = now + min(max(REFRESH_S, LATE * (now - self._since)), LONGEST_S)

    def clean_up(self, rank: int) -> None:
        """Remove facts that nobody needs any more. The tick that passes a row removes nothing, since other members wait for this node then.

        Files that cannot be removed now are removed with their generation.
        """
        for generation, passed in self._passed_before:
            with contextlib.suppress(OSError):
                self._remove_after(rank, generation, passed)
        self._passed_before, self._passed = self._passed, []

    def _remove_after(self, rank: int, generation: Generation, passed: Position) -> None:
        leads, before = generation.leader == rank, Position(passed.iteration - 1, passed.phase)
        if before >= generation.start and (not leads or self.rules.table.transient):
            folder = self.watch.row_dir(generation.number, passed)
            self.store.remove(folder / fact_name(before.iteration, rank))
        if leads and passed.iteration > generation.start.iteration:
            for _ in range(AT_ONCE):
                next(self._sweep, None)

    def _remove_generations_before(self, number: int) -> Iterator[None]:
        store, paths = self.store, self.watch.paths
        for older in sorted(GENERATION_FOLDER.parse_all(store.names(paths.coordination))):
            if older >= number:
                break
            root = paths.facts_of(older)
            for folder in [root / name for name in store.names(root)]:
                for name in store.names(folder):
                    store.remove(folder / name)
                    yield
                store.remove_dir(folder)
                yield
            store.remove_dir(root)
