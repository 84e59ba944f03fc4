"""What the rows of the state machine's tests are written with: a row itself, and what nodes ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from core_builders import NOW, ROLL_OUT, RULES, TABLE, generation

from fsbarrier.protocol.facts import Generation, Verdict
from fsbarrier.protocol.machine import Rule
from fsbarrier.protocol.membership import Ledger
from fsbarrier.protocol.state import (
    Action,
    CancelWork,
    Entered,
    Exit,
    Node,
    Note,
    Propose,
    Rules,
    Stage,
    View,
)


@dataclass(frozen=True)
class Case:
    """One row. `becomes`: the fields of the node that change, or the node as it is then."""

    name: str
    node: Node
    view: View
    rule: Rule | None
    asks: tuple[Action, ...] = ()
    becomes: Mapping[str, Any] | Node = field(default_factory=dict)
    rules: Rules = RULES
    now: float = NOW
    #: a client's own answers to a loss
    answers: Sequence[Rule] | None = None

    @property
    def then(self) -> Node:
        return self.becomes if isinstance(self.becomes, Node) else replace(self.node, **self.becomes)


ENDED = {"stage": Stage.ENDED}
NOBODY = Ledger(heard_until=NOW)


def ends(code: int, state: str, reason: str) -> tuple[Action, ...]:
    return CancelWork(), Exit(code, state, reason)


def proposes(*args: Any, **fields: Any) -> tuple[Action, ...]:
    """That this generation is proposed."""
    return (Propose(generation(*args, **fields)),)


def over(code: int = 0, reason: str = "stopped", number: int = 2) -> Generation:
    """A generation that ends the run."""
    return generation(number, verdict=Verdict(code, reason))


def entered(rank: int, newest: Generation, **fields: Any) -> Node:
    """A node that has just entered `newest`."""
    node = {"rank": rank, "incarnation": 1, "since": NOW, "host": f"host{rank}", "stage": Stage.RUNNING}
    at = {"generation": newest, "position": newest.start, "decisions": newest.decisions}
    return Node(**{**node, **at, **fields})


def goes_along(newest: Generation, **more: Any) -> tuple[Action, ...]:
    """What a node asks for when it enters `newest`. `more`: further fields of the journal's line."""
    about = {"members": list(newest.ranks), "leader": newest.leader, "reason": newest.reason}
    note = Note("generation_started", {"number": newest.number, **about, **more})
    return CancelWork(), note, Entered(newest.start, newest, begins=True)


def lost(
    rank: int, why: str, *, age: float | None = None, phase: int = ROLL_OUT, iteration: int = 1
) -> dict[str, object]:
    """What the journal is told of a loss."""
    about = {
        "node_rank": rank,
        "host": f"host{rank}",
        "incarnation": 1,
        "why": f"{why}; last in {place(phase, iteration)}",
    }
    where = {"iteration": iteration, "phase": phase, "phase_name": TABLE.rows[phase].name}
    return {**about, **where, "beat_age_s": age}


def place(phase: int, iteration: int = 1) -> str:
    return f"iteration {iteration}, phase {phase} {TABLE.rows[phase].name}"


def node_lost(*about: dict[str, object], **more: Any) -> Note:
    return Note("node_lost", {"lost": list(about), **more})


def is_lost(rank: int, why: str = "no heartbeat for 15.0 s", phase: int = ROLL_OUT) -> str:
    """The same in the reason of a generation."""
    return f"node {rank} (host{rank}) is lost: {why}; last in {place(phase)}"
