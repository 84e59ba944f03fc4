"""What a group hands to the core: its one row, its rule for a new generation, and the WorkRunner that makes a call the work of a row.

Also the objects that calls exchange: JSON data up to a size.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fsbarrier.protocol.facts import Generation, Payload, Position
from fsbarrier.protocol.machine import Rule, forget_a_false_alarm
from fsbarrier.protocol.rows import Row, Table
from fsbarrier.protocol.situation import Situation, lost_as_text
from fsbarrier.protocol.state import Node, Propose, RowPart, Step, WorkReport
from fsbarrier.protocol.succession import successor

#: the group's program: one row, repeated. Each member's work is to wait for its caller.
COLLECTIVE = Row(0, "collective", each="what the caller gives")
TABLE = Table("group", (COLLECTIVE,), transient=True)
#: the call whose fact needs no content
BARRIER = "barrier()"


@dataclass(frozen=True, slots=True)
class Collective:
    """One call of a collective in row `position` of a generation."""

    generation: Generation
    position: Position
    #: the call as typed: "barrier()", "all_gather()" or "broadcast(src=2)"; all members must make the same one
    call: str
    #: this member's object; None: it sends none
    json: str | None
    #: the members whose objects the call returns
    objects_of: tuple[int, ...]

    @property
    def value(self) -> Payload:
        """This member's fact."""
        if self.call == BARRIER:
            return {}
        return {"call": self.call} if self.json is None else {"call": self.call, "json": self.json}

    @property
    def name(self) -> str:
        """The call and its number, for messages."""
        return f"{self.call} no. {self.position.iteration}"


@dataclass
class CollectiveWork:
    """The WorkRunner of a group: the work of a row is done when the caller has called a collective for it."""

    #: the call in which the caller waits or has waited last
    asked: Collective | None = None
    #: why this member leaves, shown to the others
    leaving: str = ""
    _row: tuple[int, Position] | None = None

    def launch(self, node: Node, part: RowPart) -> None:
        generation, position = node.place
        self._row = generation.number, position

    def cancel(self) -> None:
        self._row = None

    @property
    def report(self) -> WorkReport | None:
        collective = self.asked
        # The rows of the next generation, which this node may have entered meanwhile, have the same numbers.
        if collective is None or (collective.generation.number, collective.position) != self._row:
            return None
        return WorkReport(RowPart.EACH, True, collective.value, 0.0)

    def progress(self) -> Payload:
        return {"why": self.leaving} if self.leaving else {}


def answers(regroup_after: int) -> tuple[Rule, ...]:
    """How a member answers a loss, and a node that joins: only when its caller asks for the generation after number `regroup_after`."""
    return (partial(regroup_when_asked, regroup_after), forget_a_false_alarm)


def regroup_when_asked(after: int, situation: Situation) -> Step | None:
    """The caller asked for the next generation, of the living members and the nodes that wait to join.

    A restarted member gets `stagger_s` to show that it is alive. Nodes do not take turns here: perhaps only some of them have asked,
    and the turn of a node that has not asked would pass unused.
    """
    if situation.generation.number != after:
        return None
    known = {member.rank: member.incarnation for member in situation.generation.members}
    joins, joiners = situation.view.joins, situation.joiners
    restarted = {rank for rank in known if rank in joins and joins[rank].incarnation > known[rank]}
    waited_s = situation.now - situation.trouble_since
    if not restarted <= joiners.keys() and waited_s < situation.rules.limits.stagger_s:
        return replace(situation.node, trouble_since=situation.trouble_since), ()
    members = {**joiners, **{member.rank: member for member in situation.living}}
    reason = lost_as_text(situation, situation.gone) or "regroup"
    return situation.node, (Propose(successor(situation, [*members.values()], reason)),)


# --- the objects that members exchange -----------------------------------------------------------------------------------------

#: The longest JSON text. Escaped inside a record it stays below the longest record that nodes read.
MAX_OBJECT_BYTES = 24 * 1024 * 1024


def to_json(obj: object) -> str:
    """`obj` as JSON. Raises TypeError or ValueError, so an object that cannot be sent fails on the sender."""
    hint = "a group exchanges JSON data: None, bool, int, float, str, lists, and dicts with str keys"
    try:
        text = json.dumps(obj, separators=(",", ":"))
        survives = _survives(obj, json.loads(text))
    except TypeError as error:
        raise TypeError(f"{error}; {hint}. Write anything else to a file and send its path") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"this object cannot be sent: {error}; {hint}") from None
    if not survives:
        raise TypeError(f"JSON would change this object (dict keys that are no str?); {hint}")
    if len(text) > MAX_OBJECT_BYTES:
        raise ValueError(
            f"this object is {len(text)} bytes of JSON, at most {MAX_OBJECT_BYTES} can be sent; write it to a file and send its path"
        )
    return text


def _survives(obj: object, back: Any) -> bool:
    """Whether an object survived the round trip; a tuple may become a list."""
    if isinstance(obj, dict):
        return obj.keys() == back.keys() and all(_survives(value, back[key]) for key, value in obj.items())
    if isinstance(obj, list | tuple):
        return all(map(_survives, obj, back))
    return True
