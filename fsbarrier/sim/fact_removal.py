"""Invariants of the removal of old facts (I9)."""

from __future__ import annotations

from collections.abc import Iterator

from fsbarrier.program import PHASE_NAMES
from fsbarrier.sim.history import History, row_of


def no_fact_is_needed_after_its_removal(history: History) -> Iterator[str]:
    """A fact is removed only when all members have entered a later iteration, whose opening fact lists all earlier decisions.

    Generations older than the newest need no facts.
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
        number, iteration, _ = removed.place
        record = history.generations[number][1]
        if any(
            newer > number and made.time <= removed.time for newer, (made, _) in history.generations.items()
        ):
            continue
        if not any(
            at[:2] > (number, iteration) and written <= removed.time
            for at, written in history.openings.items()
            if at[0] == number
        ):
            yield f"{removed.path} was removed, and no later iteration says what was decided before it"
        for rank in record.ranks:
            if not any(
                time <= removed.time and there > iteration for time, there in came.get((number, rank), ())
            ):
                yield f"{removed.path} was removed before node {rank} had left that iteration"


def openings_tell_all(history: History) -> Iterator[str]:
    """The leader's first fact of an iteration contains each row's last decision before it."""
    for place in history.openings:
        number, record = place[0], history.generations[place[0]][1]
        recorded = history.facts[place][record.leader][1].decisions
        latest = {name: (entry["iteration"], entry["value"]) for name, entry in record.decisions.items()}
        start = number, record.start.iteration, record.start.phase
        for earlier in sorted(at for at in history.facts if start <= at < place):
            fact = history.facts[earlier].get(record.leader)
            if fact is not None and fact[1].value:
                latest[PHASE_NAMES[earlier[2]]] = earlier[1], fact[1].value
        found = {name: (entry["iteration"], entry["value"]) for name, entry in recorded.items()}
        if found != latest:
            yield f"the leader's fact about {place} tells of other decisions than were made"


def facts_stay_few(history: History) -> Iterator[str]:
    """The number of facts at the end does not grow with the iterations: two for each node and row, and one more of the leader."""
    for number, count in history.left.items():
        members = len(history.generations[number][1].members)
        most = len(PHASE_NAMES) * (2 * members + 2)
        if count > most:
            yield f"{count} facts of generation {number} are left; {most} are enough"
