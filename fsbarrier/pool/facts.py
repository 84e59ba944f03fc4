"""What is known of a pool's jobs, and what is to be decided next. Pure.

Everything that is decided stands in one log: decision 1, 2, 3, ..., each created exclusively by whichever node was first. Who placed a job
and who ended one is thereby the same for all, also where two nodes believe that it is their turn, or one of them dies meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from fsbarrier.errors import EXIT_SIGTERM, UsageError
from fsbarrier.protocol.wording import counted

# What a job came to that was stopped in the queue, where no node of it ran.
STOPPED = EXIT_SIGTERM
# The exit code of a start that was refused.
REFUSED = UsageError.exit_code


@dataclass(frozen=True, slots=True)
class Job:
    """A run that somebody submitted. `words`: what `fsbarrier run` is told; `folder`: where relative paths in them begin.

    Of two jobs that wait, the one with the higher priority goes first, then the older one.
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
        """Raises ValueError where no node could run it."""
        if self.nodes < 1:
            raise ValueError("nodes must be 1 or more")
        for text in (*self.words, self.folder, self.log_path):
            # A program is told its words as UTF-8, each ended by a zero byte.
            if b"\0" in text.encode():
                raise ValueError(f"a word has a zero byte in it: {text!r}")


@dataclass(frozen=True, slots=True)
class Decision:
    """Decision `number`: who runs which node rank of a job from now on (`ranks`: rank -> node of the pool), or that a job is over."""

    job: int
    ranks: Mapping[str, int] = field(default_factory=dict)
    exit_code: int | None = None
    reason: str = ""

    def __post_init__(self) -> None:
        """Raises ValueError where it decides nothing that nodes could follow."""
        if self.exit_code is None and not self.ranks:
            raise ValueError("it names neither nodes nor an exit code")
        for rank in self.ranks:
            if not (rank.isascii() and rank.isdecimal() and str(int(rank)) == rank):
                raise ValueError(f"{rank!r} is no node rank")


@dataclass(frozen=True, slots=True)
class Ended:
    """How a placement's `fsbarrier run` ended."""

    exit_code: int


@dataclass(frozen=True, slots=True)
class Placement:
    """One node rank of a job, as decision `by` gave it to a node of the pool."""

    job: int
    rank: int
    node: int
    by: int


@dataclass(frozen=True)
class Facts:
    """All that lies in the pool's directory. `ended`: a placement's exit code, as its node reported it."""

    jobs: Mapping[int, Job] = field(default_factory=dict)
    decisions: Mapping[int, Decision] = field(default_factory=dict)
    stops: Collection[int] = ()
    ended: Mapping[Placement, int] = field(default_factory=dict)

    @cached_property
    def _decided(self) -> Mapping[int, Sequence[tuple[int, Decision]]]:
        """Each job's decisions with their numbers, in order. Every node asks for all jobs twice a second, and after some weeks there are
        thousands: to go through all decisions for each of them would keep a core busy."""
        found: dict[int, list[tuple[int, Decision]]] = {}
        for by, decision in sorted(self.decisions.items()):
            found.setdefault(decision.job, []).append((by, decision))
        return found

    def placements(self, job: int) -> Mapping[int, Placement]:
        """Who runs each node rank of a job now."""
        return {
            int(rank): Placement(job, int(rank), node, by)
            for by, decision in self._decided.get(job, ())
            for rank, node in decision.ranks.items()
        }

    def over(self, job: int) -> Decision | None:
        """The decision that ended a job."""
        return next((one for _, one in self._decided.get(job, ()) if one.exit_code is not None), None)

    def state(self, job: int) -> str:
        end = self.over(job)
        if end is None:
            return "running" if self.placements(job) else "queued"
        return "stopped" if job in self.stops else "failed" if end.exit_code else "finished"

    def open_placements(self) -> Iterator[Placement]:
        """What nodes have to do: of jobs that are not over, what has no exit code yet."""
        for job in self.jobs:
            if self.over(job) is None:
                yield from (one for one in self.placements(job).values() if one not in self.ended)


def next_decision(
    facts: Facts, living: Collection[int], dead: Collection[int], begun: Collection[int]
) -> Decision | None:
    """What a node should propose as the next decision, as it sees the pool.

    `dead`: the nodes that are known to be gone; one may be neither living nor dead. `begun`: the jobs whose run has a generation.
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
                return Decision(job, ranks, reason="in place of a node that is gone")
    first = _first_in_queue(facts, living)
    if first is None or facts.jobs[first].nodes > len(free):
        return None
    return Decision(first, {str(rank): free[rank] for rank in range(facts.jobs[first].nodes)})


def waits_for(facts: Facts, job: int, living: Collection[int]) -> str:
    """Why a job is still in the queue, for people; "" where it may be given its nodes at any moment, or is in no queue."""
    if facts.state(job) != "queued" or job in facts.stops:
        return ""
    needed, free = facts.jobs[job].nodes, len(_free(facts, living))
    nodes = counted(needed, "node")
    if needed > len(living):
        return f"{nodes}, of which the pool has {len(living)}"
    first = _first_in_queue(facts, living)
    if first != job:
        return f"job {first}, which goes first"
    return f"{nodes}, of which {free} of the pool's {len(living)} are free" if needed > free else ""


def _free(facts: Facts, living: Collection[int]) -> Sequence[int]:
    return sorted(set(living).difference(one.node for one in facts.open_placements()))


def _first_in_queue(facts: Facts, living: Collection[int]) -> int | None:
    """The job that gets the next nodes.

    A job that the pool could not carry with all its living nodes holds up nobody. The first one that it could, does: else small jobs
    would keep a large one out for ever.
    """
    queue = sorted((-facts.jobs[job].priority, job) for job in facts.jobs if facts.state(job) == "queued")
    return next((job for _, job in queue if facts.jobs[job].nodes <= len(living)), None)


def _is_lost(facts: Facts, one: Placement, dead: Collection[int]) -> bool:
    return one not in facts.ended and one.node in dead


def _end(facts: Facts, job: int, dead: Collection[int], begun: Collection[int]) -> Decision | None:
    """That a job is over, if it is."""
    placed = facts.placements(job).values()
    codes = [facts.ended[one] for one in placed if one in facts.ended]
    if not placed:
        return Decision(job, exit_code=STOPPED, reason="stopped in the queue") if job in facts.stops else None
    failed = next((code for code in codes if code), None)
    if failed is not None and (job not in begun or REFUSED in codes) and job not in facts.stops:
        # The others would wait for that node.
        return Decision(job, exit_code=failed, reason="a node failed before the run began, or was refused")
    if any(one not in facts.ended and one.node not in dead for one in placed):
        return None
    if not codes and job not in facts.stops:
        # All its nodes are gone, and none of them said how it ended: it is taken up again.
        return None
    code = 0 if 0 in codes and job not in facts.stops else failed or STOPPED
    return Decision(job, exit_code=code)
