"""What a schedule came to, beside the faults that struck: rare meetings of two features. A campaign shows that it really had them."""

from __future__ import annotations

from collections.abc import Iterator

from fsbarrier.program import PHASE_NAMES
from fsbarrier.protocol.succession import STARTS
from sim.history import History, JournalLine

UPDATE = PHASE_NAMES.index("update")


def reached(history: History) -> frozenset[str]:
    """The names of what this schedule came to."""
    return frozenset((*history.reached, *_generations(history), *_losses(history)))


def _generations(history: History) -> Iterator[str]:
    for number, (write, record) in history.generations.items():
        before = history.generations.get(number - 1)
        if before is None or record.reason in STARTS:
            continue
        if len({*record.ranks} - {*before[1].ranks}) > 1:
            yield "two joiners in a generation"
        start = record.start.iteration, record.start.phase
        done = history.facts.get((number - 1, start[0], UPDATE), {})
        passed = any(
            time <= write.time for place, time in _passed(history) if place == (number - 1, start[0], UPDATE)
        )
        if start[1] == UPDATE + 1 and done and not passed:
            yield "an update adopted"
            if record.leader != before[1].leader:
                yield "an update adopted by another leader"


def _passed(history: History) -> list[tuple[tuple[int, int, int], float]]:
    return [(place, event.time) for event, place in history.passed]


def _losses(history: History) -> Iterator[str]:
    for line in history.events:
        if line.event == "node_lost":
            yield from _loss(line)


def _loss(line: JournalLine) -> Iterator[str]:
    if line.fields.get("finishing"):
        yield "an update finished without a lost node"
    if line.fields.get("waiting"):
        yield "a wait for lost nodes"
