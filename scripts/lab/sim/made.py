"""I19: what the makers of a row have finished is not made again, and nobody else's end ends their work.

Only the update has makers (`Phase.made_by`): the nodes that train.
"""

from __future__ import annotations

from collections.abc import Iterator

from fsbarrier.protocol.facts import SEALED, Fact, Generation
from fsbarrier.protocol.state import Rules
from sim.history import History, RowPlace, row_of

#: what makes a node decide later than it looked, or by an older listing
LATE = frozenset(
    ("pause", "slow", "outage", "room", "busy", "power", "error", "lost", "garbled", "handles", "unreadable")
)


def i19_what_is_made_is_kept(history: History, rules: Rules) -> Iterator[str]:
    """A generation begins the update again only if a node that trains was lost, had failed or was fenced before it was done."""
    made = next(row for row in rules.table.rows if row.made_by)
    entered = {(place, event.node.rank): event.time for event, place in history.entered}
    late = history.caches or bool(history.faults & LATE)
    for number, (write, record) in sorted(history.generations.items()):
        before = history.generations.get(number - 1)
        iteration = record.start.iteration
        place = number - 1, iteration, made.index
        if before is None or record.verdict is not None or record.start.phase > made.index:
            continue
        if (
            not rules.table.resume_index(made) <= record.start.phase
            or (place, record.created_by) not in entered
        ):
            continue
        makers = rules.under(record.settings).makers(made, before[1].ranks)
        done = {rank for rank, (time, _) in history.facts.get(place, {}).items() if time <= write.time}
        unfinished = makers - done
        if not unfinished and not late:
            yield f"generation {number} begins the update again, which {sorted(makers)} had finished"
        lost = {rank for rank in unfinished if record.incarnation_of(rank) != before[1].incarnation_of(rank)}
        if unfinished and not lost and not unfinished & _stopped(history, place, before[1]):
            yield f"generation {number} begins the update again, which {sorted(unfinished)} were about to finish"


def _stopped(history: History, place: RowPlace, generation: Generation) -> set[int]:
    """Whose program failed in a row, and the leader if a seal has the name of its fact."""
    facts = [
        write.record
        for write in history.writes
        if isinstance(write.record, Fact) and row_of(write.path) == place
    ]
    failed = {fact.rank for fact in facts if fact.status == "failed"}
    sealed = any(fact.status == SEALED for fact in facts)
    return failed | ({generation.leader} if sealed else set())
