"""Invariants of the removal of old facts (I9)."""

from __future__ import annotations

from collections.abc import Iterator

from fsbarrier.program import PHASE_NAMES
from fsbarrier.rundir.names import FACT
from fsbarrier.sim.history import History, row_of
from fsbarrier.sim.setup import program


def no_fact_is_needed_after_its_removal(history: History) -> Iterator[str]:
    """A fact is removed only when all members have entered a later iteration, and a leader's, whose name a seal may take, not before
    there is a newer generation. Generations older than the newest need no facts.
    """
    for asked in history.asked:
        # A process that hung in a look, while the others formed a newer generation, may come late.
        late = any(
            newer > row_of(asked.path)[0] and made.time <= asked.time
            for newer, (made, _) in history.generations.items()
        )
        if not late:
            yield f"node {asked.rank} read {asked.path}, which was removed"
    came: dict[tuple[int, int], list[tuple[float, int]]] = {}
    for event, (number, iteration, _) in history.entered:
        came.setdefault((number, event.node.rank), []).append((event.time, iteration))
    for removed in history.removed:
        number, iteration, phase = removed.place
        record = history.generations[number][1]
        if any(
            newer > number and made.time <= removed.time for newer, (made, _) in history.generations.items()
        ):
            continue
        fact = FACT.parse(removed.path.rpartition("/")[2])
        if fact is not None and fact.rank == record.leader and not program().rows[phase].transient:
            yield f"{removed.path} was removed, so that its row can be sealed although it was passed"
        for rank in record.ranks:
            if not any(
                time <= removed.time and there > iteration for time, there in came.get((number, rank), ())
            ):
                yield f"{removed.path} was removed before node {rank} had left that iteration"


def facts_stay_few(history: History) -> Iterator[str]:
    """At the end there are at most two facts for each node and row, and the leader's of all iterations of its generation."""
    for number, count in history.left.items():
        members = len(history.generations[number][1].members)
        most = len(PHASE_NAMES) * (2 * members + 1 + history.longest)
        if count > most:
            yield f"{count} facts of generation {number} are left; {most} are enough"
