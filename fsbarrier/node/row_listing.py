"""The facts about one row, as far as a node has seen them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fsbarrier.protocol.facts import Fact, Generation, Position
from fsbarrier.protocol.state import Unreadable
from fsbarrier.rundir.names import fact_name


@dataclass
class RowListing:
    """What the directory of a row showed when it was last listed. `names` is None before the first listing.

    `call`: what this node called in the row, where that is part of the facts' names. `done`: the name that each member's fact has
    if it called the same -> its rank.
    """

    generation: int
    position: Position
    call: str
    directory: Path
    done: Mapping[str, int]
    names: list[str] | None = None
    arrived: frozenset[int] = frozenset()
    failed: Mapping[int, Fact] = field(default_factory=dict)
    #: the leader's fact, once all members are done and it can be read
    leaders_fact: Fact | None = None
    #: a fact in it that could not be read
    unreadable: Unreadable | None = None

    @classmethod
    def of(cls, generation: Generation, position: Position, call: str, directory: Path) -> RowListing:
        """Before the first look."""
        done = {fact_name(position.iteration, rank, "done", call): rank for rank in generation.ranks}
        return cls(generation.number, position, call, directory, done)


#: of a node that looks at no row
NO_ROW = RowListing(0, Position(0, 0), "", Path(), {})
