"""What is said of members that are lost: who, why, where they were last, how old the news is."""

from __future__ import annotations

from typing import Any

import pytest
from core_builders import (
    ASSIGN,
    FIRST,
    MERGE,
    NOW,
    OPEN,
    ROLL_OUT,
    at_row,
    generation,
    heard,
    member,
    rules,
    seen,
    sees,
    started,
    waiting,
)

from fsbarrier.protocol.facts import Position
from fsbarrier.protocol.machine import step
from fsbarrier.protocol.membership import Ledger, Loss
from fsbarrier.protocol.situation import (
    Situation,
    found_by_others,
    last_news,
    last_place,
    lost_as_fields,
    lost_as_text,
)
from fsbarrier.protocol.state import Node


def situation(node: Node, **view: Any) -> Situation:
    return Situation(node, sees(**view), NOW, rules())


def gone(
    rank: int = 2, *, at: tuple[int, int] | None = (0, 0), why: str = "silent", age: float | None = 15.0
) -> Loss:
    """The loss of a rank whose last heartbeat named the row `at` ((0, 0): none yet; None: it was never heard)."""
    return Loss(member(rank), why, seen(rank, at=at).beat if at is not None else None, age)


@pytest.mark.parametrize(
    ("here", "beat", "expected"),
    [
        ((1, ROLL_OUT), (1, MERGE), (1, MERGE)),  # its heartbeat knows more than this node
        ((1, ROLL_OUT), (1, ASSIGN), (1, ROLL_OUT)),  # it must have come this far for this node to be here
        ((2, OPEN), (1, MERGE), (2, OPEN)),
        ((1, ROLL_OUT), (0, 0), (1, ROLL_OUT)),
        ((1, ROLL_OUT), None, (1, ROLL_OUT)),
        ((1, OPEN), None, None),  # in the first row of all nobody needed it
        ((1, OPEN), (0, 0), None),
        ((1, OPEN), (1, OPEN), (1, OPEN)),
    ],
)
def test_where_a_member_was_last(
    here: tuple[int, int], beat: tuple[int, int] | None, expected: tuple[int, int] | None
) -> None:
    place = last_place(situation(at_row(0, here[1], iteration=here[0])), gone(at=beat))
    assert place == (Position(*expected) if expected else None)


def test_one_whose_news_is_of_an_older_generation_was_at_least_where_this_one_starts() -> None:
    here = at_row(0, OPEN, iteration=2, generation=generation(start=(2, OPEN)))
    assert last_place(situation(here), gone(at=(1, MERGE))) == Position(2, OPEN)
    assert last_place(situation(here), gone(at=(0, 0))) is None


def test_who_is_in_no_generation_knows_heartbeats_alone() -> None:
    assert last_place(situation(waiting(0)), gone(at=(1, MERGE))) == Position(1, MERGE)
    assert last_place(situation(waiting(0)), gone(at=None)) is None


def test_lost_members_are_told_in_a_generation_s_reason() -> None:
    entered = situation(at_row(0, OPEN))
    assert lost_as_text(entered, [gone(1, at=None), gone(2, at=(1, MERGE), why="it left")]) == (
        "node 1 (host1) is lost: silent; node 2 (host2) is lost: it left; last in iteration 1, phase 3 merge"
    )
    assert lost_as_text(entered, []) == ""


def test_lost_members_are_told_in_the_journal() -> None:
    entered = situation(at_row(0, OPEN))
    known = {"node_rank": 2, "host": "host2", "incarnation": 1}
    nowhere = {"iteration": None, "phase": None, "phase_name": ""}
    assert lost_as_fields(entered, [gone(at=None, age=None)]) == [
        {**known, "why": "silent", **nowhere, "beat_age_s": None}
    ]
    assert lost_as_fields(entered, [gone(at=(1, MERGE), age=15.12351)]) == [
        {
            **known,
            "why": "silent; last in iteration 1, phase 3 merge",
            "iteration": 1,
            "phase": 3,
            "phase_name": "merge",
            "beat_age_s": 15.124,
        }
    ]


