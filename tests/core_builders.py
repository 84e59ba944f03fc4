"""What the tests of the core are written with: a small program, its nodes, and views of what they can see. No files, no clocks.

The program has a row of each kind, and two slices. Three nodes of it, 0, 1 and 2, have been in generation 1 since 100 s ago, and
everybody was heard just now, unless a test says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any

from fsbarrier.protocol.facts import (
    Fact,
    FailedProgram,
    Generation,
    Join,
    Member,
    Payload,
    Position,
    Pulse,
    StopRequest,
)
from fsbarrier.protocol.membership import JOINING, Ledger, Limits, Seen
from fsbarrier.protocol.rows import Row, Slice, Table
from fsbarrier.protocol.state import Node, ResumePoint, RowPart, Rules, Stage, View, WorkReport

#: the moment at which every row of the tests is looked at
NOW = 1000.0

WORK = "work"
OPEN, ASSIGN, ROLL_OUT, MERGE, PROBE, UPDATE, PUBLISH, CLOSE = range(8)
TABLE: Table[object] = Table(
    "small",
    (
        Row(OPEN, "open"),
        Row(ASSIGN, "assign", leader=WORK),
        Row(ROLL_OUT, "roll_out", each=WORK, resume="assign"),
        Row(MERGE, "merge", each=WORK, leader=WORK, resume="assign"),
        Row(PROBE, "probe", each=WORK),
        Row(UPDATE, "update", each=WORK, resume="probe", made_by="trains"),
        Row(PUBLISH, "publish", leader=WORK),
        Row(CLOSE, "close"),
    ),
    (Slice("rollout", "open", "merge", result="merge"), Slice("update", "probe", "close", result="publish")),
)
LIMITS = Limits(suspect_s=6.0, dead_s=15.0, stagger_s=4.0, join_timeout_s=60.0, rejoin_timeout_s=90.0)
RULES = Rules(TABLE, num_nodes=3, min_nodes=1, retries=2, limits=LIMITS)


def rules(**changes: Any) -> Rules:
    return replace(RULES, **changes)


def member(rank: int, incarnation: int = 1) -> Member:
    return Member(rank, incarnation, f"host{rank}")


def generation(
    number: int = 1,
    ranks: Set[int] | tuple[int, ...] = (0, 1, 2),
    start: tuple[int, int] = (1, OPEN),
    restarted: Mapping[int, int] | None = None,
    **fields: Any,
) -> Generation:
    """Generation `number` of these ranks. `restarted`: rank -> its incarnation, where that is not 1."""
    again = restarted or {}
    made: dict[str, Any] = {
        "number": number,
        "members": tuple(member(rank, again.get(rank, 1)) for rank in sorted(ranks)),
        "leader": min(ranks, default=0),
        "start": Position(*start),
        "reason": "start",
        "created_by": 0,
        "era": number,
    }
    return Generation(**{**made, **fields})


FIRST = generation()


def waiting(rank: int = 0, *, for_s: float = 1.0, **fields: Any) -> Node:
    """A node that has waited for `for_s` to take part."""
    return Node(**{"rank": rank, "incarnation": 1, "since": NOW - for_s, "host": f"host{rank}", **fields})


def at_row(rank: int, phase: int, part: RowPart = RowPart.EACH, *, iteration: int = 1, **fields: Any) -> Node:
    """A node of generation 1 in the row `phase`."""
    made: dict[str, Any] = {
        "rank": rank,
        "incarnation": 1,
        "since": NOW - 100,
        "host": f"host{rank}",
        "stage": Stage.RUNNING,
        "generation": FIRST,
        "position": Position(iteration, phase),
        "part": part,
    }
    return Node(**{**made, **fields})


def started(*ranks: int, incarnation: int = 1, **fields: Any) -> dict[int, Join]:
    """The records of these ranks' starts."""
    return {
        r: Join(
            **{"rank": r, "incarnation": incarnation, "host": f"host{r}", "pid": 7, "boot_id": "b", **fields}
        )
        for r in ranks
    }


def seen(
    rank: int,
    *,
    ago: float = 0.0,
    state: str = "running",
    incarnation: int = 1,
    moved: bool = True,
    at: tuple[int, int] = (0, 0),
) -> Seen:
    """The last news of a rank: so long ago, in this state; `at`: the row that its heartbeat names."""
    return Seen(Pulse(rank, incarnation, 9, state, 1, at[0], at[1]), NOW - ago, moved)


def heard(*news: Seen, ranks: tuple[int, ...] = (0, 1, 2), **fields: Any) -> Ledger:
    """All of `ranks` were heard just now as members, but those of whom there is other `news`."""
    known = {rank: seen(rank) for rank in ranks}
    known.update({item.beat.rank: item for item in news})
    return Ledger(**{"seen": known, "heard_until": NOW, **fields})


def waiters(*ranks: int, incarnation: int = 1, **fields: Any) -> dict[str, Any]:
    """Of a View: these ranks have started and wait to be taken in; nobody else was heard."""
    items = [seen(rank, state=JOINING, incarnation=incarnation) for rank in ranks]
    return {"joins": started(*ranks, incarnation=incarnation), "ledger": heard(*items, ranks=()), **fields}


def sees(newest: Generation | None = FIRST, **fields: Any) -> View:
    """What a node sees: the newest generation, and heartbeats of all."""
    return View(**{"newest": newest, "ledger": heard(), **fields})


def left_off(
    iteration: int = 1,
    phase: int = OPEN,
    *,
    ago: float = 0.0,
    of: int = 0,
    sealed: bool = True,
    **fields: Any,
) -> ResumePoint:
    """Where generation `of` left the run, as it was read `ago` seconds before now."""
    made = {"position": Position(iteration, phase), "generation": of, "at": NOW - ago, "sealed": sealed}
    return ResumePoint(**{**made, "span": (OPEN, CLOSE), **fields})


def done(rank: int, value: Payload | None = None, work_s: float = 0.0, incarnation: int = 1) -> Fact:
    return Fact(rank, incarnation, "done", value or {}, work_s)


def failed(rank: int, error: str = "no memory", log: tuple[str, ...] = ()) -> dict[int, Fact]:
    """Of a View: this rank's program failed in the row under way."""
    return {rank: Fact(rank, 1, "failed", {"error": error, "log": list(log)}, 1.0)}


def failures(attempts: int, rank: int = 1, what: str = "other") -> tuple[FailedProgram, ...]:
    """What a generation's record says of so many failed attempts, each for another reason."""
    return tuple(
        FailedProgram(number, rank, ROLL_OUT, f"{what}{'!' * number}") for number in range(1, attempts + 1)
    )


def worked(
    part: RowPart, value: Payload | None = None, *, ok: bool = True, seconds: float = 2.0
) -> WorkReport:
    return WorkReport(part, ok, value or {}, seconds)


def asked_to_stop(*, now: bool = False) -> StopRequest:
    return StopRequest(now, "ann@host9")


def decided(iteration: int, value: Payload, before: tuple[int, Payload] | None = None) -> dict[str, Any]:
    """One entry of a node's decisions."""
    entry: dict[str, Any] = {"iteration": iteration, "value": value}
    if before is not None:
        entry["before"] = {"iteration": before[0], "value": before[1]}
    return entry
