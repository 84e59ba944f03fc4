"""Rows of the state machine's tests: settings that a session of node 0 begins with, and starts that ask for others than the run's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from core_builders import (
    ASSIGN,
    OPEN,
    RULES,
    at_row,
    done,
    generation,
    heard,
    left_off,
    seen,
    sees,
    started,
    waiting,
)
from core_cases import ENDED, Case, ends, entered, goes_along, proposes

from fsbarrier.protocol import machine
from fsbarrier.protocol.facts import Join
from fsbarrier.protocol.membership import JOINING
from fsbarrier.protocol.state import FindResumePoint, Node, Publish, RowPart

#: as the run began with them
BEGAN = {"optimizer.lr": 1.0, "num_nodes": 3}
KNOWN = replace(RULES, settings=BEGAN)
CHANGE = {"optimizer.lr": 3.0}
HOW = "a setting changes when all nodes are stopped and started again, node 0 (--master) with the new value"
CHANGED = generation(2, reason="start again", settings=CHANGE)


def asks(
    rank: int, incarnation: int = 1, digest: str = "", version: str = "", **stated: Any
) -> dict[int, Join]:
    """A start whose command line names settings; `__` stands for the dot."""
    named = {name.replace("__", "."): value for name, value in stated.items()}
    code = {"digest": digest, "version": version}
    return started(rank, incarnation=incarnation, stated=named, by="ann@host9", time="noon", **code)


def second(rank: int, **fields: Any) -> Node:
    """The second start of a rank of generation 1."""
    return waiting(rank, **{"incarnation": 2, "baseline": 1, **fields})


def refused(rank: int, ours: str, theirs: str) -> tuple[Any, ...]:
    return ends(2, "left", f"node {rank}: {ours} contradicts this run's settings ({theirs}); {HOW}")


NO_NODE_2 = ends(2, "left", f"node 2: this run has 2 nodes and so no node 2; {HOW}")

SETTINGS_ROWS = [
    # --- a worker's command line
    Case(
        "what the run has is what it was changed to",
        second(1, baseline=2),
        sees(CHANGED, joins=started(0, 2) | asks(1, 2, optimizer__lr=1.0)),
        machine.end_when_it_does_not_fit,
        refused(1, "optimizer.lr=1", "3"),
        ENDED,
        rules=KNOWN,
    ),
    Case(
        "nobody else came in time: what it asks for is not the run's, and it ends before it touches anything",
        second(1, for_s=61.0),
        sees(
            joins=started(0, 2) | asks(1, 2, optimizer__lr=2.0),
            ledger=heard(ranks=()),
            resume_point=left_off(1, OPEN, of=1, sealed=False),
        ),
        machine.end_when_nobody_asks_for_the_same,
        refused(1, "optimizer.lr=2", "1"),
        ENDED,
        rules=KNOWN,
    ),
    Case(
        "a start of node 0 that has died says nothing",
        second(1, for_s=20.0),
        sees(
            joins=asks(0, 2, optimizer__lr=4.0) | asks(1, 2, optimizer__lr=2.0),
            ledger=heard(seen(0, state=JOINING, incarnation=2, ago=6.0), ranks=()),
        ),
        machine.look_where_the_run_was_left,
        (FindResumePoint(),),
        rules=KNOWN,
    ),
    Case(
        "who asks for other settings is not admitted",
        at_row(0, OPEN, RowPart.NONE, generation=generation(ranks=(0, 1))),
        sees(
            generation(ranks=(0, 1)),
            joins=started(0, 1) | asks(2, 1, optimizer__lr=2.0),
            ledger=heard(seen(2, state=JOINING)),
        ),
        machine.begin_the_row,
        (Publish(done(0)),),
        {"part": RowPart.ANNOUNCED},
        rules=KNOWN,
    ),
    # --- node 0's
    Case(
        "node 0 comes while others are at work, and names another value than they have: it is refused like any node",
        second(0),
        sees(joins=asks(0, 2, optimizer__lr=3.0) | started(1, 2), ledger=heard(ranks=(1, 2))),
        machine.end_when_it_does_not_fit,
        refused(0, "optimizer.lr=3", "1"),
        ENDED,
        rules=KNOWN,
    ),
    Case(
        "it is with the value that the session has",
        at_row(1, OPEN, RowPart.NONE, iteration=4, generation=generation(2, ranks=(1, 2), settings=CHANGE)),
        sees(
            generation(2, ranks=(1, 2), settings=CHANGE),
            joins=started(1, 2) | asks(0, 1, optimizer__lr=3.0),
            ledger=heard(seen(0, state=JOINING)),
        ),
        machine.admit_joiners,
        proposes(
            3,
            start=(4, OPEN),
            leader=0,
            reason="joined: node 0 (host0)",
            created_by=1,
            settings=CHANGE,
        ),
        rules=KNOWN,
    ),
    Case(
        "a session has what node 0 asks for",
        second(0),
        sees(
            joins=asks(0, 2, optimizer__lr=3.0) | started(1, 2, incarnation=2),
            ledger=heard(*(seen(rank, state=JOINING, incarnation=2) for rank in (0, 1, 2)), ranks=()),
            resume_point=left_off(4, ASSIGN, of=1),
        ),
        machine.form_a_generation,
        proposes(
            2,
            start=(4, ASSIGN),
            restarted={0: 2, 1: 2, 2: 2},
            reason="start again",
            settings=CHANGE,
        ),
        rules=KNOWN,
    ),
    Case(
        "who enters it tells of its settings",
        waiting(1),
        sees(CHANGED),
        machine.enter_newer_generation,
        goes_along(CHANGED, settings=CHANGE),
        entered(1, CHANGED),
    ),
    Case(
        "later in the session nobody tells of them again",
        waiting(1, baseline=2),
        sees(later := generation(3, reason="joined", settings=CHANGE)),
        machine.enter_newer_generation,
        goes_along(later),
        replace(entered(1, later), baseline=2),
    ),
    # --- the number of nodes
    Case(
        "a node that the run has no room for any more ends",
        second(2),
        sees(
            joins=asks(0, 2, num_nodes=2) | started(1, 2, incarnation=2),
            ledger=heard(seen(0, state=JOINING, incarnation=2), ranks=()),
        ),
        machine.end_when_it_does_not_fit,
        NO_NODE_2,
        ENDED,
        rules=KNOWN,
    ),
]
