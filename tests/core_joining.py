"""Rows of the state machine's tests: what others have decided, in any stage, and a node that waits to take part."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from core_builders import (
    ASSIGN,
    FIRST,
    LIMITS,
    MERGE,
    NOW,
    OPEN,
    ROLL_OUT,
    TABLE,
    UPDATE,
    asked_to_stop,
    at_row,
    decided,
    generation,
    heard,
    left_off,
    member,
    rules,
    seen,
    sees,
    started,
    waiters,
    waiting,
    worked,
)
from core_cases import ENDED, NOBODY, Case, ends, entered, goes_along, lost, over, proposes

from fsbarrier.protocol import machine
from fsbarrier.protocol.facts import Position, Verdict
from fsbarrier.protocol.membership import JOINING
from fsbarrier.protocol.state import (
    Action,
    CancelWork,
    Exit,
    FindResumePoint,
    Launch,
    Node,
    Note,
    Role,
    RowPart,
    View,
)

TWO_TO_THREE = rules(min_nodes=2, limits=replace(LIMITS, last_call_s=10.0))
TAKEN = "node 1 was started again on host1, process 7; this older one ends"
HOLDING_ON = at_row(1, ROLL_OUT)
STARTED_AGAIN = started(1, incarnation=2)
OTHER_CODE = started(1, incarnation=2, digest="b" * 64, version="0.2")
REFUSED = (
    "node 1 on host1 runs fsbarrier 0.2 (code bbbbbbbbbbbb), node 0 on host0 runs 0.1 (code aaaaaaaaaaaa); start all nodes with the same "
    "fsbarrier and program"
)


def back(rank: int = 0, *, for_s: float = 1.0, **fields: Any) -> Node:
    """The second start of a rank of generation 1."""
    return waiting(rank, for_s=for_s, **{"incarnation": 2, "baseline": 1, **fields})


ANY_STAGE = [
    Case(
        "a joining node whose rank was started again ends",
        waiting(1),
        sees(None, joins=STARTED_AGAIN),
        machine.end_when_rank_is_taken,
        ends(6, "left", TAKEN),
        ENDED,
    ),
    Case(
        "a newer start that only its heartbeat's name tells of has no host",
        HOLDING_ON,
        sees(joins=started(1, incarnation=2, host="")),
        machine.end_when_rank_is_taken,
        ends(6, "left", "node 1 was started again elsewhere; this older one ends"),
        ENDED,
    ),
    Case(
        "a joining node ends with the run",
        waiting(1),
        sees(over(4, "given up")),
        machine.end_with_the_run,
        ends(4, "broken", "given up"),
        ENDED,
    ),
    Case(
        "a member ends with the run, stopped where nothing was wrong",
        HOLDING_ON,
        sees(over(0, "as ann asked")),
        machine.end_with_the_run,
        ends(0, "stopped", "as ann asked"),
        ENDED,
    ),
    # --- other code
    Case(
        "a node with other code than a living member's is refused",
        back(1),
        sees(joins={**started(0, digest="a" * 64, version="0.1"), **OTHER_CODE}),
        machine.end_when_the_code_differs,
        ends(2, "left", REFUSED),
        ENDED,
    ),
    Case(
        "not because of what a killed session leaves behind",
        back(1),
        sees(
            joins={**started(0, digest="a" * 64), **OTHER_CODE},
            ledger=heard(seen(0, moved=False), seen(2, moved=False)),
        ),
        machine.wait_to_be_admitted,
    ),
    Case(
        "nor because of a member that has ended its session",
        back(1),
        sees(
            joins={**started(0, digest="a" * 64), **OTHER_CODE},
            ledger=heard(seen(0, state="finished", ago=20.0), seen(2, ago=20.0)),
        ),
        machine.look_where_the_run_was_left,
        (FindResumePoint(),),
    ),
    Case(
        "where a session begins, the lowest rank's code counts",
        back(1),
        sees(
            None,
            joins={**started(0, digest="a" * 64, version="0.1"), **OTHER_CODE},
            ledger=heard(seen(0, state=JOINING), ranks=()),
        ),
        machine.end_when_the_code_differs,
        ends(2, "left", REFUSED),
        ENDED,
    ),
    Case(
        "a lower rank's node does not count one with other code, and waits for a right one",
        waiting(0),
        sees(
            None,
            joins={**started(0, 2, digest="a" * 64), **started(1, digest="b" * 64)},
            ledger=heard(seen(1, state=JOINING), seen(2, state=JOINING), ranks=()),
            resume_point=left_off(),
        ),
        machine.wait_for_all_nodes,
    ),
    Case(
        "a verdict that was there before this start is an earlier session's",
        waiting(0, baseline=2),
        sees(over(), joins=started(0, 1, 2)),
        machine.look_where_the_run_was_left,
        (FindResumePoint(),),
    ),
    Case(
        "so is one that is listed late and names only earlier starts",
        waiting(0, incarnation=3, started_as=2),
        sees(over(), joins=started(1, 2)),
        machine.take_note_of_a_generation,
        becomes={"baseline": 2},
    ),
    Case(
        "and one that saw the others at work",
        waiting(2, incarnation=2, started_as=2, saw_others_at_work=True),
        sees(generation(2, verdict=Verdict(4, "failed")), joins=started(0, 1)),
        machine.end_with_the_run,
        ends(4, "broken", "failed"),
        ENDED,
    ),
    Case(
        "a joining node goes into the generation that names it, whatever it did before",
        waiting(1, for_s=50.0, saw_others_at_work=True, baseline=3),
        sees(generation(4, (1, 2), start=(3, ASSIGN), decisions={"merge": decided(2, {"a": 1})})),
        machine.enter_newer_generation,
        goes_along(generation(4, (1, 2), start=(3, ASSIGN), decisions={"merge": decided(2, {"a": 1})})),
        entered(
            1,
            generation(4, (1, 2), start=(3, ASSIGN), decisions={"merge": decided(2, {"a": 1})}),
            saw_others_at_work=True,
            baseline=3,
        ),
    ),
    Case(
        "a member that learns of a loss by the newer generation says so",
        HOLDING_ON,
        sees(generation(2, (0, 1), created_by=0), ledger=heard(seen(2, ago=5.0))),
        machine.enter_newer_generation,
        (
            Note("node_lost", {"lost": [lost(2, "found by node 0", age=5.0)]}, at=HOLDING_ON),
            *goes_along(generation(2, (0, 1))),
        ),
        entered(1, generation(2, (0, 1))),
    ),
    Case(
        "it says nothing of a loss that it has noticed itself",
        at_row(1, ROLL_OUT, trouble_since=NOW - 1, told_lost=frozenset({member(2)})),
        sees(generation(2, (0, 1)), ledger=heard(seen(2, ago=16.0))),
        machine.enter_newer_generation,
        goes_along(generation(2, (0, 1))),
        entered(1, generation(2, (0, 1))),
    ),
]

ALL_HERE = waiters(0, 1, 2)
#: of generation 1 all are gone; their next starts are here
ALL_BACK = waiters(0, 1, 2, incarnation=2)


def goes_on(**fields: Any) -> View:
    """What the second starts see once they know where generation 1 left the run."""
    return sees(FIRST, **{**ALL_BACK, "resume_point": left_off(2, ROLL_OUT, of=1), **fields})


def first(number: int = 1, ranks: tuple[int, ...] = (0, 1, 2), **fields: Any) -> tuple[Action, ...]:
    return proposes(number, ranks, **fields)


NOTHING_TO_DO = Exit(
    0, "finished", "the run has already done its 3 iterations; a larger --iterations goes on"
)
UP_TO_3 = started(0, 1, 2, incarnation=2, until=3)

#: of the same rows, one makes a node ready
READY_RULES = rules(
    table=replace(TABLE, rows=tuple(replace(row, ready=row.index == UPDATE) for row in TABLE.rows))
)
WITHOUT_1 = generation(2, (0, 2), start=(4, MERGE))
IS_BACK = {"joins": {**started(0, 2), **started(1, incarnation=2)}, "ledger": heard(ranks=(0, 2))}
AS_MEMBER = back(
    1,
    baseline=2,
    generation=generation(2, start=(4, MERGE), restarted={1: 2}, leader=0),
    position=Position(4, UPDATE),
)
ALL_KILLED = heard(seen(0, state="killed"), seen(2, state="killed"), ranks=())

GETTING_READY = [
    Case(
        "the others are about to go on without a node that is back: it does not ask to be admitted",
        back(1),
        sees(FIRST, **IS_BACK),
        machine.get_ready,
        becomes={"part": RowPart.GATHER},
        rules=READY_RULES,
    ),
    Case(
        "once they have, it makes itself ready, as if it were a member",
        back(1, baseline=2, part=RowPart.GATHER),
        sees(WITHOUT_1, **IS_BACK),
        machine.get_ready,
        (Launch(RowPart.EACH, at=replace(AS_MEMBER, part=RowPart.GATHER)),),
        {"part": RowPart.EACH},
        rules=READY_RULES,
    ),
    Case(
        "and so does one that was never there",
        back(1, baseline=2),
        sees(WITHOUT_1, **IS_BACK),
        machine.get_ready,
        (Launch(RowPart.EACH, at=AS_MEMBER),),
        {"part": RowPart.EACH},
        rules=READY_RULES,
    ),
    Case(
        "it waits meanwhile",
        back(1, baseline=2, part=RowPart.EACH, saw_others_at_work=True),
        sees(WITHOUT_1, **IS_BACK),
        machine.wait_to_be_admitted,
        rules=READY_RULES,
    ),
    Case(
        "ready or not: what has failed fails again where it counts",
        back(1, baseline=2, part=RowPart.EACH),
        sees(WITHOUT_1, work=worked(RowPart.EACH, ok=False), **IS_BACK),
        machine.get_ready,
        becomes={"part": RowPart.ANNOUNCED},
        rules=READY_RULES,
    ),
    Case(
        "a node that is ready waits",
        back(1, baseline=2, part=RowPart.ANNOUNCED, saw_others_at_work=True),
        sees(WITHOUT_1, **IS_BACK),
        machine.wait_to_be_admitted,
        rules=READY_RULES,
    ),
    Case(
        "a node for which the others wait asks at once",
        back(1, saw_others_at_work=True),
        sees(FIRST, **IS_BACK),
        machine.wait_to_be_admitted,
        rules=replace(READY_RULES, on_node_failure="wait"),
    ),
    Case(
        "also where it alone can hold a role",
        back(1, saw_others_at_work=True),
        sees(FIRST, **IS_BACK),
        machine.wait_to_be_admitted,
        rules=replace(READY_RULES, roles_of=lambda settings: [Role("update", frozenset({1}))]),
    ),
    Case(
        "also where another one that can hold it is lost as well",
        back(1, part=RowPart.GATHER),
        sees(FIRST, joins={**IS_BACK["joins"], **started(2, incarnation=2)}, ledger=IS_BACK["ledger"]),
        machine.get_ready,
        (CancelWork(),),
        {"part": RowPart.NONE},
        rules=replace(READY_RULES, roles_of=lambda settings: [Role("rollout", frozenset({1, 2}))]),
    ),
    Case(
        "also where it is no member, and those who go on without it have lost a role since",
        back(1, baseline=2, part=RowPart.EACH),
        sees(WITHOUT_1, joins=IS_BACK["joins"], ledger=heard(seen(2, state="killed"), ranks=(0,))),
        machine.get_ready,
        (CancelWork(),),
        {"part": RowPart.NONE},
        rules=replace(READY_RULES, roles_of=lambda settings: [Role("rollout", frozenset({1, 2}))]),
    ),
    Case(
        "not while enough of those that can hold it are at work",
        back(1, part=RowPart.NONE),
        sees(FIRST, **IS_BACK),
        machine.get_ready,
        becomes={"part": RowPart.GATHER},
        rules=replace(READY_RULES, roles_of=lambda settings: [Role("rollout", frozenset({0, 1, 2}), 2)]),
    ),
    Case(
        "if nobody is left at work, it is needed, and stops getting ready",
        back(1, baseline=2, part=RowPart.EACH),
        sees(WITHOUT_1, joins=IS_BACK["joins"], ledger=ALL_KILLED),
        machine.get_ready,
        (CancelWork(),),
        {"part": RowPart.NONE},
        rules=READY_RULES,
    ),
    Case(
        "where all start again, nobody gets ready first",
        back(1),
        sees(FIRST, joins=IS_BACK["joins"], ledger=ALL_KILLED),
        machine.look_where_the_run_was_left,
        (FindResumePoint(),),
        rules=READY_RULES,
    ),
]

JOINING_ROWS = [
    *GETTING_READY,
    Case(
        "once only",
        waiting(2, baseline=1),
        sees(generation(1, (0, 1)), joins=started(0, 1, 2)),
        machine.wait_to_be_admitted,
        becomes={"saw_others_at_work": True},
    ),
    Case(
        "a stop ends who waits, also before there is any generation",
        waiting(1),
        sees(None, stop=asked_to_stop()),
        machine.stop_before_the_start,
        ends(0, "stopped", "stopped before it began, as ann@host9 asked"),
        ENDED,
    ),
    Case(
        "a node that waited for a generation which has finished ends too",
        back(1, saw_others_at_work=True),
        sees(generation(1, until=5), ledger=heard(seen(0, state="stopped"), seen(2, state="finished"))),
        machine.end_when_too_late,
        (Exit(0, "finished", "the run has already done its 5 iterations; a larger --iterations goes on"),),
        ENDED,
    ),
    Case(
        "not where it ended otherwise",
        back(1, saw_others_at_work=True),
        sees(ledger=heard(seen(0, state="stopped"), seen(2, state="broken"))),
        machine.look_where_the_run_was_left,
        (FindResumePoint(),),
    ),
    Case(
        "what an older generation left is not what the newest did",
        back(0),
        goes_on(resume_point=left_off(2, ROLL_OUT, of=0)),
        machine.look_where_the_run_was_left,
        (FindResumePoint(),),
    ),
    Case(
        "what was read more than suspect_s ago is read anew",
        back(0),
        goes_on(resume_point=left_off(2, ROLL_OUT, of=1, ago=6.1)),
        machine.look_where_the_run_was_left,
        (FindResumePoint(),),
    ),
    Case(
        "what was read suspect_s ago serves",
        back(0),
        goes_on(resume_point=left_off(2, ROLL_OUT, of=1, ago=6.0, sealed=False)),
        machine.seal_the_old_generation,
        (FindResumePoint(seal=True),),
    ),
    Case(
        "when the run is done, node 0 stays a while, for those who are being started to hear it",
        back(0),
        goes_on(joins=UP_TO_3, ledger=NOBODY, resume_point=left_off(4, OPEN, of=1)),
        machine.end_when_all_is_done,
    ),
    Case(
        "who heard that from node 0 ends too, although that one has ended since",
        back(1, for_s=15.0),
        goes_on(
            joins=UP_TO_3,
            ledger=heard(seen(0, ago=3.0, state="finished", incarnation=2), ranks=()),
            resume_point=left_off(4, OPEN, of=1),
        ),
        machine.end_when_all_is_done,
        (NOTHING_TO_DO,),
        ENDED,
    ),
    Case(
        "a start of node 0 that it did not hear may be left of an earlier session, and the next one asks for more",
        back(1, for_s=15.0),
        goes_on(
            joins=UP_TO_3,
            ledger=heard(seen(0, ago=3.0, state="finished", incarnation=2, moved=False), ranks=()),
            resume_point=left_off(4, OPEN, of=1),
        ),
        machine.wait_for_all_nodes,
    ),
    Case(
        "how far it is meant to go says node 0, and not what is left of its last start",
        back(1),
        goes_on(
            joins={**UP_TO_3, **started(0, until=3)},
            ledger=heard(seen(0, ago=15.0), ranks=()),
            resume_point=left_off(4, OPEN, of=1),
        ),
        machine.wait_for_all_nodes,
    ),
    Case(
        "whether it is done is asked of the slice that node 0 was started for",
        back(0),
        goes_on(
            joins=started(0, 1, 2, incarnation=2, until=1, choices={"rl_phase": "update"}),
            resume_point=left_off(
                2, OPEN, of=1, decisions={"merge": decided(1, {}), "publish": decided(1, {})}
            ),
        ),
        machine.end_when_all_is_done,
        (Exit(0, "finished", "the run has already done its 1 iteration; a larger --iterations goes on"),),
        ENDED,
    ),
    Case(
        "the update of an iteration whose rollouts alone are done is not",
        back(0),
        goes_on(
            joins=started(0, 1, 2, incarnation=2, until=1, choices={"rl_phase": "update"}),
            ledger=NOBODY,
            resume_point=left_off(2, OPEN, of=1, decisions={"merge": decided(1, {})}),
        ),
        machine.wait_for_all_nodes,
    ),
    Case(
        "two are too few where three are the least",
        waiting(0, for_s=60.0),
        sees(None, **waiters(0, 1), resume_point=left_off()),
        machine.give_up_waiting,
        ends(5, "left", "waited 60 s for node 2 (never seen); 2 of 3 nodes are here"),
        ENDED,
        rules=rules(min_nodes=3),
    ),
    Case(
        "where two of three may begin, a last call begins when the second is here",
        waiting(0, for_s=30.0, starting_nodes=1, starting_since=NOW - 20.0),
        sees(None, **waiters(0, 1), resume_point=left_off()),
        machine.restart_the_last_call,
        becomes={"starting_nodes": 2, "starting_since": NOW},
        rules=TWO_TO_THREE,
    ),
    Case(
        "also where a run waits for the lost",
        waiting(0, for_s=30.0, starting_nodes=2, starting_since=NOW - 10.0),
        sees(None, **waiters(0, 1), resume_point=left_off()),
        machine.form_a_generation,
        first(ranks=(0, 1)),
        rules=replace(TWO_TO_THREE, on_node_failure="wait"),
    ),
    Case(
        "a higher rank leaves the first turn to a lower one after it, too",
        waiting(1, for_s=300.0, starting_nodes=2, starting_since=NOW - 10.0),
        sees(None, **waiters(0, 1), resume_point=left_off()),
        machine.let_lower_ranks_go_first,
        rules=TWO_TO_THREE,
    ),
    Case(
        "one alone is no last call, and waits for all of its time",
        waiting(0, for_s=59.9, starting_nodes=1, starting_since=NOW - 59.0),
        sees(None, **waiters(0), resume_point=left_off()),
        machine.wait_for_all_nodes,
        rules=TWO_TO_THREE,
    ),
    Case(
        "where a run waits for the lost, all must be there to begin",
        back(0, for_s=61.0),
        sees(
            FIRST,
            joins=started(0, 1, 2, incarnation=2),
            ledger=heard(
                seen(1, ago=20.0, at=(2, MERGE)), seen(2, ago=30.0, incarnation=2, state="joining"), ranks=()
            ),
            resume_point=left_off(of=1),
        ),
        machine.give_up_waiting,
        ends(
            5,
            "left",
            "waited 61 s for node 1 (host1, in merge, last heartbeat 20 s ago), "
            "node 2 (host2, joining, last heartbeat 30 s ago); 1 of 3 nodes are here",
        ),
        ENDED,
        rules=rules(on_node_failure="wait"),
    ),
    Case(
        "where all are there it begins",
        waiting(0),
        sees(None, **ALL_HERE, resume_point=left_off()),
        machine.form_a_generation,
        first(),
        rules=rules(on_node_failure="wait"),
    ),
    Case(
        "and no longer",
        waiting(1, for_s=19.0),
        sees(None, **ALL_HERE, resume_point=left_off()),
        machine.form_a_generation,
        first(created_by=1),
    ),
    Case(
        "then the run goes on from where it was left, with what was decided and what node 0 was started with",
        back(0),
        goes_on(
            joins={**ALL_BACK["joins"], **started(0, incarnation=2, until=7, choices={"a": "b"})},
            resume_point=left_off(
                2, ASSIGN, of=1, decisions={"merge": decided(1, {"n": 1}), "assign": decided(2, {})}
            ),
        ),
        machine.form_a_generation,
        first(
            2,
            start=(2, ASSIGN),
            reason="start again",
            restarted={0: 2, 1: 2, 2: 2},
            decisions={"merge": decided(1, {"n": 1})},
            until=7,
            choices={"a": "b"},
        ),
    ),
    Case(
        "a run that is done as far as those know who came is not begun",
        back(1, for_s=60.0),
        goes_on(
            **{
                **waiters(1, 2, incarnation=2),
                "joins": {**started(0), **started(1, 2, incarnation=2, until=3)},
                "resume_point": left_off(4, OPEN, of=1),
            }
        ),
        machine.end_when_all_is_done,
        (NOTHING_TO_DO,),
        ENDED,
    ),
    Case(
        "one that beats as a member does not wait to be taken in",
        waiting(0),
        sees(
            None,
            joins=started(0, 1, 2),
            ledger=heard(seen(1, state=JOINING), seen(2), ranks=()),
            resume_point=left_off(),
        ),
        machine.wait_for_all_nodes,
    ),
]
