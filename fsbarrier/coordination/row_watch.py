"""Reads the facts about the row that a node is in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fsbarrier.protocol.facts import Fact, Generation, Payload, Position
from fsbarrier.protocol.rows import Table
from fsbarrier.protocol.state import Node, RowPart
from fsbarrier.rundir.names import FACT, fact_name
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.record_store import Store


@dataclass
class RowListing:
    """The last listing of a row's directory. `names` is None before the first one.

    `done`: file name of each member's "done" fact -> the member's rank.
    """

    generation: int
    position: Position
    directory: Path
    done: Mapping[str, int]
    names: list[str] | None = None
    arrived: frozenset[int] = frozenset()
    failed: Mapping[int, Fact] = field(default_factory=dict)
    #: the leader's fact, once all members are done; in a row with makers (`Row.made_by`), once it is there
    leaders_fact: Fact | None = None

    @classmethod
    def of(cls, generation: Generation, position: Position, directory: Path) -> RowListing:
        """The state before the first listing."""
        done = {fact_name(position.iteration, rank): rank for rank in generation.ranks}
        return cls(generation.number, position, directory, done)


#: the listing of a node that looks at no row
NO_ROW = RowListing(0, Position(0, 0), Path(), {})


@dataclass
class RowWatch:
    """Looks at a node's row: which members are done, which have failed, and once all are done, what the leader's fact says."""

    store: Store
    paths: RunPaths
    table: Table[object]
    #: the row that this node looked at last
    listing: RowListing = field(default_factory=lambda: NO_ROW)
    #: the path and the content of the fact that this node, as a leader, created last
    created: tuple[Path, Fact] | None = None
    #: generations whose last row was passed, according to a member's last heartbeat
    finished: set[int] = field(default_factory=set)
    #: whether a look has shown something that the last view does not have
    news: bool = False

    def read(self, node: Node) -> None:
        """List the folder of the node's row, and read failures and the leader's fact in it. Raises OSError."""
        generation, position = node.place
        row = self.listing
        if (row.generation, row.position) != (generation.number, position):
            row = self.listing = RowListing.of(
                generation, position, self.row_dir(generation.number, position)
            )
        names = self.store.names(row.directory)
        if names != row.names:
            self.news = True
            row.arrived = frozenset([row.done[name] for name in names if name in row.done])
            failures = [name for name in names if name.endswith(".failed")]
            self._read_failures(generation, row, failures)
            row.names = names
        if generation.number in self.finished and len(row.arrived) < len(generation.members):
            # A member has passed this row, which is the last one. So all facts exist, even if a stale listing does not show them yet.
            self.news = True
            row.arrived = frozenset(generation.ranks)
        passed = node.part is RowPart.ANNOUNCED and len(row.arrived) == len(generation.members)
        self.news = self.news or passed
        # In a row with makers, a node must know at once whether the name is that of a seal (Situation.unfinished).
        if not passed and not (self.table.rows[position.phase].made_by and generation.leader in row.arrived):
            row.leaders_fact = None
        elif row.leaders_fact is None:
            leader, path = generation.leader, row.directory / fact_name(position.iteration, generation.leader)
            # A fact that cannot be sealed is not read, nor is it read if this node has created it itself.
            if self.table.transient:
                row.leaders_fact = Fact(leader, generation.incarnation_of(leader) or 0, "done")
            elif self.created is not None and self.created[0] == path:
                row.leaders_fact = self.created[1]
            else:
                row.leaders_fact = self.store.must_read(path, Fact)

    def _read_failures(self, generation: Generation, row: RowListing, names: list[str]) -> None:
        """Read the "failed" facts called `names` in a row. Raises OSError while one of them cannot be read."""
        failed = dict(row.failed)
        for rank in (fact.rank for fact in FACT.parse_all(names) if fact.iteration == row.position.iteration):
            if rank in generation.ranks and rank not in failed:
                path = row.directory / fact_name(row.position.iteration, rank, "failed")
                failed[rank] = self.store.must_read(path, Fact)
        row.failed = failed

    def row_dir(self, generation: int, position: Position) -> Path:
        """The folder of the facts about one row."""
        row = self.table.rows[position.phase]
        return self.paths.phase(generation, row.index, row.name)

    def reports(self, node: Node, phase_name: str) -> Mapping[int, Payload]:
        """Each member's result of a row of this iteration that `node` has passed, or in which it leads.

        Raises OSError, also for a fact that cannot be read.
        """
        generation, position = node.place
        reported = Position(position.iteration, self.table.index(phase_name))
        # The leader publishes its own result only after the leader's work, which asks for it here.
        own = {node.rank: node.result} if reported == position else {}
        directory = self.row_dir(generation.number, reported)
        others = [rank for rank in generation.ranks if rank not in own]
        return own | {
            rank: self.store.must_read(directory / fact_name(reported.iteration, rank), Fact).value
            for rank in others
        }
