"""What a node has seen of the facts about one row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fsbarrier.protocol.facts import Fact, Position
from fsbarrier.protocol.state import Unreadable


@dataclass
class RowListing:
    """What the directory of a row showed when it was last listed. `names` is None before the first listing.

    `call`: what this node called in the row, where that is part of the facts' names. `done`: the name that each member's fact has
    if it called the same -> its rank; `failures`: likewise, of the facts that tell of a failure.
    """

    generation: int
    position: Position
    call: str
    directory: Path
    done: Mapping[str, int]
    failures: Mapping[str, int]
    names: list[str] | None = None
    arrived: frozenset[int] = frozenset()
    failed: Mapping[int, Fact] = field(default_factory=dict)
    #: a fact in it that could not be read
    unreadable: Unreadable | None = None
