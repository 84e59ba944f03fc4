"""Deliberate faults in what a node makes of records that it cannot read, and of those by nodes with other code."""

from __future__ import annotations

from typing import Any

from mutant_faults import Patch, _otherwise, _silent

from fsbarrier.protocol import machine, succession
from fsbarrier.protocol.situation import Situation
from fsbarrier.protocol.state import Stage, View
from fsbarrier.rundir.names import GENERATION


def unreadable_generation_is_none(patch: Patch) -> None:
    """a generation's record that cannot be read for 10 s is left out, and the run goes on from the one before it"""
    _otherwise(patch, machine.wait_for_an_unreadable_record, _silent)
    following = succession.next_number

    def next_number(view: View, at_least: int) -> int:
        void = view.unreadable
        number = GENERATION.parse(void.path.rpartition("/")[2]) if void is not None else None
        return max(following(view, at_least), (number or 0) + 1)

    patch.setattr(succession, "next_number", next_number)


def wait_for_ever_for_what_cannot_be_read(patch: Patch) -> None:
    """a node waits for a record that it cannot read, however long"""

    def wait(at: Any) -> Any:
        joins = at.view.unreadable is not None and at.node.stage is Stage.JOINING
        return (at.node, ()) if joins else None

    _otherwise(patch, machine.wait_for_an_unreadable_record, wait)


def any_code_is_admitted(patch: Patch) -> None:
    """nobody looks which code another start runs"""
    patch.setattr(Situation, "differs", lambda self, join: False)
