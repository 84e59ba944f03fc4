"""The table that the state machine walks: a program's rows in order.

The rows, their names and the slices belong to the program (phases/rl.py, or the single row of a group). The protocol only asks whether
a row has work, where a new generation resumes it, and whether its result must survive a power failure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from fsbarrier.errors import UsageError
from fsbarrier.protocol.facts import Fact, Position

#: the type of the object that builds a row's work; the protocol never calls it
Work_co = TypeVar("Work_co", covariant=True)

#: the key in the `choices` of joins and generations that says which slice of the rows a session runs
SLICE_CHOICE = "rl_phase"


@dataclass(frozen=True, slots=True)
class Row(Generic[Work_co]):
    """One row: a barrier, with or without work before it."""

    index: int
    name: str
    #: the work of every member
    each: Work_co | None = None
    #: the work of the leader; if a row has both, it begins after all other members are done with theirs
    leader: Work_co | None = None
    #: the row where a new generation resumes if it interrupts this one; "": this row
    resume: str = ""
    #: the role (`Role.name`) whose holders make this row's result; "": the row is done again whoever is lost in it. Once all of them have
    #: published "done", a generation that interrupts the row begins with the next one.
    made_by: str = ""
    #: a node does this work before it asks the nodes at work to admit it, so that they need not wait for it
    ready: bool = False

    @property
    def decides(self) -> bool:
        """Whether later generations may need the leader's result."""
        return self.each is not None or self.leader is not None


@dataclass(frozen=True, slots=True)
class Slice:
    """Consecutive rows that a session may run alone, such as only the rollouts.

    The slices of a program are in the order in which an iteration runs them: each works on the result of the one before.
    """

    name: str
    #: names of rows
    first: str
    last: str
    #: the row whose decision shows that an iteration's slice is complete
    result: str


@dataclass(frozen=True, slots=True)
class Table(Generic[Work_co]):
    """A program's rows. Raises UsageError for invalid rows.

    `closing` rows replace the last rows in the last iteration of a session; they have the same names and other work. Example: the
    final evaluation. Their result is in the last row. If it is missing, a session whose iterations are all done repeats them.
    """

    name: str
    rows: tuple[Row[Work_co], ...]
    slices: tuple[Slice, ...] = ()
    closing: tuple[Row[Work_co], ...] = ()
    #: No result is a decision: later generations adopt none, so none is sealed, and none need survive a power failure.
    transient: bool = False
    _indices: Mapping[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        indices = {row.name: i for i, row in enumerate(self.rows)}
        first_closing = len(self.rows) - len(self.closing)
        object.__setattr__(self, "_indices", indices)
        if not self.rows or [row.index for row in self.rows] != list(indices.values()):
            names = ", ".join(f"{row.index} {row.name}" for row in self.rows)
            raise UsageError(
                f"program {self.name}: its rows must have different names and be numbered from 0 in order; found {names}"
            )
        for row in (*self.rows, *self.closing):
            if row.resume and indices.get(row.resume, len(indices)) > row.index:
                raise UsageError(
                    f"program {self.name}, {row.name}: resume={row.resume!r} is not this or an earlier phase"
                )
            last = row.index == len(self.rows) - 1 or row.name in [part.last for part in self.slices]
            if row.made_by and (row.each is None or row.leader is not None or last):
                raise UsageError(
                    f"program {self.name}, {row.name}: made_by={row.made_by!r} needs a phase with work for each member, none for the "
                    "leader, and a phase behind it"
                )
        ends = [row.name for row in self.rows[first_closing:]]
        closing = [row.name for row in self.closing]
        if closing != ends:
            raise UsageError(
                f"program {self.name}: its closing rows {', '.join(closing)} are not its last: {', '.join(ends)}"
            )
        for part in self.slices:
            missing = {part.first, part.last, part.result} - indices.keys()
            if missing:
                raise UsageError(f"program {self.name}, slice {part.name}: no row is called {min(missing)!r}")

    def index(self, name: str) -> int:
        """The number of the row with this name. Raises KeyError."""
        return self._indices[name]

    def needs_only_a_name(self, row: Row[Work_co], fact: Fact) -> bool:
        """Whether nobody reads the content of a member's fact, because the file's name says everything."""
        return fact.status == "done" and not fact.value and (row.each is None or self.transient)

    @property
    def ready(self) -> int | None:
        """The number of the row whose work makes a node ready."""
        return next((i for i, row in enumerate(self.rows) if row.ready and row.each is not None), None)

    def resume_index(self, row: Row[object]) -> int:
        """The number of the row where a new generation resumes if it interrupts `row`."""
        return self._indices[row.resume] if row.resume else row.index

    def row(self, position: Position, until: int | None, choice: str = "") -> Row[Work_co]:
        """The row at a position, in a session that runs the slice `choice` up to iteration `until`. A slice has no closing rows."""
        closes = position.iteration == until and all(part.name != choice for part in self.slices)
        from_the_end = position.phase - len(self.rows)
        if closes and from_the_end >= -len(self.closing):
            return self.closing[from_the_end]
        return self.rows[position.phase]

    def span(self, choice: str = "") -> tuple[int, int]:
        """The first and the last row of an iteration that runs the slice `choice`; without such a slice, of the whole table."""
        for part in self.slices:
            if part.name == choice:
                return self._indices[part.first], self._indices[part.last]
        return 0, len(self.rows) - 1
