"""Later sessions of a run: all nodes are started again after it has ended, perhaps with other phases or for one iteration more.

Also where each generation must start (I3), by what the ones before it published.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import NamedTuple

from fsbarrier.program import PHASE_NAMES
from fsbarrier.protocol.facts import Position
from fsbarrier.protocol.state import Rules
from fsbarrier.settings.value_types import RlPhase
from fsbarrier.wording import counted
from sim.history import History

# the first row of the slice that updates, and the first closing row
UPDATE, CLOSING = PHASE_NAMES.index("engine_stop"), PHASE_NAMES.index("engine_start")
OTHERS: tuple[RlPhase, ...] = ("both", "rollout", "update")


class Session(NamedTuple):
    """What the nodes are started for, from `time` on."""

    time: float
    phases: RlPhase
    until: int


def another(history: History, last: Session, now: float, rng: Random) -> Session:
    """The next session: what is left of the last one, or if that is finished, perhaps other phases, and perhaps an iteration more."""
    # A copy, because a history that is asked remembers its answers.
    if not finished(replace(history), last):
        return last._replace(time=now)
    phases = rng.choice(OTHERS)
    # An iteration that nobody rolled out cannot be learned from. A run that only updates learns from another run.
    learns = phases == "update" and last.phases != "update"
    return Session(now, phases, last.until + (0 if learns else rng.choice((0, 1, 1))))


def finished(history: History, session: Session) -> bool:
    """Whether all members of some generation are done with the session's last row, even if nobody lived to see it."""
    end = session.until, history.spans[session.phases][1]
    return any(
        record.until == session.until
        and history.phases_of(record) == session.phases
        and history.all_done((number, *end), record)
        for number, (_, record) in history.generations.items()
    )


def nothing_was_left(history: History, session: Session) -> bool:
    """Whether a node ended because an earlier session had done all that this one was started for."""
    return any(
        ended.code == 0 and "has already done" in ended.why and ended.time > session.time
        for ended in history.ended.values()
    )


def ended_by_an_old_start(history: History, sessions: Sequence[Session], waits_s: float) -> Iterator[str]:
    """A node that ends because all is done says so of what this session was started for, not an earlier one. After `waits_s` without
    node 0 a node may decide by its own command line."""
    for number, ended in history.ended.items():
        started, rank = history.starts[number]
        session = max((other for other in sessions if other.time <= started), key=lambda other: other.time)
        own = f"already done its {counted(session.until, 'iteration')};"
        if "already done" in ended.why and own not in ended.why and ended.time - started < waits_s:
            yield f"node {rank}, started for {session}, ended after {ended.time - started:.1f} s: {ended.why}"


def start_positions(history: History, rules: Rules) -> Iterator[str]:
    """A generation resumes where the one before it was, at most one row back, and then at that row's `resume`."""
    for number, (write, record) in sorted(history.generations.items()):
        if number == 1:
            continue
        previous = history.generations.get(number - 1)
        if previous is None:
            yield f"generation {number} follows none"
            continue
        before, now = previous[1], (record.start.iteration, record.start.phase)
        if history.span(record) != history.span(before):
            # Where other phases begin is in tests/test_succession.py; what was rolled out and learned from in I4 and I5.
            continue
        start = before.start
        reached = [
            (iteration, phase)
            for event, (older, iteration, phase) in history.entered
            if older == number - 1 and event.time <= write.time
        ]
        most = max(reached, default=(start.iteration, start.phase))
        row = Position(*_before(most, history.span(before), (start.iteration, start.phase)))
        resumed = rules.table.resume_index(rules.row(row, before))
        floor = row.iteration, max(history.span(before)[0], resumed)
        if record.until != before.until and record.until is not None:
            # Only now an iteration is the last one, or it was not closed.
            floor = min(floor, (record.until, CLOSING))
        done = history.facts.get((number - 1, *most), {})
        makers = rules.under(before.settings).makers(rules.row(Position(*most), before), before.ranks)
        passed = history.all_done((number - 1, *most), before) or (makers and makers <= done.keys())
        ceiling = _after(most, history.span(before)) if passed else most
        if not floor <= now <= ceiling:
            yield f"generation {number} starts at {now}; generation {number - 1} had reached {most}"


def _before(place: tuple[int, int], span: tuple[int, int], start: tuple[int, int]) -> tuple[int, int]:
    iteration, phase = place
    return max((iteration, phase - 1) if phase > span[0] else (iteration - 1, span[1]), start)


def _after(place: tuple[int, int], span: tuple[int, int]) -> tuple[int, int]:
    iteration, phase = place
    return (iteration + 1, span[0]) if phase == span[1] else (iteration, phase + 1)