def test_a_loss_that_others_found_is_told_with_what_this_node_knows() -> None:
    newest = generation(2, (0, 1), created_by=1, reason="node 2 is lost")
    (loss,) = found_by_others(
        situation(at_row(0, MERGE), ledger=heard(seen(2, ago=4.0, at=(1, MERGE)))), newest
    )
    assert loss == Loss(member(2), "found by node 1", seen(2, at=(1, MERGE)).beat, 4.0)


def test_a_loss_that_this_node_could_have_noticed_has_its_own_reason() -> None:
    newest = generation(2, (0,), created_by=0)
    ledger = heard(seen(1, ago=3.0), seen(2, ago=15.0))
    found = found_by_others(situation(at_row(0, MERGE), ledger=ledger), newest)
    assert [loss.why for loss in found] == ["found by node 0", "no heartbeat for 15.0 s"]


ENTERS_2 = step(waiting(0), sees(generation(2), ledger=Ledger(heard_until=NOW, missed_s=7.0)), NOW, rules())[
    0
]
LEAVES_1 = step(at_row(0, MERGE), sees(generation(2, (1, 2)), ledger=heard(missed_s=7.0)), NOW, rules())[0]


@pytest.mark.parametrize(("poll_gap_s", "lost"), [(1.5, []), (18.0, [1, 2])])
def test_time_in_which_this_node_was_stopped_is_no_silence_of_members_that_it_never_heard(
    poll_gap_s: float, lost: list[int]
) -> None:
    """I7: it entered its generation, was stopped before its next look, and then could not read their heartbeats."""
    ledger = Ledger(heard_until=NOW, missed_s=7.0).observe({}, NOW + 18.0, NOW + 18.0, poll_gap_s)
    situation = Situation(ENTERS_2, sees(ENTERS_2.generation, ledger=ledger), NOW + 18.0, rules())
    assert [loss.member.rank for loss in situation.gone] == lost
    left_out = found_by_others(situation, generation(3, (0,), created_by=3))
    assert [loss.why.startswith("no heartbeat") for loss in left_out] == [bool(lost)] * 2


def test_what_a_node_missed_before_it_entered_is_no_reason_to_wait_longer() -> None:
    for node in (ENTERS_2, LEAVES_1):
        assert node.watches_since(Ledger(missed_s=7.0)) == node.since == NOW


def test_a_member_that_came_back_as_another_start_was_lost_too() -> None:
    found = found_by_others(situation(at_row(0, MERGE)), generation(2, restarted={2: 2}))
    assert [loss.member for loss in found] == [member(2)]


@pytest.mark.parametrize(
    ("node", "newest"),
    [
        (at_row(0, MERGE), generation(2)),  # nobody is lost
        (at_row(0, MERGE), generation(2, (0, 1, 2, 3))),  # one came
        (
            at_row(0, MERGE, told_lost=frozenset({member(2)})),
            generation(2, (0, 1)),
        ),  # this node has told it already
        (waiting(0), generation(2, (0, 1))),  # it was in no generation
    ],
)
def test_no_loss_is_found_by_others_where_none_was_or_it_is_known_here(node: Node, newest: Any) -> None:
    assert found_by_others(situation(node), newest) == []


@pytest.mark.parametrize(
    ("ledger", "joins", "expected"),
    [
        (Ledger(), {}, "never seen"),
        (Ledger(), started(2), "never seen"),
        (heard(), {}, "never seen"),
        (heard(seen(2, ago=9.6)), started(2), "host2, running, last heartbeat 10 s ago"),
        (heard(seen(2, ago=3.0, at=(1, MERGE))), started(2), "host2, in merge, last heartbeat 3 s ago"),
    ],
)
def test_what_is_known_of_one_that_does_not_come(ledger: Ledger, joins: Any, expected: str) -> None:
    assert last_news(situation(waiting(0), newest=FIRST, ledger=ledger, joins=joins), 2) == expected
