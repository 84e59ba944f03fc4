"""The state of a pool's jobs, and the next scheduling decision. Pure.

All decisions form one log: 1, 2, 3, ..., each created exclusively by the node that was first. All nodes therefore agree on every placement
and every end of a job, even if two nodes act as scheduler at once or one dies in between.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from fsbarrier.errors import EXIT_SIGTERM, UsageError
from fsbarrier.protocol.wording import counted

# The exit code of a job that was stopped while still queued.
STOPPED = EXIT_SIGTERM
# The exit code of a start that was refused.
REFUSED = UsageError.exit_code


@dataclass(frozen=True, slots=True)
class Job:
    """A submitted run. `words`: the arguments of `fsbarrier run`; `folder`: its working directory.

    Jobs run in order of priority, then of age.
    """

    name: str
    nodes: int
    priority: int
    words: Sequence[str]
    folder: str
    log_path: str
    submitted_by: str
    time: str

    def __post_init__(self) -> None:
        """Raises ValueError for a job that no node could run."""
        if self.nodes < 1:
            raise ValueError("nodes must be 1 or more")
        for text in (*self.words, self.folder, self.log_path):
            # Arguments are passed to a process as zero-terminated UTF-8.
            if b"\0" in text.encode():
                raise ValueError(f"an argument contains a zero byte: {text!r}")


@dataclass(frozen=True, slots=True)
class Decision:
    """Either places node ranks of a job (`ranks`: rank -> node of the pool) or ends the job (`exit_code`)."""

    job: int
    ranks: Mapping[str, int] = field(default_factory=dict)
    exit_code: int | None = None
    reason: str = ""

    def __post_init__(self) -> None:
        """Raises ValueError for a malformed decision."""
        if self.exit_code is None and not self.ranks:
            raise ValueError("neither ranks nor an exit code")
        for rank in self.ranks:
            if not (rank.isascii() and rank.isdecimal() and str(int(rank)) == rank):
                raise ValueError(f"{rank!r} is not a node rank")


@dataclass(frozen=True, slots=True)
class Ended:
    """The result of a placement's `fsbarrier run`."""

    exit_code: int


@dataclass(frozen=True, slots=True)
class Placement:
    """A node rank of a job, assigned to a node of the pool by decision number `by`."""

    job: int
    rank: int
    node: int
    by: int


@dataclass(frozen=True)
class Facts:
    """The contents of the pool's directory. `ended`: the exit codes that nodes reported."""

    jobs: Mapping[int, Job] = field(default_factory=dict)
    decisions: Mapping[int, Decision] = field(default_factory=dict)
    stops: Collection[int] = ()
    ended: Mapping[Placement, int] = field(default_factory=dict)

    @cached_property
    def _decided(self) -> Mapping[int, Sequence[tuple[int, Decision]]]:
        """Each job's decisions with their numbers, in order. An index, because every node looks up all jobs twice a second, and scanning
        thousands of decisions for each of them would keep a core busy."""
        found: dict[int, list[tuple[int, Decision]]] = {}
        for by, decision in sorted(self.decisions.items()):
            found.setdefault(decision.job, []).append((by, decision))
        return found

    def placements(self, job: int) -> Mapping[int, Placement]:
        """The current placement of each node rank of a job."""
        return {
            int(rank): Placement(job, int(rank), node, by)
            for by, decision in self._decided.get(job, ())
            for rank, node in decision.ranks.items()
        }

    def over(self, job: int) -> Decision | None:
        """The decision that ended a job; None if it has not ended."""
        return next((one for _, one in self._decided.get(job, ()) if one.exit_code is not None), None)

    def state(self, job: int) -> str:
        end = self.over(job)
        if end is None:
            return "running" if self.placements(job) else "queued"
        return "stopped" if job in self.stops else "failed" if end.exit_code else "finished"

    def open_placements(self) -> Iterator[Placement]:
        """The placements without an exit code, of jobs that have not ended."""
        for job in self.jobs:
            if self.over(job) is None:
                yield from (one for one in self.placements(job).values() if one not in self.ended)


def next_decision(
    facts: Facts, living: Collection[int], dead: Collection[int], begun: Collection[int]
) -> Decision | None:
    """The next decision to propose, given this node's view of the pool; None if there is nothing to decide.

    `dead`: nodes known to be dead; a node may be neither living nor dead. `begun`: jobs whose run has a generation.
    """
    for job in sorted(facts.jobs):
        if facts.over(job) is None and (end := _end(facts, job, dead, begun)) is not None:
            return end
    free = _free(facts, living)
    for job in sorted(facts.jobs):
        if facts.state(job) == "running" and job not in facts.stops:
            lost = [one.rank for one in facts.placements(job).values() if _is_lost(facts, one, dead)]
            if lost and free:
                ranks = dict(zip(map(str, sorted(lost)), free, strict=False))
                return Decision(job, ranks, reason="replaces a dead node")
    first = _first_in_queue(facts, living)
    if first is None or facts.jobs[first].nodes > len(free):
        return None
    return Decision(first, {str(rank): free[rank] for rank in range(facts.jobs[first].nodes)})


def waits_for(facts: Facts, job: int, living: Collection[int]) -> str:
    """Why a job is still queued, as text; "" if it can start at any moment or is not queued."""
    if facts.state(job) != "queued" or job in facts.stops:
        return ""
    needed, free = facts.jobs[job].nodes, len(_free(facts, living))
    nodes = counted(needed, "node")
    if needed > len(living):
        return f"{nodes}, of which the pool has {len(living)}"
    first = _first_in_queue(facts, living)
    if first != job:
        return f"job {first}, which is ahead of it"
    return f"{nodes}, of which {free} of the pool's {len(living)} are free" if needed > free else ""


def _free(facts: Facts, living: Collection[int]) -> Sequence[int]:
    return sorted(set(living).difference(one.node for one in facts.open_placements()))


def _first_in_queue(facts: Facts, living: Collection[int]) -> int | None:
    """The job that gets the next free nodes.

    A job that needs more nodes than are alive is skipped. Otherwise the first job blocks those behind it, because small jobs could starve a
    large one.
    """
    queue = sorted((-facts.jobs[job].priority, job) for job in facts.jobs if facts.state(job) == "queued")
    return next((job for _, job in queue if facts.jobs[job].nodes <= len(living)), None)


def _is_lost(facts: Facts, one: Placement, dead: Collection[int]) -> bool:
    return one not in facts.ended and one.node in dead


def _end(facts: Facts, job: int, dead: Collection[int], begun: Collection[int]) -> Decision | None:
    """The decision that ends a job; None if it has not ended."""
    placed = facts.placements(job).values()
    codes = [facts.ended[one] for one in placed if one in facts.ended]
    if not placed:
        return Decision(job, exit_code=STOPPED, reason="stopped while queued") if job in facts.stops else None
    failed = next((code for code in codes if code), None)
    if failed is not None and (job not in begun or REFUSED in codes) and job not in facts.stops:
        # The other nodes would wait for the failed one forever.
        return Decision(
            job, exit_code=failed, reason="a node failed before the run began, or refused to start"
        )
    if any(one not in facts.ended and one.node not in dead for one in placed):
        return None
    if not codes and job not in facts.stops:
        # All nodes died without reporting an exit code: place the job again.
        return None
    code = 0 if 0 in codes and job not in facts.stops else failed or STOPPED
    return Decision(job, exit_code=code)
