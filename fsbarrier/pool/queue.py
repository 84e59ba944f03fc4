"""What follows from a pool's log: the state of its jobs, and the next decision. Pure.

The log is a sequence of records, each of which was created exclusively with the next number. Whoever has read the first n of them knows
the same as everybody else who has, so all nodes agree on every placement and every end of a job, even if two of them schedule at once or
one dies in between.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct

from fsbarrier.errors import EXIT_SIGTERM, UsageError

# The exit code of a job that was stopped while still queued.
STOPPED = EXIT_SIGTERM
# The exit code of a start that was refused.
REFUSED = UsageError.exit_code

# Arguments are passed to a process as zero-terminated text.
Word = Annotated[str, Meta(pattern=r"^[^\0]*$")]
Positive = Annotated[int, Meta(ge=1)]
Rank = Annotated[int, Meta(ge=0)]


# --- the records --------------------------------------------------------------------------------------------------------


class Joined(Struct, frozen=True, forbid_unknown_fields=True, tag="joined"):
    """A daemon joined the pool. The number of this record is its number."""

    host: str
    pid: int


class Job(Struct, frozen=True, forbid_unknown_fields=True, tag="job"):
    """A submitted run. `words`: the arguments of `fsbarrier run`; `folder`: its working directory; `log_path`: "" is the pool's own choice.

    Jobs are numbered from 1 in the order of the log. They run in order of priority, then of age.
    """

    name: str
    nodes: Positive
    priority: int
    words: tuple[Word, ...]
    folder: Word
    log_path: Word
    submitted_by: str
    time: str


class Placed(Struct, frozen=True, forbid_unknown_fields=True, tag="placed"):
    """Nodes of the pool run node ranks of a job. `ranks`: node rank -> node."""

    job: int
    ranks: Annotated[dict[Rank, int], Meta(min_length=1)]


class Ended(Struct, frozen=True, forbid_unknown_fields=True, tag="ended"):
    """The `fsbarrier run` of a node rank ended, which record number `by` had placed."""

    job: int
    rank: Rank
    by: int
    exit_code: int


class StopAsked(Struct, frozen=True, forbid_unknown_fields=True, tag="stop"):
    """Somebody asked for the end of a job."""

    job: int
    who: str


class Over(Struct, frozen=True, forbid_unknown_fields=True, tag="over"):
    """A job has ended."""

    job: int
    exit_code: int
    reason: str = ""


Record = Joined | Job | Placed | Ended | StopAsked | Over


# --- what they say ------------------------------------------------------------------------------------------------------


class Assignment(NamedTuple):
    """A node rank of a job on a node of the pool, by record number `by`."""

    job: int
    rank: int
    node: int
    by: int


@dataclass
class JobState:
    """`places`: where each node rank is now; `codes`: the exit codes of those that have ended."""

    job: Job
    places: dict[int, Assignment] = field(default_factory=dict)
    codes: dict[int, int] = field(default_factory=dict)
    stop: bool = False
    over: Over | None = None

    @property
    def word(self) -> str:
        if self.over is None:
            return "running" if self.places else "queued"
        return "stopped" if self.stop else "failed" if self.over.exit_code else "finished"

    def open_places(self) -> Iterator[Assignment]:
        """The assignments of node ranks that have no exit code yet; none once the job is over."""
        if self.over is None:
            yield from (assigned for rank, assigned in self.places.items() if rank not in self.codes)


@dataclass
class Queue:
    """The jobs by number, and the hosts of the pool's nodes, after the first `length` records of the log."""

    length: int = 0
    jobs: dict[int, JobState] = field(default_factory=dict)
    hosts: dict[int, str] = field(default_factory=dict)

    def apply(self, record: Record) -> None:
        """Add the next record. Raises KeyError for one about a job that does not exist."""
        self.length += 1
        match record:
            case Joined():
                self.hosts[self.length] = record.host
            case Job():
                self.jobs[len(self.jobs) + 1] = JobState(record)
            case Placed():
                state = self.jobs[record.job]
                for rank, node in record.ranks.items():
                    state.places[rank] = Assignment(record.job, rank, node, self.length)
            case Ended():
                state = self.jobs[record.job]
                # Otherwise another node has this rank by now.
                if (place := state.places.get(record.rank)) is not None and place.by == record.by:
                    state.codes[record.rank] = record.exit_code
            case StopAsked():
                self.jobs[record.job].stop = True
            case Over():
                self.jobs[record.job].over = record

    def going_on(self) -> Mapping[int, JobState]:
        """The jobs that have not ended."""
        return {number: state for number, state in self.jobs.items() if state.over is None}

    def place_of(self, node: int) -> Assignment | None:
        """What a node of the pool runs; None if it is free."""
        places = (assigned for state in self.going_on().values() for assigned in state.open_places())
        return next((assigned for assigned in places if assigned.node == node), None)

    def free(self, living: Collection[int]) -> list[int]:
        busy = {assigned.node for state in self.going_on().values() for assigned in state.open_places()}
        return sorted(set(living) - busy)

    def first_in_line(self, living: Collection[int]) -> int | None:
        """The job that gets the next free nodes.

        A job that needs more nodes than are alive is skipped. Otherwise the first job blocks those behind it, because small jobs could
        starve a large one.
        """
        waiting = {number: each.job for number, each in self.going_on().items() if each.word == "queued"}
        line = sorted(waiting, key=lambda number: (-waiting[number].priority, number))
        return next((number for number in line if waiting[number].nodes <= len(living)), None)


def next_decision(queue: Queue, living: Collection[int], dead: Collection[int]) -> Placed | Over | None:
    """The next record to append, given this node's view of the pool; None if there is nothing to decide.

    `dead`: nodes known to be dead; a node may be neither living nor dead.
    """
    for number, state in queue.going_on().items():
        if (end := _end(number, state, dead)) is not None:
            return end
    free = queue.free(living)
    for number, state in queue.going_on().items():
        lost = sorted(assigned.rank for assigned in state.open_places() if assigned.node in dead)
        if lost and free and not state.stop:
            return Placed(number, dict(zip(lost, free, strict=False)))
    first = queue.first_in_line(living)
    if first is None or (nodes := queue.jobs[first].job.nodes) > len(free):
        return None
    return Placed(first, dict(enumerate(free[:nodes])))


def _end(number: int, state: JobState, dead: Collection[int]) -> Over | None:
    """The record that ends a job; None if it has not ended."""
    codes = state.codes.values()
    if not state.places:
        return Over(number, STOPPED, "stopped while queued") if state.stop else None
    failed = next((code for code in codes if code), None)
    if REFUSED in codes and not state.stop:
        # The other nodes would wait for it until their time is up.
        return Over(number, REFUSED, "a node refused to start")
    if any(assigned.node not in dead for assigned in state.open_places()):
        return None
    if not codes and not state.stop:
        # All nodes died without an exit code: the job is placed again.
        return None
    if 0 in codes and not state.stop:
        return Over(number, 0)
    return Over(number, failed or STOPPED)
