"""Rows of the state machine's tests: a node in a generation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from core_builders import (
    ASSIGN,
    CLOSE,
    MERGE,
    NOW,
    OPEN,
    PROBE,
    PUBLISH,
    ROLL_OUT,
    UPDATE,
    asked_to_stop,
    at_row,
    decided,
    done,
    failed,
    failures,
    generation,
    heard,
    member,
    rules,
    seen,
    sees,
    started,
    worked,
)
from core_cases import ENDED, Case, ends, is_lost, lost, node_lost, place, proposes

from fsbarrier.group.collective import answers
from fsbarrier.protocol import machine
from fsbarrier.protocol.facts import SEALED, Fact, FailedProgram, Member, Payload, Position, Verdict
from fsbarrier.protocol.membership import JOINING
from fsbarrier.protocol.state import (
    Action,
    Announce,
    CancelWork,
    Entered,
    Exit,
    Launch,
    Node,
    Note,
    Publish,
    Role,
    RowPart,
    Stage,
    View,
)

# The caller of a group has asked for the generation after the first.
ASKED = answers(regroup_after=1)
SEAL = Fact(2, 1, SEALED)
SUSPECTED = frozenset({member(2)})
# The journal names the losses, which were noticed just now.
TOLD: dict[str, Any] = {"trouble_since": NOW, "told_lost": frozenset({member(2)})}
TOLD_OF_BOTH = frozenset({member(1), member(2)})
# Losses that the journal has, noticed just now.
TOLD: dict[str, Any] = {"trouble_since": NOW, "told_lost": frozenset({member(2)})}
TOLD_OF_BOTH = frozenset({member(1), member(2)})
# Nodes 1 and 2 roll out.
SAMPLES = Role("rollout", frozenset({1, 2}))
# Nodes 0 and 1 train, and node 2 rolls out meanwhile.
TRAINS = Role("trains", frozenset({0, 1}))
# Node 1 is back, and node 2 was killed after it.
ONE_IS_BACK: dict[str, Any] = {
    "joins": started(1, incarnation=2),
    "ledger": heard(
        replace(seen(1, incarnation=2, state=JOINING), before=seen(1, ago=5.0)), seen(2, state="killed")
    ),
}


def holding(role: Role, settings: Payload) -> list[Role]:
    return [role]


LEFT_BEHIND = Note("left_generation", {"newest": 2, "reason": "start"})
ALL = frozenset({0, 1, 2})
# The generation after node 1's program failed: for the first time, and for the second in the same way.
AGAIN: dict[str, Any] = {
    "start": (1, ASSIGN),
    "reason": f"again: node 1 (host1), {place(ROLL_OUT)}: no memory",
    "failures": (FailedProgram(1, 1, ROLL_OUT, "no memory"),),
}
LEFT_OUT: dict[str, Any] = {
    "start": (1, ASSIGN),
    "reason": f"node 1 (host1) cannot work and leaves: node 1 (host1), {place(ROLL_OUT)}: no memory; given up after 2 attempts, "
    "as it failed in the same way before",
    "failures": (FailedProgram(0, 1, ROLL_OUT, "no memory"),) * 2,
    "dismissed": (Member(1, 1, "host1"),),
}


def passes(name: str, node: Node, view: View, *asks: Action, becomes: Mapping[str, Any]) -> Case:
    """A row in which the node leaves the one it was in: the journal is told so, also where the iteration ends with it."""
    then = replace(node, **becomes)
    there = replace(node, decisions=then.decisions)
    told = [Note("phase_finished", at=there)]
    if then.stage is Stage.ENDED or then.position.iteration > node.position.iteration:
        told.append(Note("iteration_finished", at=there))
    if then.stage is Stage.RUNNING:
        told.append(Entered(then.position, node.generation))
    return Case(name, node, view, machine.release, (*told, *asks), becomes)


def publishes(rank: int, value: dict[str, Any] | None = None, work_s: float = 0.0) -> tuple[Action, ...]:
    return (Publish(done(rank, value, work_s)),)


def released(value: dict[str, Any] | None = None, **fields: Any) -> View:
    """What a node sees of a row in which all are done and the leader has decided `value`."""
    return sees(**{"arrived": ALL, "leaders_fact": done(0, value), **fields})


HERE = at_row(1, ROLL_OUT, RowPart.ANNOUNCED)
STOPS: dict[str, Any] = {"stop": asked_to_stop()}
STOPPED = Verdict(0, "stopped at once, as ann@host9 asked")
AT_START = Verdict(0, "stopped before iteration 2, as ann@host9 asked")
ROLLED_OUT_ONLY = generation(choices={"rl_phase": "rollout"})
UPDATES_ONLY = generation(choices={"rl_phase": "update"}, start=(1, PROBE))

RUNNING_ROWS = [
    Case(
        "the others went on without this node: it comes back as its next start",
        at_row(1, ROLL_OUT, result={"a": 1}, decisions={"assign": decided(1, {})}, trouble_since=NOW),
        sees(generation(2, (0, 2))),
        machine.rejoin_when_left_behind,
        (CancelWork(), LEFT_BEHIND, Announce(2)),
        Node(1, 2, NOW, "host1", baseline=2, saw_others_at_work=True, part=RowPart.ANNOUNCED),
    ),
    # --- stops
    Case(
        "a stop at once is decided in any row, by whoever sees it",
        at_row(2, ROLL_OUT),
        sees(stop=asked_to_stop(now=True)),
        machine.stop_when_asked,
        proposes(2, start=(1, ASSIGN), reason=STOPPED.reason, verdict=STOPPED, created_by=2),
    ),
    Case("and not within one", at_row(1, ROLL_OUT, iteration=2), sees(stop=asked_to_stop()), None),
    Case(
        "where only updates are run, an iteration starts in the slice's first row",
        at_row(1, PROBE, iteration=2, generation=UPDATES_ONLY),
        sees(UPDATES_ONLY, stop=asked_to_stop()),
        machine.stop_when_asked,
        proposes(
            2,
            start=(2, PROBE),
            reason=AT_START.reason,
            verdict=AT_START,
            choices={"rl_phase": "update"},
            created_by=1,
        ),
    ),
    # --- a seal
    Case(
        "whoever sees a seal notes when",
        at_row(1, ROLL_OUT, RowPart.ANNOUNCED),
        sees(leaders_fact=SEAL, arrived=ALL),
        machine.go_on_behind_a_seal,
        (),
        {"trouble_since": NOW},
    ),
    Case(
        "behind a seal the lowest rank goes on at once",
        at_row(
            0, ROLL_OUT, RowPart.ANNOUNCED, generation=generation(failures=failures(1)), trouble_since=NOW
        ),
        sees(leaders_fact=SEAL, arrived=ALL),
        machine.go_on_behind_a_seal,
        proposes(2, start=(1, ASSIGN), reason="node 2 ended the one before", failures=failures(1)),
    ),
    Case(
        "the others leave that to it until their turn, and do not forget since when they wait",
        at_row(1, ROLL_OUT, RowPart.ANNOUNCED, trouble_since=NOW - 3.9),
        sees(leaders_fact=SEAL, arrived=ALL),
        None,
    ),
    Case(
        "a member that is lost at a seal is a loss first",
        at_row(0, ROLL_OUT, RowPart.ANNOUNCED, **TOLD),
        sees(leaders_fact=SEAL, arrived=ALL, ledger=heard(seen(2, ago=15.0))),
        machine.shrink_after_a_loss,
        proposes(2, (0, 1), start=(1, ASSIGN), reason=is_lost(2)),
    ),
    # --- on to the next row
    passes(
        "all are done, and the leader has decided: on to the next row, with its decision",
        at_row(1, ASSIGN, RowPart.ANNOUNCED, result={"old": 1}, work_s=3.0, trouble_since=NOW),
        released({"share": [1]}),
        Launch(RowPart.EACH),
        becomes={
            "position": Position(1, ROLL_OUT),
            "part": RowPart.EACH,
            "result": {},
            "work_s": 0.0,
            "decisions": {"assign": decided(1, {"share": [1]})},
            "trouble_since": None,
        },
    ),
    passes(
        "an empty decision is none",
        at_row(1, ASSIGN, RowPart.ANNOUNCED),
        released(),
        Launch(RowPart.EACH),
        becomes={"position": Position(1, ROLL_OUT), "part": RowPart.EACH},
    ),
    passes(
        "a later decision keeps the one before below it",
        at_row(1, MERGE, RowPart.ANNOUNCED, iteration=2, decisions={"merge": decided(1, {"n": 1})}),
        released({"n": 2}),
        Launch(RowPart.EACH),
        becomes={
            "position": Position(2, PROBE),
            "part": RowPart.EACH,
            "decisions": {"merge": decided(2, {"n": 2}, before=(1, {"n": 1}))},
        },
    ),
    passes(
        "into a row of the leader's, the leader goes to do it",
        at_row(0, OPEN, RowPart.ANNOUNCED),
        released(),
        becomes={"position": Position(1, ASSIGN), "part": RowPart.GATHER},
    ),
    passes(
        "and the others have done all that they have to do there",
        at_row(1, OPEN, RowPart.ANNOUNCED),
        released(),
        *publishes(1),
        becomes={"position": Position(1, ASSIGN)},
    ),
    passes(
        "into a row without work goes everybody so",
        at_row(0, PUBLISH, RowPart.ANNOUNCED),
        released(),
        *publishes(0),
        becomes={"position": Position(1, CLOSE)},
    ),
    passes(
        "the last row leads into the next iteration, which is not begun at once",
        at_row(1, CLOSE, RowPart.ANNOUNCED),
        released(),
        becomes={"position": Position(2, OPEN), "part": RowPart.NONE},
    ),
    passes(
        "in the last iteration but one too",
        at_row(1, CLOSE, RowPart.ANNOUNCED, iteration=2, generation=generation(until=3)),
        released(),
        becomes={"position": Position(3, OPEN), "part": RowPart.NONE},
    ),
    passes(
        "the last row of the last iteration ends the run for this node",
        at_row(1, CLOSE, RowPart.ANNOUNCED, iteration=3, generation=generation(until=3)),
        released({"n": 3}),
        Exit(0, "finished", "3 iterations are done"),
        becomes={"stage": Stage.ENDED, "decisions": {"close": decided(3, {"n": 3})}},
    ),
    passes(
        "a run that is already beyond it ends there too",
        at_row(1, CLOSE, RowPart.ANNOUNCED, iteration=3, generation=generation(until=2)),
        released(),
        Exit(0, "finished", "3 iterations are done"),
        becomes=ENDED,
    ),
    passes(
        "not any other row of the last iteration",
        at_row(1, PUBLISH, RowPart.ANNOUNCED, iteration=3, generation=generation(until=3)),
        released(),
        *publishes(1),
        becomes={"position": Position(3, CLOSE)},
    ),
    passes(
        "a slice ends the iteration in its own last row",
        at_row(1, MERGE, RowPart.ANNOUNCED, generation=ROLLED_OUT_ONLY),
        released(),
        becomes={"position": Position(2, OPEN), "part": RowPart.NONE},
    ),
    passes(
        "a later slice begins the next one in its own first row",
        at_row(1, CLOSE, RowPart.ANNOUNCED, generation=UPDATES_ONLY),
        released(),
        becomes={"position": Position(2, PROBE), "part": RowPart.NONE},
    ),
    Case("one member is not there yet", HERE, released(arrived=frozenset({0, 1})), None),
    Case("the leader's fact is not there yet", HERE, sees(arrived=ALL), None),
    Case("who is not done itself does not pass", at_row(1, ROLL_OUT), released(), None),
    passes(
        "a barrier that all have reached is passed, however silent its members",
        HERE,
        released(ledger=heard(seen(0, ago=99.0), seen(2, ago=99.0))),
        Launch(RowPart.EACH),
        becomes={"position": Position(1, MERGE), "part": RowPart.EACH},
    ),
    # --- a group's own wish for the next generation
    Case(
        "a group is formed anew of the living when its caller asks, by anybody",
        at_row(1, ROLL_OUT),
        sees(ledger=heard(seen(2, ago=15.0))),
        ASKED[0],
        proposes(2, (0, 1), start=(1, ASSIGN), reason=is_lost(2), created_by=1),
        answers=ASKED,
    ),
    Case(
        "nobody need be lost for that, and who waits is taken in",
        at_row(2, ROLL_OUT),
        sees(joins=started(0, 1, 2, 3), ledger=heard(seen(3, state=JOINING))),
        ASKED[0],
        proposes(2, (0, 1, 2, 3), start=(1, ASSIGN), reason="regroup", created_by=2),
        rules=rules(num_nodes=4),
        answers=ASKED,
    ),
    Case(
        "one that was started again and was not heard yet is given a moment",
        at_row(0, ROLL_OUT),
        sees(joins=started(0, 1) | started(2, incarnation=2), ledger=heard()),
        ASKED[0],
        becomes={"trouble_since": NOW},
        answers=ASKED,
    ),
    Case(
        "then they go on without it",
        at_row(0, ROLL_OUT, trouble_since=NOW - 4.0),
        sees(joins=started(0, 1) | started(2, incarnation=2), ledger=heard()),
        ASKED[0],
        proposes(2, (0, 1), start=(1, ASSIGN), reason=is_lost(2, "restarted as incarnation 2")),
        answers=ASKED,
    ),
    Case(
        "a wish for the end of an earlier generation is fulfilled",
        at_row(0, ROLL_OUT, generation=generation(2)),
        sees(generation(2)),
        None,
        answers=ASKED,
    ),
    Case(
        "before a group's caller asks, a loss changes nothing",
        at_row(0, ROLL_OUT, suspected=SUSPECTED),
        sees(ledger=heard(seen(2, ago=15.0))),
        None,
        answers=answers(regroup_after=0),
    ),
    Case(
        "nor does a generation of a group end because it is long",
        at_row(0, OPEN, RowPart.NONE, iteration=5),
        sees(),
        machine.begin_the_row,
        publishes(0),
        {"part": RowPart.ANNOUNCED},
        rules(longest=3),
        answers=answers(regroup_after=0),
    ),
    # --- a failed program
    Case(
        "a member's program failed: end what this node does of this attempt",
        at_row(0, ROLL_OUT),
        sees(failed=failed(1)),
        machine.end_work_after_a_failure,
        (CancelWork(),),
        {"failed_since": NOW},
    ),
    Case(
        "not before it is clear whether a node was lost by it",
        at_row(0, ROLL_OUT, **TOLD),
        sees(failed=failed(1), ledger=heard(seen(2, ago=15.0))),
        machine.shrink_after_a_loss,
        proposes(2, (0, 1), start=(1, ASSIGN), reason=is_lost(2)),
    ),
    Case(
        "not at once: what was missing may come back",
        at_row(0, ROLL_OUT, failed_since=NOW - 7.9),
        sees(failed=failed(1)),
        None,
    ),
    Case(
        "not where the failure is a loss after all",
        at_row(0, ROLL_OUT, failed_since=NOW - 9.0, **TOLD),
        sees(failed=failed(1), ledger=heard(seen(2, state="left"))),
        machine.shrink_after_a_loss,
        proposes(
            2,
            (0, 1),
            start=(1, ASSIGN),
            reason=is_lost(2, "it was stopped by hand or ended in an error"),
        ),
    ),
    Case(
        "not while a listing does not show the failure any more",
        at_row(0, ROLL_OUT, failed_since=NOW - 9.0),
        sees(),
        None,
    ),
    Case(
        "a beat later, and not as the failure was seen",
        at_row(0, ROLL_OUT, failed_since=NOW - 2.0, generation=generation(failures=failures(2))),
        sees(failed=failed(1)),
        None,
    ),
    Case(
        "this node itself need not be heard",
        at_row(0, ROLL_OUT, failed_since=NOW - 8.0),
        sees(failed=failed(0), ledger=heard(seen(0, ago=50.0))),
        machine.try_again_after_a_failure,
        proposes(
            2,
            start=(1, ASSIGN),
            reason=f"again: node 0 (host0), {place(ROLL_OUT)}: no memory",
            failures=(FailedProgram(1, 0, ROLL_OUT, "no memory"),),
        ),
    ),
    Case(
        "after the last retry, the run ends at once, with what the program said last",
        at_row(0, ROLL_OUT, failed_since=NOW - 2.1, generation=generation(failures=failures(2, rank=0))),
        sees(failed=failed(1, log=("one", "two"))),
        machine.try_again_after_a_failure,
        proposes(
            2,
            start=(1, ASSIGN),
            reason="program failed",
            verdict=Verdict(
                4,
                f"node 1 (host1), {place(ROLL_OUT)}: no memory; given up after 3 attempts\n  | one\n  | two",
            ),
        ),
    ),
    Case(
        "a node that alone failed in each attempt is left out at once",
        at_row(0, ROLL_OUT, failed_since=NOW - 2.1, generation=generation(failures=AGAIN["failures"])),
        sees(failed=failed(1)),
        machine.try_again_after_a_failure,
        proposes(2, (0, 2), **LEFT_OUT),
    ),
    Case(
        "and it leaves, with what its program said last",
        at_row(1, ROLL_OUT, failed_since=NOW - 9.0),
        sees(generation(2, (0, 2), **LEFT_OUT), failed=failed(1, log=("one", "two"))),
        machine.leave_when_dismissed,
        ends(4, "left", f"{LEFT_OUT['reason']}\n  | one\n  | two"),
        ENDED,
    ),
    # --- a lost node
    Case(
        "who seemed to be lost was heard again: nothing is the matter",
        at_row(1, ROLL_OUT, **TOLD),
        sees(),
        machine.forget_a_false_alarm,
        becomes={"trouble_since": None, "told_lost": frozenset()},
    ),
    Case(
        "the journal tells of a member that has been silent for suspect_s",
        at_row(0, ROLL_OUT),
        sees(ledger=heard(seen(2, ago=6.0))),
        machine.log_suspicions,
        (Note("node_suspected", {"suspect": 2, "host": "host2", "silent_s": 6.0}),),
        {"suspected": SUSPECTED},
    ),
    Case(
        "once",
        at_row(0, ROLL_OUT, suspected=SUSPECTED),
        sees(ledger=heard(seen(2, ago=9.0))),
        None,
    ),
    Case(
        "and of one that is heard again",
        at_row(0, ROLL_OUT, suspected=SUSPECTED),
        sees(),
        machine.log_suspicions,
        (Note("node_recovered", {"suspect": 2, "host": "host2"}),),
        {"suspected": frozenset()},
    ),
    Case(
        "nobody is suspected who has said that nothing is left to do",
        at_row(0, ROLL_OUT),
        sees(ledger=heard(seen(2, ago=9.0, state="finished"))),
        None,
    ),
    Case(
        "nor is anybody with `abort`",
        at_row(0, ROLL_OUT, suspected=SUSPECTED),
        sees(ledger=heard(seen(2, ago=14.0))),
        None,
        rules=rules(on_node_failure="abort"),
    ),
    Case(
        "nor with `wait`",
        at_row(0, ROLL_OUT, suspected=SUSPECTED),
        sees(ledger=heard(seen(2, ago=14.0))),
        None,
        rules=rules(on_node_failure="wait"),
    ),
    Case(
        "the journal first names who is lost",
        at_row(0, ROLL_OUT),
        sees(ledger=heard(seen(2, ago=15.0))),
        machine.log_losses,
        (node_lost(lost(2, "no heartbeat for 15.0 s", age=15.0)),),
        TOLD,
    ),
    Case(
        "and whoever is lost after that, too",
        at_row(0, ROLL_OUT, **TOLD),
        sees(ledger=heard(seen(1, ago=15.0), seen(2, ago=19.0))),
        machine.log_losses,
        (node_lost(lost(1, "no heartbeat for 15.0 s", age=15.0)),),
        {"told_lost": TOLD_OF_BOTH},
    ),
    Case(
        "then the lowest rank proposes that the others go on",
        at_row(0, ROLL_OUT, decisions={"open": decided(1, {}), "assign": decided(1, {})}, **TOLD),
        sees(ledger=heard(seen(2, ago=15.0))),
        machine.shrink_after_a_loss,
        proposes(2, (0, 1), start=(1, ASSIGN), reason=is_lost(2), decisions={"open": decided(1, {})}),
    ),
    Case(
        "a higher rank lets the lower ones go first",
        at_row(1, ROLL_OUT, suspected=SUSPECTED, **TOLD),
        sees(ledger=heard(seen(2, ago=15.0))),
        None,
    ),
    Case(
        "a rank below it that is lost itself has no turn; the next lowest leads",
        at_row(
            1,
            ROLL_OUT,
            generation=generation(failures=failures(2)),
            trouble_since=NOW,
            told_lost=frozenset({member(0)}),
        ),
        sees(ledger=heard(seen(0, ago=15.0))),
        machine.shrink_after_a_loss,
        proposes(2, (1, 2), start=(1, ASSIGN), reason=is_lost(0), created_by=1, failures=failures(2)),
    ),
    Case(
        "those who are left are just enough",
        at_row(0, ROLL_OUT, **TOLD),
        sees(ledger=heard(seen(2, ago=15.0))),
        machine.shrink_after_a_loss,
        proposes(2, (0, 1), start=(1, ASSIGN), reason=is_lost(2)),
        rules=rules(min_nodes=2),
    ),
    Case(
        "those who are left are too few: the run ends",
        at_row(0, ROLL_OUT, **TOLD),
        sees(ledger=heard(seen(2, ago=15.0))),
        machine.shrink_after_a_loss,
        proposes(
            2,
            (0, 1),
            start=(1, ASSIGN),
            reason=is_lost(2),
            verdict=Verdict(5, f"{is_lost(2)}; 2 left, --min-nodes is 3"),
        ),
        rules=rules(min_nodes=3),
    ),
    Case(
        "with `abort` a loss ends the run",
        at_row(0, ROLL_OUT, **TOLD),
        sees(ledger=heard(seen(2, ago=15.0))),
        machine.abort_after_a_loss,
        proposes(
            2,
            (0, 1),
            start=(1, ASSIGN),
            reason=is_lost(2),
            verdict=Verdict(5, f"{is_lost(2)}; --on-node-failure abort ends the run"),
        ),
        rules=rules(on_node_failure="abort"),
    ),
    Case(
        "with `wait` the journal says that the row waits",
        at_row(0, ROLL_OUT),
        sees(ledger=heard(seen(2, ago=15.0))),
        machine.log_losses,
        (node_lost(lost(2, "no heartbeat for 15.0 s", age=15.0), waiting=True),),
        TOLD,
        rules=rules(on_node_failure="wait"),
    ),
    Case(
        "it holds until rejoin_timeout_s is over",
        at_row(0, ROLL_OUT, suspected=SUSPECTED, **{**TOLD, "trouble_since": NOW - 89.9}),
        sees(ledger=heard(seen(2, ago=99.0))),
        None,
        rules=rules(on_node_failure="wait"),
    ),
    Case(
        "then the run ends",
        at_row(0, ROLL_OUT, **{**TOLD, "trouble_since": NOW - 90.0}),
        sees(ledger=heard(seen(2, ago=99.0))),
        machine.wait_for_the_lost,
        proposes(
            2,
            (0, 1),
            start=(1, ASSIGN),
            reason=is_lost(2, "no heartbeat for 99.0 s"),
            verdict=Verdict(5, f"{is_lost(2, 'no heartbeat for 99.0 s')}; not back within 90 s"),
        ),
        rules=rules(on_node_failure="wait"),
    ),
    Case(
        "it goes on with all once the lost one waits to be taken in",
        at_row(0, ROLL_OUT, **{**TOLD, "trouble_since": NOW - 20.0}),
        sees(joins=started(2, incarnation=2), ledger=heard(seen(2, incarnation=2, state=JOINING))),
        machine.wait_for_the_lost,
        proposes(2, start=(1, ASSIGN), restarted={2: 2}, reason=is_lost(2, "restarted as incarnation 2")),
        rules=rules(on_node_failure="wait"),
    ),
    Case(
        "where nobody is left that holds a role, the others wait, and say so",
        at_row(0, ROLL_OUT),
        sees(ledger=heard(seen(1, ago=15.0), seen(2, ago=15.0))),
        machine.log_losses,
        (
            node_lost(
                lost(1, "no heartbeat for 15.0 s", age=15.0),
                lost(2, "no heartbeat for 15.0 s", age=15.0),
                waiting=True,
            ),
        ),
        {"trouble_since": NOW, "told_lost": TOLD_OF_BOTH},
        rules=rules(roles_of=partial(holding, SAMPLES)),
    ),
    Case(
        "they go on with one of those that hold it, without the other",
        at_row(0, ROLL_OUT, trouble_since=NOW - 20.0, told_lost=TOLD_OF_BOTH),
        sees(**ONE_IS_BACK),
        machine.wait_for_the_lost,
        proposes(
            2,
            (0, 1),
            start=(1, ASSIGN),
            restarted={1: 2},
            reason=f"{is_lost(1, 'restarted as incarnation 2')}; {is_lost(2, 'its daemon was killed')}",
        ),
        rules=rules(roles_of=partial(holding, SAMPLES)),
    ),
    Case(
        "and with one that was no member any more",
        at_row(
            0,
            ROLL_OUT,
            trouble_since=NOW - 20.0,
            told_lost=TOLD_OF_BOTH,
            generation=generation(1, (0, 2)),
        ),
        sees(generation(1, (0, 2)), **ONE_IS_BACK),
        machine.wait_for_the_lost,
        proposes(2, (0, 1), start=(1, ASSIGN), restarted={1: 2}, reason=is_lost(2, "its daemon was killed")),
        rules=rules(roles_of=partial(holding, SAMPLES)),
    ),
    *(
        Case(
            f"not with one where {what}",
            at_row(0, ROLL_OUT, trouble_since=NOW - 20.0, told_lost=TOLD_OF_BOTH),
            sees(**ONE_IS_BACK),
            None,
            rules=rules(roles_of=partial(holding, role), min_nodes=least),
        )
        for what, role, least in (
            ("two must hold it together", replace(SAMPLES, least=2), 1),
            ("--min-nodes asks for more", SAMPLES, 3),
        )
    ),
    # --- a row whose result some members make
    Case(
        "who is lost there does not end the work of those who make it: they finish it first",
        at_row(0, UPDATE),
        sees(ledger=heard(seen(2, ago=15.0)), arrived=frozenset({1})),
        machine.log_losses,
        (node_lost(lost(2, "no heartbeat for 15.0 s", age=15.0, phase=UPDATE), finishing=True),),
        TOLD,
        rules=rules(roles_of=partial(holding, TRAINS)),
    ),
    *(
        Case(
            f"nobody answers the loss until then, also {how}",
            at_row(1, UPDATE, RowPart.ANNOUNCED, suspected=frozenset({gone}), told_lost=frozenset({gone})),
            sees(ledger=heard(seen(gone.rank, ago=15.0)), arrived=arrived, **more),
            None,
            rules=rules(roles_of=partial(holding, role), on_node_failure=policy),
        )
        for how, gone, arrived, role, policy, more in (
            ("with `wait`", member(2), {1}, TRAINS, "wait", {}),
            ("of the leader, who was done", member(0), {0}, Role("trains", frozenset({0, 2})), "shrink", {}),
            ("if somebody asks to stop", member(0), {1}, Role("trains", frozenset({1, 2})), "wait", STOPS),
        )
    ),
    Case(
        "once they are all done, the next generation takes what they have made",
        at_row(2, UPDATE, trouble_since=NOW - 9.0, told_lost=frozenset({member(0), member(1)})),
        sees(ledger=heard(seen(0, ago=15.0), seen(1, ago=15.0)), arrived=frozenset({0, 1})),
        machine.shrink_after_a_loss,
        proposes(
            2,
            (2,),
            start=(1, PUBLISH),
            reason=f"{is_lost(0, phase=UPDATE)}; {is_lost(1, phase=UPDATE)}",
            created_by=2,
        ),
        rules=rules(roles_of=partial(holding, replace(TRAINS, least=0))),
    ),
    Case(
        "if one of them is lost in the middle, it is made again",
        at_row(0, UPDATE, **TOLD),
        sees(ledger=heard(seen(2, ago=15.0)), arrived=frozenset({0, 1})),
        machine.shrink_after_a_loss,
        proposes(2, (0, 1), start=(1, PROBE), reason=is_lost(2, phase=UPDATE)),
    ),
    Case(
        "and if a seal has the name of the leader's fact",
        at_row(1, UPDATE, RowPart.ANNOUNCED, trouble_since=NOW, told_lost=frozenset({member(0)})),
        sees(ledger=heard(seen(0, ago=15.0)), arrived=frozenset({0, 1}), leaders_fact=SEAL),
        machine.shrink_after_a_loss,
        proposes(2, (1, 2), start=(1, PROBE), reason=is_lost(0, phase=UPDATE), created_by=1),
        rules=rules(roles_of=partial(holding, TRAINS)),
    ),
    Case(
        "the last one to be done first says so",
        at_row(0, UPDATE, **TOLD),
        sees(ledger=heard(seen(2, ago=15.0)), work=worked(RowPart.EACH)),
        machine.finish_the_work,
        publishes(0, work_s=2.0),
        {"part": RowPart.ANNOUNCED, "work_s": 2.0},
    ),
    Case(
        "a program that fails beside them does not end their work",
        at_row(0, UPDATE),
        sees(failed=failed(2), arrived=frozenset({1})),
        None,
        rules=rules(roles_of=partial(holding, TRAINS)),
    ),
    Case(
        "it is answered once they are done",
        at_row(0, UPDATE, RowPart.ANNOUNCED, failed_since=NOW - 8.0),
        sees(failed=failed(2), arrived=frozenset({0, 1})),
        machine.try_again_after_a_failure,
        proposes(
            2,
            start=(1, PUBLISH),
            reason=f"again: node 2 (host2), {place(UPDATE)}: no memory",
            failures=(FailedProgram(1, 2, UPDATE, "no memory"),),
        ),
        rules=rules(roles_of=partial(holding, TRAINS)),
    ),
    Case(
        "but a failure among them is one of the attempt",
        at_row(0, UPDATE),
        sees(failed=failed(1)),
        machine.end_work_after_a_failure,
        (CancelWork(),),
        {"failed_since": NOW},
        rules=rules(roles_of=partial(holding, TRAINS)),
    ),
    Case(
        "a request to stop ends what waits for a lost node, since the iteration would not end",
        at_row(0, ROLL_OUT, trouble_since=NOW - 20.0),
        sees(stop=asked_to_stop(), ledger=heard(seen(1, state="killed"), seen(2, state="killed"))),
        machine.stop_when_asked,
        proposes(
            2,
            start=(1, ASSIGN),
            reason="stopped in iteration 1, which waits for node 1, node 2, as ann@host9 asked",
            verdict=Verdict(0, "stopped in iteration 1, which waits for node 1, node 2, as ann@host9 asked"),
        ),
        rules=rules(roles_of=partial(holding, SAMPLES)),
    ),
    # --- this node's own work
    Case(
        "a generation that has lasted long enough is followed by one of the same members, in the same era",
        at_row(0, OPEN, RowPart.NONE, iteration=4, decisions={"merge": decided(3, {"n": 3})}),
        sees(),
        machine.renew_a_long_generation,
        proposes(
            2,
            start=(4, OPEN),
            reason="the same nodes, after 3 iterations",
            decisions={"merge": decided(3, {"n": 3})},
            era=1,
        ),
        rules=rules(longest=3),
    ),
    *(
        Case(
            name,
            node,
            sees(),
            machine.begin_the_row,
            publishes(node.rank),
            {"part": RowPart.ANNOUNCED},
            limit,
        )
        for name, node, limit in (
            ("not an iteration earlier", at_row(0, OPEN, RowPart.NONE, iteration=3), rules(longest=3)),
            ("nor by another member", at_row(1, OPEN, RowPart.NONE, iteration=4), rules(longest=3)),
        )
    ),
    Case(
        "nor in the middle of an iteration",
        at_row(0, ASSIGN, RowPart.NONE, iteration=4),
        sees(),
        machine.begin_the_row,
        becomes={"part": RowPart.GATHER},
        rules=rules(longest=3),
    ),
    Case(
        "nor does it once the row is begun",
        at_row(0, OPEN, RowPart.ANNOUNCED),
        sees(joins=started(3, 2, 1, 0), ledger=heard(seen(3, state=JOINING))),
        None,
        rules=rules(num_nodes=4),
    ),
    Case(
        "a member whose last heartbeat is from before it was taken in is no new one",
        at_row(0, OPEN, RowPart.NONE),
        sees(joins=started(0, 1, 2), ledger=heard(seen(2, state=JOINING))),
        machine.begin_the_row,
        publishes(0),
        {"part": RowPart.ANNOUNCED},
    ),
    Case(
        "the next start of a member takes its place only when that is answered as a loss",
        at_row(0, OPEN, RowPart.NONE, **TOLD),
        sees(joins=started(2, incarnation=2), ledger=heard(seen(2, incarnation=2, state=JOINING))),
        machine.shrink_after_a_loss,
        proposes(2, (0, 1), reason="node 2 (host2) is lost: restarted as incarnation 2"),
    ),
    Case(
        "a row with work for each begins with it",
        at_row(1, MERGE, RowPart.NONE),
        sees(),
        machine.begin_the_row,
        (Launch(RowPart.EACH),),
        {"part": RowPart.EACH},
    ),
    Case(
        "where only the leader has work, it begins at once",
        at_row(0, ASSIGN, RowPart.GATHER),
        sees(),
        machine.begin_the_leaders_work,
        (Launch(RowPart.LEADER),),
        {"part": RowPart.LEADER},
    ),
    Case(
        "where all have some, the leader's comes after that of the others",
        at_row(0, MERGE, RowPart.GATHER),
        sees(arrived=frozenset({1, 2})),
        machine.begin_the_leaders_work,
        (Launch(RowPart.LEADER),),
        {"part": RowPart.LEADER},
    ),
    Case("not while one is at work", at_row(0, MERGE, RowPart.GATHER), sees(arrived=frozenset({0, 2})), None),
    Case(
        "a program that failed is told of",
        at_row(1, ROLL_OUT),
        sees(work=worked(RowPart.EACH, {"error": "no memory", "log": ["x"]}, ok=False)),
        machine.publish_failure,
        (Publish(Fact(1, 1, "failed", {"error": "no memory", "log": ["x"]}, 2.0)),),
        {"part": RowPart.ANNOUNCED},
    ),
    Case(
        "what is reported of another part of the work is old",
        at_row(0, MERGE, RowPart.LEADER),
        sees(work=worked(RowPart.EACH, ok=False)),
        None,
    ),
    Case(
        "so it is where the work went well",
        at_row(0, MERGE, RowPart.LEADER),
        sees(work=worked(RowPart.EACH)),
        None,
    ),
    Case(
        "a leader without more to do publishes it too",
        at_row(0, ROLL_OUT),
        sees(work=worked(RowPart.EACH, {"n": 1})),
        machine.finish_the_work,
        publishes(0, {"n": 1}, 2.0),
        {"part": RowPart.ANNOUNCED, "result": {"n": 1}, "work_s": 2.0},
    ),
    Case(
        "a member that is no leader has no more to do where the leader has",
        at_row(1, MERGE),
        sees(work=worked(RowPart.EACH, {"n": 1})),
        machine.finish_the_work,
        publishes(1, {"n": 1}, 2.0),
        {"part": RowPart.ANNOUNCED, "result": {"n": 1}, "work_s": 2.0},
    ),
    Case(
        "a leader with more to do waits for the others first",
        at_row(0, MERGE),
        sees(work=worked(RowPart.EACH, {"n": 1})),
        machine.finish_the_work,
        becomes={"part": RowPart.GATHER, "result": {"n": 1}, "work_s": 2.0},
    ),
    Case(
        "what it publishes then is of both parts of its work",
        at_row(0, MERGE, RowPart.LEADER, result={"n": 1, "m": 1}, work_s=2.0),
        sees(work=worked(RowPart.LEADER, {"m": 2}, seconds=3.0)),
        machine.finish_the_work,
        publishes(0, {"n": 1, "m": 2}, 5.0),
        {"part": RowPart.ANNOUNCED, "result": {"n": 1, "m": 2}, "work_s": 5.0},
    ),
]
