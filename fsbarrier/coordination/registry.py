"""The generations and the starts that a node knows. Their records never change, so each is read once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fsbarrier.coordination.unreadable import ReadFailures, must_read
from fsbarrier.protocol.facts import Generation, Join
from fsbarrier.protocol.rows import Table
from fsbarrier.protocol.state import Unreadable
from fsbarrier.rundir.names import GENERATION, START, StartName
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.record_store import Store


@dataclass
class Registry:
    """Finds generations and joins in listings, and by the names that heartbeats mention before a stale listing shows them.

    `can_hold`: whether the run's settings can have the values that a record asks for. One that they cannot counts as unreadable.
    """

    store: Store
    paths: RunPaths
    table: Table[object]
    failures: ReadFailures
    can_hold: Callable[[Join | Generation], bool]
    newest: Generation | None = None
    #: the newest known start of each rank
    joins: Mapping[int, Join] = field(default_factory=dict)
    #: the generation that is listed after `newest` and cannot be read
    unreadable: Unreadable | None = None
    #: the listings of which everything is read
    _read_generations: list[str] = field(default_factory=list)
    _read_joins: list[str] = field(default_factory=list)
    #: names in joins/ that are read, or that are no joins
    _done_with: set[str] = field(default_factory=set)

    @property
    def newest_known(self) -> int:
        """The number of the newest known generation; 0 before the first."""
        return self.newest.number if self.newest is not None else 0

    def newest_number(self) -> int:
        """The number of the newest generation, freshly listed. Raises OSError."""
        listed = GENERATION.parse_all(self.store.names(self.paths.generations))
        return max([*listed, self.newest_known])

    def look(self, now: float | None) -> None:
        """List both directories and read what is new. `now`: None before this node has joined. Raises OSError."""
        names = self.store.names(self.paths.generations)
        if names != self._read_generations and self._look_at_generations(names, now):
            self._read_generations = names
        names = self.store.names(self.paths.joins)
        if names != self._read_joins:
            for name in names:
                if name in self._done_with:
                    continue
                start = START.parse(name)
                if start is None or self.read_join(start):
                    self._done_with.add(name)
            if self._done_with.issuperset(names):
                self._read_joins = names

    def _look_at_generations(self, names: list[str], now: float | None) -> bool:
        """Learn the newest generation that can be read; True if none is newer."""
        newer = sorted((n for n in GENERATION.parse_all(names) if n > self.newest_known), reverse=True)
        unread = newer[0] if newer and not self.read_generation(newer[0]) else None
        if unread is None:
            self.unreadable = None
            return True
        if now is not None:
            path = self.paths.generation(unread)
            self.unreadable = self.failures.note(path, Generation, now, self.unreadable)
        for number in newer[1:]:
            if self.read_generation(number):
                break
        return False

    def learn(self, generation: Generation | None) -> None:
        """Remember a generation if it is the newest, however its record was found."""
        if generation is not None and generation.number > self.newest_known:
            self.newest = generation

    def learn_join(self, join: Join) -> None:
        """Remember a start."""
        self.joins = {**self.joins, join.rank: join}

    def read_generation(self, number: int) -> bool:
        """Learn a generation from its record; False while it cannot be read."""
        record = self.store.read(self.paths.generation(number), Generation)
        if record is None or record.number != number or record.start.phase >= len(self.table.rows):
            return False
        if not self.can_hold(record):
            return False
        self.learn(record)
        return True

    def read_join(self, start: StartName) -> bool:
        """Learn a start from its record; False while it cannot be read."""
        known = self.joins.get(start.rank)
        if known is not None and known.incarnation >= start.incarnation:
            return True
        join = self.store.read(self.paths.join(start.rank, start.incarnation), Join)
        if join is None or (join.rank, join.incarnation) != (start.rank, start.incarnation):
            return False
        if not self.can_hold(join):
            return False
        self.learn_join(join)
        return True

    def joins_of(self, generation: Generation) -> Mapping[int, Join]:
        """The known joins, and those of all members: the generation's record names them, so their records exist.

        It remembers nothing, because the work's thread calls it. Raises OSError, also for a join that cannot be read.
        """
        found = dict(self.joins)
        for member in generation.members:
            known = found.get(member.rank)
            if known is None or known.incarnation < member.incarnation:
                path = self.paths.join(member.rank, member.incarnation)
                found[member.rank] = must_read(self.store, path, Join)
        return found
