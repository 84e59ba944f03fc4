"""The table that the state machine walks: a program's rows in order. The protocol does not know what a row is about.

A program (phases/rl.py, or a group's single row) owns its rows, their names and its slices. The protocol only asks whether a row
has work, where a new generation goes on when the row was under way, and whether its result must outlive a loss of power.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from fsbarrier.errors import UsageError
from fsbarrier.protocol.facts import Fact, Payload, Position

#: what builds a row's work; the protocol never calls it
Work_co = TypeVar("Work_co", covariant=True)

#: the key in the `choices` of joins and generations that says which slice of the rows a session runs
SLICE_CHOICE = "rl_phase"


@dataclass(frozen=True, slots=True)
class Row(Generic[Work_co]):
    """One row: a barrier, with or without work before it.

    `each` is every member's work; `leader` is the leader's, and where a row has both, it comes after all the others are done.
    `resume` names the row where a new generation goes on when this one was under way ("": here). The results of a `transient`
    row are no decisions: later generations do not adopt them, and they need not outlive a loss of power.

    `named_by`: the key of a result that is part of the fact's name. Only members with the same one release each other, and a listing
    shows who has another one.
    """

    index: int
    name: str
    each: Work_co | None = None
    leader: Work_co | None = None
    resume: str = ""
    transient: bool = False
    named_by: str = ""

    def call(self, value: Payload) -> str:
        """The part of a fact's name that says what a member called (`named_by`); "" where its name does not say it."""
        return str(value.get(self.named_by, "")) if self.named_by else ""

    def told_by_name(self, fact: Fact) -> bool:
        """Whether the name of a member's fact about this row says all that anybody wants to know of it, so that nobody reads it."""
        nothing_else = fact.status == "done" and fact.value.keys() <= {self.named_by}
        return nothing_else and (self.each is None or bool(self.named_by))

    @property
    def decides(self) -> bool:
        """Whether the leader's fact about this row may hold a value that later generations need."""
        return (self.each is not None or self.leader is not None) and not self.transient


@dataclass(frozen=True, slots=True)
class Slice:
    """Consecutive rows that a session may run without the others, by the names of its `first` and `last` row.

    `result` names the row whose decision says that an iteration's slice is complete. Slices of a program stand in the order in
    which an iteration runs them: each works on what the one before it has made.
    """

    name: str
    first: str
    last: str
    result: str


@dataclass(frozen=True, slots=True)
class Table(Generic[Work_co]):
    """A program's rows. Raises UsageError for rows that cannot be walked.

    `closing`: in the last iteration of a session these stand in the place of the last rows, with the same names and other work. What is
    only done there has a result in the last row. A session whose iterations are all done goes back to the first of them once, if that
    result is missing.
    """

    name: str
    rows: tuple[Row[Work_co], ...]
    slices: tuple[Slice, ...] = ()
    closing: tuple[Row[Work_co], ...] = ()
    _indices: Mapping[str, int] = field(init=False, repr=False, compare=False)
    _slice_names: tuple[str, ...] = field(init=False, repr=False, compare=False)
    _last_rows: tuple[Row[Work_co], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Earlier versions took the name of a row here, and people keep copies of programs.
        if not all(isinstance(row, Row) for row in self.closing):
            raise UsageError(
                f"program {self.name}: closing={self.closing!r} is no tuple of rows; in a session's last iteration its rows stand in the "
                "place of the last ones, as in phases/rl.py"
            )
        indices = {row.name: i for i, row in enumerate(self.rows)}
        kept = len(self.rows) - len(self.closing)
        object.__setattr__(self, "_indices", indices)
        object.__setattr__(self, "_slice_names", tuple(part.name for part in self.slices))
        object.__setattr__(self, "_last_rows", (*self.rows[:kept], *self.closing))
        if not self.rows or [row.index for row in self.rows] != list(indices.values()):
            found = ", ".join(f"{row.index} {row.name}" for row in self.rows)
            raise UsageError(
                f"program {self.name}: its rows must have different names and be numbered from 0 in order; found {found}"
            )
        for row in (*self.rows, *self.closing):
            if row.resume and indices.get(row.resume, len(indices)) > row.index:
                raise UsageError(
                    f"program {self.name}, {row.name}: resume={row.resume!r} is not this or an earlier phase"
                )
        ends = [row.name for row in self.rows[kept:]]
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

    def resume_index(self, row: Row[object]) -> int:
        """The number of the row where a new generation goes on when `row` was under way."""
        return self._indices[row.resume] if row.resume else row.index

    def row(self, position: Position, until: int | None, choice: str = "") -> Row[Work_co]:
        """The row at a position of a session that runs the slice `choice` up to iteration `until`. Only a whole iteration is closed."""
        last = position.iteration == until and choice not in self._slice_names
        return (self._last_rows if last else self.rows)[position.phase]

    def first_lasting(self, span: tuple[int, int]) -> int | None:
        """The first row of `span` whose result later generations adopt; None where all are transient."""
        first, last = span
        return next((row.index for row in self.rows[first : last + 1] if not row.transient), None)

    def span(self, choice: str = "") -> tuple[int, int]:
        """The first and the last row of an iteration that runs the slice `choice`; all rows for any other word."""
        for part in self.slices:
            if part.name == choice:
                return self._indices[part.first], self._indices[part.last]
        return 0, len(self.rows) - 1
