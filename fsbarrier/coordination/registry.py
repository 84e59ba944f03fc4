"""The generations, the starts and the requests to stop that a node knows. Their records never change, so each is read once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fsbarrier.protocol.facts import Generation, Join, StopRequest
from fsbarrier.protocol.rows import Table
from fsbarrier.protocol.state import Node
from fsbarrier.rundir.names import GENERATION, START, STOP_REQUEST, StartName
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.record_store import Store, UnreadableRecord


@dataclass
class Registry:
    """Finds records in listings. Heartbeats name generations and joins before a stale listing shows them; those are opened by name.

    `can_hold`: whether the run's settings can have the values that a record asks for. If not, the record counts as unreadable.
    """

    store: Store
    paths: RunPaths
    table: Table[object]
    can_hold: Callable[[Join | Generation], bool]
    newest: Generation | None = None
    #: the newest known start of each rank
    joins: Mapping[int, Join] = field(default_factory=dict)
    #: the last listing of the starts whose records are all read
    _read_starts: list[str] = field(default_factory=list)
    #: the requests to stop, by their names
    _stops: dict[str, StopRequest] = field(default_factory=dict)

    @property
    def newest_known(self) -> int:
        """The number of the newest known generation; 0 before the first."""
        return self.newest.number if self.newest is not None else 0

    def newest_number(self) -> int:
        """The number of the newest generation, freshly listed. Raises OSError."""
        listed = GENERATION.parse_all(self.store.names(self.paths.generations))
        return max([*listed, self.newest_known])

    def read_new(self) -> None:
        """List the directories and read what is new. Raises OSError, also while the newest generation cannot be read."""
        newest = self.newest_number()
        if newest > self.newest_known and not self.read_generation(newest):
            path = self.paths.generation(newest)
            self.store.must_read(path, Generation)
            raise UnreadableRecord(path, "it does not fit its name, or this run's program")
        starts = self.store.names(self.paths.joins)
        if starts != self._read_starts and all([self.read_join(start) for start in START.parse_all(starts)]):
            self._read_starts = starts
        for name in self.store.names(self.paths.stops):
            if name not in self._stops and STOP_REQUEST.parse(name) is not None:
                request = self.store.read(self.paths.stops / name, StopRequest)
                self._stops |= {name: request} if request is not None else {}

    def stop(self, node: Node) -> StopRequest | None:
        """The last request to stop that concerns this process."""
        concerning = [name for name, stop in self._stops.items() if stop.concerns(node.rank, node.started_as)]
        return self._stops[max(concerning)] if concerning else None

    def learn(self, generation: Generation | None) -> None:
        """Remember a generation if it is the newest, however its record was found."""
        if generation is not None and generation.number > self.newest_known:
            self.newest = generation

    def learn_join(self, join: Join) -> None:
        """Remember a start."""
        self.joins = {**self.joins, join.rank: join}

    def read_generation(self, number: int) -> bool:
        """Read a generation's record and remember it; False while it cannot be read."""
        record = self.store.read(self.paths.generation(number), Generation)
        if record is None or record.number != number or record.start.phase >= len(self.table.rows):
            return False
        if not self.can_hold(record):
            return False
        self.learn(record)
        return True

    def read_join(self, start: StartName) -> bool:
        """Read a start's record and remember it; False while it cannot be read."""
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
        """The known joins and those of all members. The generation's record names the members, so their records exist.

        This remembers nothing, because the work's thread calls it. Raises OSError, also for a join that cannot be read.
        """
        joins = dict(self.joins)
        for member in generation.members:
            known = joins.get(member.rank)
            if known is None or known.incarnation < member.incarnation:
                path = self.paths.join(member.rank, member.incarnation)
                joins[member.rank] = self.store.must_read(path, Join)
        return joins
