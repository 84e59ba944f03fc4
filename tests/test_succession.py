"""What nodes propose when something changes: who, from where, with which decisions, and how often. No files, no clocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from core_builders import (
    ASSIGN,
    CLOSE,
    FIRST,
    MERGE,
    NOW,
    OPEN,
    PROBE,
    PUBLISH,
    ROLL_OUT,
    TABLE,
    UPDATE,
    at_row,
    decided,
    failures,
    generation,
    heard,
    left_off,
    member,
    rules,
    sees,
    started,
    waiters,
    waiting,
)

from fsbarrier.protocol.facts import Generation, Payload, Position, Verdict
from fsbarrier.protocol.rows import Row, Slice, Table
from fsbarrier.protocol.situation import Situation
from fsbarrier.protocol.state import Node, ResumePoint, View
from fsbarrier.protocol.succession import (
    first_of_session,
    kept_decisions,
    start_of_session,
    successor,
    with_decision,
)

WHOLE, ROLLOUTS, UPDATES = (OPEN, CLOSE), (OPEN, MERGE), (PROBE, CLOSE)


def situation(node: Node, view: View | None = None, **changes: Any) -> Situation:
    return Situation(node, view if view is not None else sees(), NOW, rules(**changes))


# --- the next generation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "choice", "start"),
    [
        (OPEN, "", OPEN),
        (ASSIGN, "", ASSIGN),
        (ROLL_OUT, "", ASSIGN),
        (MERGE, "", ASSIGN),
        (PROBE, "", PROBE),
        (UPDATE, "", PROBE),
        (PUBLISH, "", PUBLISH),
        (UPDATE, "update", PROBE),
        (MERGE, "rollout", ASSIGN),
    ],
)
def test_a_generation_goes_on_where_the_row_says(row: int, choice: str, start: int) -> None:
    node = at_row(0, row, iteration=4, generation=generation(choices={"rl_phase": choice}))
    assert successor(situation(node), FIRST.members, "why").start == Position(4, start)


def test_members_stand_in_order_and_the_lowest_leads() -> None:
    """Whoever proposes; what the run was asked for goes along."""
    known = generation(3, until=9, choices={"rl_phase": "rollout"}, failures=failures(2))
    node = at_row(1, MERGE, iteration=2, generation=known, decisions={"merge": decided(1, {"n": 1})})
    made = successor(situation(node, sees(known)), (member(2, 5), member(1)), "why", failures=failures(1))
    assert made == Generation(
        number=4,
        members=(member(1), member(2, 5)),
        leader=1,
        start=Position(2, ASSIGN),
        reason="why",
        decisions={"merge": decided(1, {"n": 1})},
        until=9,
        choices={"rl_phase": "rollout"},
        failures=failures(1),
        created_by=1,
        era=4,
    )


def test_a_verdict_rides_in_it_and_nobody_need_be_left() -> None:
    made = successor(situation(at_row(1, MERGE)), (), "why", verdict=Verdict(5, "nobody"))
    assert (made.members, made.leader, made.verdict, made.attempt) == ((), 1, Verdict(5, "nobody"), 0)


def test_a_generation_and_a_verdict_have_the_settings_of_the_one_before() -> None:
    known = generation(3, settings={"lr": 3.0})
    joins = started(1) | started(0, incarnation=2, stated={"lr": 5.0})
    merging = situation(at_row(1, MERGE, generation=known), sees(known, joins=joins), settings={"lr": 1.0})
    for verdict in (None, Verdict(0, "asked to stop")):
        assert successor(merging, known.members, "why", verdict=verdict).settings == {"lr": 3.0}


# --- the first of a session ----------------------------------------------------------------------------------------------------


def test_the_lowest_rank_that_came_says_what_is_asked_for() -> None:
    joins = {
        **started(0, until=3, choices={"rl_phase": "update"}),  # not here
        **started(1, until=5, choices={"rl_phase": "rollout"}),
        **started(2, until=7),
    }
    found = left_off(4, CLOSE, of=0)
    made = first_of_session(
        situation(waiting(2, for_s=60.0), View(joins=joins, ledger=waiters(1, 2)["ledger"])), found
    )
    assert (made.members, made.leader, made.created_by) == ((member(1), member(2)), 1, 2)
    assert (made.until, made.choices, made.start) == (5, {"rl_phase": "rollout"}, Position(1, OPEN))


def test_where_its_record_is_not_seen_nothing_is_asked_for() -> None:
    made = first_of_session(situation(waiting(0), View(ledger=heard(ranks=()))), left_off())
    assert (made.ranks, made.until, made.choices, made.reason) == ((0,), None, {}, "start")


def test_a_session_that_goes_on_is_not_called_a_start_and_keeps_what_was_decided() -> None:
    found = left_off(
        3, PUBLISH, of=1, decisions={"merge": decided(3, {"n": 3}), "close": decided(3, {}, (2, {"c": 2}))}
    )
    view = View(newest=generation(1), **waiters(0, 1, 2, incarnation=2))
    made = first_of_session(situation(waiting(0, incarnation=2, baseline=1), view), found)
    assert (made.number, made.reason, made.start, made.attempt) == (2, "start again", Position(3, PUBLISH), 0)
    assert made.decisions == {"merge": decided(3, {"n": 3}), "close": decided(2, {"c": 2})}


# --- where a session begins ------------------------------------------------------------------------------------------------

OPENINGS = [
    # the session before ran the same rows: from where it was left
    ("a whole session goes on in any row", WHOLE, WHOLE, (2, ROLL_OUT), 1, 1, (2, ROLL_OUT)),
    ("so do rollouts alone", ROLLOUTS, ROLLOUTS, (2, MERGE), 1, 0, (2, MERGE)),
    ("so do updates alone", UPDATES, UPDATES, (2, UPDATE), 2, 1, (2, UPDATE)),
    # rollouts: always of the iteration after the last that was made
    ("rollouts after a whole iteration", ROLLOUTS, WHOLE, (2, OPEN), 1, 1, (2, OPEN)),
    ("rollouts where an update was under way", ROLLOUTS, WHOLE, (2, UPDATE), 2, 1, (3, OPEN)),
    ("rollouts where rollouts were under way", ROLLOUTS, WHOLE, (2, ROLL_OUT), 1, 1, (2, OPEN)),
    ("rollouts after updates", ROLLOUTS, UPDATES, (4, PROBE), 3, 3, (4, OPEN)),
    ("rollouts where nothing was made", ROLLOUTS, WHOLE, (1, ASSIGN), 0, 0, (1, OPEN)),
    # updates: of the first iteration that has none
    ("updates of the first rollouts", UPDATES, ROLLOUTS, (4, OPEN), 3, 0, (1, PROBE)),
    ("updates of later rollouts", UPDATES, ROLLOUTS, (4, OPEN), 3, 1, (2, PROBE)),
    ("updates with nothing to update from go on too", UPDATES, WHOLE, (2, OPEN), 1, 1, (2, PROBE)),
    ("updates where nothing was made", UPDATES, WHOLE, (1, ROLL_OUT), 0, 0, (1, PROBE)),
    # whole iterations: what waits for an update gets it first
    ("all after rollouts alone", WHOLE, ROLLOUTS, (4, OPEN), 3, 0, (1, PROBE)),
    ("all after some updates", WHOLE, UPDATES, (2, PROBE), 3, 1, (2, PROBE)),
    ("all after as many updates as rollouts", WHOLE, UPDATES, (4, PROBE), 3, 3, (4, OPEN)),
    ("all after rollouts that were under way", WHOLE, ROLLOUTS, (1, MERGE), 0, 0, (1, OPEN)),
    ("all after updates of trajectories from elsewhere", WHOLE, UPDATES, (3, PROBE), 0, 2, (3, OPEN)),
]


@pytest.mark.parametrize(
    ("span", "before", "left", "rolled_out", "updated", "expected"),
    [case[1:] for case in OPENINGS],
    ids=[case[0] for case in OPENINGS],
)
def test_a_session_begins_with_the_slice_that_lags(
    span: tuple[int, int],
    before: tuple[int, int],
    left: tuple[int, int],
    rolled_out: int,
    updated: int,
    expected: tuple[int, int],
) -> None:
    made = {"merge": rolled_out, "publish": updated}
    decisions = {name: decided(iteration, {}) for name, iteration in made.items() if iteration}
    found = ResumePoint(Position(*left), decisions, generation=3, span=before)
    assert start_of_session(found, span, TABLE) == Position(*expected)


@pytest.mark.parametrize("span", [WHOLE, ROLLOUTS, UPDATES])
def test_a_run_without_any_generation_begins_with_iteration_1(span: tuple[int, int]) -> None:
    for before in ((0, 0), span):
        assert start_of_session(left_off(7, UPDATE, of=0, span=before), span, TABLE) == Position(1, span[0])


CLOSED = {"close": decided(4, {"reward": 1})}


@pytest.mark.parametrize(
    ("left", "decisions", "until", "expected"),
    [
        ((5, OPEN), {}, 4, (4, PUBLISH)),
        ((5, OPEN), {"close": decided(3, {"reward": 1})}, 4, (4, PUBLISH)),
        ((5, MERGE), {}, 4, (4, PUBLISH)),
        ((5, OPEN), CLOSED, 4, (5, OPEN)),
        # It was left in a row of an iteration that was not to be the last.
        ((4, CLOSE), {}, 4, (4, PUBLISH)),
        ((4, PUBLISH), {}, 4, (4, PUBLISH)),
        # Not asked for, not done yet, or long gone on.
        ((5, OPEN), {}, 5, (5, OPEN)),
        ((5, OPEN), {}, None, (5, OPEN)),
        ((6, OPEN), {}, 4, (6, OPEN)),
        ((5, CLOSE), {}, 4, (5, CLOSE)),
        ((4, UPDATE), {}, 4, (4, UPDATE)),
    ],
)
def test_a_last_iteration_that_was_not_closed_is_closed_once(
    left: tuple[int, int], decisions: dict[str, Any], until: int | None, expected: tuple[int, int]
) -> None:
    table = replace(TABLE, closing=TABLE.rows[PUBLISH:])
    found = ResumePoint(Position(*left), decisions, generation=3, span=WHOLE)
    assert start_of_session(found, WHOLE, table, until) == Position(*expected)
    assert start_of_session(found, WHOLE, TABLE, until) == Position(*left)


def test_a_slice_has_no_end_of_its_own() -> None:
    table = replace(TABLE, closing=TABLE.rows[PUBLISH:])
    found = ResumePoint(Position(5, PROBE), {}, generation=3, span=UPDATES)
    assert start_of_session(found, UPDATES, table, 4) == Position(5, PROBE)


@pytest.mark.parametrize(
    ("span", "made", "expected"),
    [
        ((0, 2), (3, 2, 1), (2, 2)),  # the last slice that has work waiting comes first
        ((0, 2), (3, 2, 2), (3, 1)),
        ((0, 2), (3, 3, 3), (4, 0)),
        ((0, 1), (3, 2, 1), (3, 1)),  # of those that the session runs
        ((0, 1), (2, 2, 1), (3, 0)),
        ((1, 2), (5, 2, 2), (3, 1)),
        ((1, 2), (5, 3, 2), (3, 2)),
        ((2, 2), (5, 3, 2), (3, 2)),
        ((2, 2), (5, 3, 3), (4, 2)),
    ],
)
def test_of_three_slices_the_last_with_work_waiting_comes_first(
    span: tuple[int, int], made: tuple[int, int, int], expected: tuple[int, int]
) -> None:
    names = ("a", "b", "c")
    rows = tuple(Row(i, name, each="work") for i, name in enumerate(names))
    table: Table[object] = Table("three", rows, tuple(Slice(name, name, name, result=name) for name in names))
    decisions = {name: decided(iteration, {}) for name, iteration in zip(names, made, strict=True)}
    assert start_of_session(ResumePoint(Position(9, 0), decisions, 1, span=(9, 9)), span, table) == Position(
        *expected
    )


# --- decisions ---------------------------------------------------------------------------------------------------------------

V1, V2, V3 = {"v": 1}, {"v": 2}, {"v": 3}


@pytest.mark.parametrize(
    ("known", "iteration", "value", "expected"),
    [
        (None, 1, V1, decided(1, V1)),
        (decided(1, V1), 2, V2, decided(2, V2, (1, V1))),
        (decided(1, V1), 4, V2, decided(4, V2, (1, V1))),
        (decided(2, V2, (1, V1)), 3, V3, decided(3, V3, (2, V2))),  # one stays below, not all
        (decided(2, V1), 2, V2, decided(2, V2)),  # decided anew after a failure
        (decided(2, V2, (1, V1)), 2, V3, decided(2, V3, (1, V1))),
        (decided(3, V2, (1, V1)), 2, V3, decided(2, V3, (1, V1))),
    ],
)
def test_a_decision_keeps_the_one_of_an_earlier_iteration_below_it(
    known: Payload | None, iteration: int, value: Payload, expected: Payload
) -> None:
    other = {"other": decided(1, V1)}
    had = other if known is None else {**other, "merge": known}
    assert with_decision(had, "merge", iteration, value) == {**other, "merge": expected}
    assert had.get("merge") == known, "what a node remembers is never changed in place"


@pytest.mark.parametrize(
    ("entry", "start", "kept"),
    [
        (decided(1, V1), (2, OPEN), decided(1, V1)),
        (decided(2, V2), (2, PROBE), decided(2, V2)),  # the row is before the start
        (decided(2, V2), (2, MERGE), None),  # the row itself is done again
        (decided(2, V2), (2, ASSIGN), None),
        (decided(2, V2, (1, V1)), (2, ASSIGN), decided(1, V1)),
        (decided(2, V2, (1, V1)), (2, PROBE), decided(2, V2, (1, V1))),
        (decided(3, V2, (2, V1)), (2, ASSIGN), None),
        (decided(3, V2, (1, V1)), (2, ASSIGN), decided(1, V1)),
    ],
)
def test_a_generation_adopts_what_was_decided_before_it_starts(
    entry: Payload, start: tuple[int, int], kept: Payload | None
) -> None:
    found = kept_decisions({"merge": entry, "a row of another program": entry}, Position(*start), TABLE)
    assert found == ({} if kept is None else {"merge": kept})
