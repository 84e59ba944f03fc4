"""Builds the generations that nodes propose: members, resume position, adopted decisions. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from fsbarrier.protocol.facts import (
    Decision,
    FailedProgram,
    Generation,
    Join,
    Member,
    Payload,
    Position,
    Verdict,
)
from fsbarrier.protocol.rows import Table
from fsbarrier.protocol.situation import Situation
from fsbarrier.protocol.state import ResumePoint

#: the reason of a session's first generation: in the first session, and in every later one
STARTS = ("start", "start again")
#: how the reason of a generation begins that renews a long one with the same members
RENEWED = "the same nodes, after "


def leader_of(members: Iterable[Member]) -> int:
    """The leader of a generation: the lowest rank."""
    return min(member.rank for member in members)


def successor(
    situation: Situation,
    members: Sequence[Member],
    reason: str,
    *,
    verdict: Verdict | None = None,
    failures: Sequence[FailedProgram] = (),
    dismissed: tuple[Member, ...] = (),
    era: int = 0,
) -> Generation:
    """The generation after this node's, which is the newest. The same iteration resumes at the row that the current row's `resume` names,
    or if this row's result is there, at the next row. If an unreadable record already has its number, creating it fails, which is safe.

    `era`: the era that goes on; 0: a new one begins.
    """
    table, position, generation = situation.rules.table, situation.position, situation.generation
    resumed = position.phase + 1 if situation.result_is_there else table.resume_index(situation.row)
    start = Position(position.iteration, max(situation.span[0], resumed))
    number = generation.number + 1
    return Generation(
        number=number,
        members=tuple(sorted(members, key=lambda m: m.rank)),
        # A generation with a verdict may have no members.
        leader=leader_of(members) if members else situation.node.rank,
        start=start,
        reason=reason,
        decisions=kept_decisions(situation.node.decisions, start, table),
        until=generation.until,
        choices=generation.choices,
        failures=tuple(failures),
        dismissed=dismissed,
        created_by=situation.node.rank,
        verdict=verdict,
        settings=generation.settings,
        era=era or number,
    )


def first_of_session(situation: Situation, point: ResumePoint) -> Generation:
    """The first generation of a session, which resumes the run at `point`."""
    number, lowest = point.generation + 1, lowest_start(situation)
    choices = lowest.choices if lowest else {}
    span = situation.rules.span(choices)
    start = start_of_session(point, span, situation.rules.table, lowest.until if lowest else None)
    members = [situation.starting[rank] for rank in sorted(situation.starting)]
    return Generation(
        number=number,
        members=tuple(members),
        leader=leader_of(members),
        start=start,
        reason=STARTS[number > 1],
        decisions=kept_decisions(point.decisions, start, situation.rules.table),
        until=lowest.until if lowest else None,
        choices=choices,
        created_by=situation.node.rank,
        settings=situation.settings,
        era=number,
    )


def lowest_start(situation: Situation) -> Join | None:
    """The start whose command line the run follows: the lowest rank's, once this node has heard it. After the wait for missing nodes it is
    the lowest present rank's. None until then.

    A start that it has not heard may belong to an earlier session. Example: node 0 was fenced and came back, but the run ended before
    it was admitted. In the next session node 1 must not take that start for the one that is about to come with more `--iterations`.
    """
    node, view = situation.node, situation.view
    joins, newest = view.joins, view.newest
    if not situation.waits_for_nodes:
        return joins.get(min(situation.starting))
    rank = min(joins, default=node.rank)
    join = joins.get(rank)
    if join is None or (newest is not None and newest.incarnation_of(rank) == join.incarnation):
        return None
    return join if rank == node.rank or view.ledger.moved(Member(rank, join.incarnation)) else None


def all_done(start: Position, until: int | None) -> bool:
    """Whether nothing is left to do from `start` up to iteration `until`."""
    return until is not None and start.iteration > until


def start_of_session(
    point: ResumePoint, span: tuple[int, int], table: Table[object], until: int | None = None
) -> Position:
    """Where a session that runs the rows of `span` up to iteration `until` begins.

    The last iteration must include its closing rows (`Table.closing`). So the session begins no later than with the first of them,
    even if the last session stopped behind it or completed the iteration without closing it.
    """
    start = _start_by_what_was_done(point, span, table)
    if not table.closing or until is None or span != table.span():
        return start
    first_closing = Position(until, table.closing[0].index)
    if start.iteration == until:
        return min(start, first_closing)
    last = point.decisions.get(table.rows[-1].name)
    closed = last is not None and last["iteration"] == until
    # If the next iteration has already published a policy, it is too late to close the last one.
    published = start.phase >= first_closing.phase
    return start if start.iteration - 1 != until or closed or published else first_closing


def _start_by_what_was_done(point: ResumePoint, span: tuple[int, int], table: Table[object]) -> Position:
    """Where a session that runs the rows of `span` begins. If the last session ran the same rows, it begins where the run was left.

    Otherwise it begins with the first slice that lags behind the one before it. Example: there are rollouts of iteration 3, but
    updates only up to iteration 2; a session that includes the update begins with that of iteration 3. If no slice lags, a session that
    begins with a later slice does that slice's next iteration, and any other session begins the next iteration.
    """
    if point.generation == 0:
        return Position(1, span[0])
    if span == point.span:
        return point.position
    made_up_to = [
        decision["iteration"] if (decision := point.decisions.get(part.result)) is not None else 0
        for part in table.slices
    ]
    for i in range(len(made_up_to) - 1, 0, -1):
        first = table.index(table.slices[i].first)
        if span[0] <= first <= span[1] and (made_up_to[i - 1] > made_up_to[i] or span[0] == first):
            return Position(made_up_to[i] + 1, first)
    return Position(max(made_up_to, default=0) + 1, span[0])


def with_decision(
    decisions: Mapping[str, Decision], name: str, iteration: int, value: Payload
) -> dict[str, Decision]:
    """`decisions` with one more. The decision of the last iteration is kept under "before", since a later generation may resume before
    this one."""
    old = decisions.get(name)
    if old is not None and old["iteration"] >= iteration:
        old = old.get("before")
    entry: Decision = {"iteration": iteration, "value": value}
    if old is not None:
        entry["before"] = {"iteration": old["iteration"], "value": old["value"]}
    return {**decisions, name: entry}


def kept_decisions(
    decisions: Mapping[str, Decision], start: Position, table: Table[object]
) -> dict[str, Decision]:
    """The decisions that a generation starting at `start` adopts: all that were made before that position."""
    kept = {}
    for row in table.rows:
        entry = decisions.get(row.name)
        while entry is not None and (entry["iteration"], row.index) >= (start.iteration, start.phase):
            entry = entry.get("before")
        if entry is not None:
            kept[row.name] = entry
    return kept
