"""Where the newest generation left the run: read from its facts on disk. A seal ends that generation there for good.

Why a seal. Listings may be old, and a node that was taken for dead may be at work. Example: node 2 was started again, and its listings
are 20 s old. Nodes 0 and 1 look dead to it, and row 7 shows no fact of their leader, node 0. If node 2 simply went on from row 7, it
would decide row 7 anew while nodes 0 and 1 pass it with another decision: the run would have split.

So node 2 creates the leader's fact of row 7 itself, as a seal. Only one of the two can create that name. If the seal is there first,
node 0 cannot publish, and no member ever passes row 7. If node 0 was first, node 2 reads its decision and tries the next row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fsbarrier.node.observer import Observer
from fsbarrier.protocol.facts import SEALED, Fact, Generation, Payload, Position
from fsbarrier.protocol.rows import Row
from fsbarrier.protocol.state import Recovered, Rules
from fsbarrier.protocol.succession import with_decision
from fsbarrier.rundir.names import FACT, ITERATION_FOLDER, PHASE_FOLDER


@dataclass
class LastGeneration:
    """Follows the newest generation's facts. It reads each fact once, since facts do not change."""

    observer: Observer
    _facts: dict[tuple[int, Position], Fact] = field(default_factory=dict)

    def recover(self, rules: Rules, now: float, seal: Fact | None = None) -> Recovered:
        """Where the newest generation is, or was when it ended. With `seal` it ends there, even if members of it still live.

        A fact that cannot be read is an error: treating it as absent would throw a decision away. If a member entered a later row, the
        row was passed, and its leader's fact must be there. Raises OSError.
        """
        generation = self.observer.newest
        if generation is None:
            return Recovered(Position(1, rules.span({})[0]), at=now, sealed=True)
        trail = _Trail(self.observer, generation, *rules.span(generation.choices), self._facts)
        reached = trail.furthest()
        if seal is not None:
            reached = trail.end(reached, seal)
        decisions = trail.decisions(reached)
        while trail.all_done(reached):
            row = trail.row(reached)
            value = trail.fact(reached).value if row.decides else None
            if value:
                decisions = with_decision(decisions, row.name, reached.iteration, value)
            reached = trail.after(reached)
            if reached.phase == trail.first:
                break
        resumed = max(trail.first, rules.table.resume_index(reached.phase))
        position = Position(reached.iteration, resumed)
        span = trail.first, trail.last
        return Recovered(position, decisions, generation.number, now, span, sealed=seal is not None)


@dataclass(frozen=True)
class _Trail:
    """The facts of one generation, which ran the rows `first` to `last`."""

    observer: Observer
    generation: Generation
    first: int
    last: int
    known: dict[tuple[int, Position], Fact]

    def row(self, position: Position) -> Row[object]:
        return self.observer.table.rows[position.phase]

    def after(self, position: Position) -> Position:
        iteration, phase = position.iteration, position.phase
        return Position(iteration, phase + 1) if phase < self.last else Position(iteration + 1, self.first)

    def before(self, position: Position) -> Position:
        iteration, phase = position.iteration, position.phase
        return Position(iteration, phase - 1) if phase > self.first else Position(iteration - 1, self.last)

    def heard(self) -> Position:
        """The furthest row that a member's own heartbeat says it has entered."""
        beats = self.observer.read_beats()[0].values()
        said = [beat for beat in beats if beat.generation == self.generation.number and beat.iteration > 0]
        return max([self.generation.start, *(Position(beat.iteration, beat.phase) for beat in said)])

    def furthest(self) -> Position:
        """The furthest row that some member has entered, by the heartbeats and by the row folders in the directory."""
        observer, number = self.observer, self.generation.number
        root, furthest = observer.paths.facts_of(number), self.heard()
        if root.name not in observer.store.names(observer.paths.coordination):
            return furthest
        iterations = ITERATION_FOLDER.parse_all(observer.store.names(root))
        for iteration in sorted(iterations)[-1:]:
            names = observer.store.names(observer.paths.iteration(number, iteration))
            phases = [
                row.index for row in PHASE_FOLDER.parse_all(names) if self.first <= row.index <= self.last
            ]
            furthest = max(furthest, Position(iteration, max(phases, default=self.first)))
        return furthest

    def end(self, reached: Position, seal: Fact) -> Position:
        """Put the seal into the first row from `reached` on in which the leader has published nothing.

        Gives the furthest row that some member may have entered. If the leader published in a row, all rows before it were passed.
        Whether that row was passed too, only the facts of all members show. If this node's listing does not show them, the run
        does that one row once more.
        """
        if self.generation.verdict is not None or all(
            row.transient for row in self.observer.table.rows[self.first : self.last + 1]
        ):
            # Nothing needs a seal: this generation only ended the run, or no later generation uses its results.
            return reached
        until = self.generation.until
        while until is None or reached.iteration <= until:
            if not self.row(reached).transient and self._sealed(reached, seal):
                break
            reached = self.after(reached)
        heard = self.heard()
        while reached > heard and not self.all_done(self.before(reached)):
            reached = self.before(reached)
            if not self.row(reached).transient:
                break
        return reached

    def _sealed(self, position: Position, seal: Fact) -> bool:
        directory = self.observer.row_dir(self.generation.number, position)
        self.observer.store.make_dir(directory)
        created = self.observer.store.create(directory / self._leaders, seal)
        return created or self.fact(position).status == SEALED

    def decisions(self, reached: Position) -> Mapping[str, Payload]:
        """Each row's last decision before `reached`, and, if that is of this iteration, also the one before it (its "before")."""
        decisions, start = self.generation.decisions, self.generation.start
        for row in self.observer.table.rows[self.first : self.last + 1]:
            if not row.decides:
                continue
            found = []
            for iteration in range(reached.iteration, start.iteration - 1, -1):
                position = Position(iteration, row.index)
                value = self.fact(position).value if start <= position < reached else None
                if value:
                    found.append((iteration, value))
                    if iteration < reached.iteration:
                        break
            for iteration, value in reversed(found):
                decisions = with_decision(decisions, row.name, iteration, value)
        return decisions

    @property
    def _leaders(self) -> str:
        return FACT.build(self.generation.leader, "done")

    def fact(self, position: Position) -> Fact:
        """The leader's fact of a row in which it has published. Raises OSError."""
        key = self.generation.number, position
        if key not in self.known:
            directory = self.observer.row_dir(self.generation.number, position)
            self.known[key] = self.observer.must_read(directory / self._leaders, Fact)
        return self.known[key]

    def all_done(self, position: Position) -> bool:
        """Whether all members are done with the row and no seal lies there: it was passed, or living members will pass it."""
        names = set(self.observer.store.names(self.observer.row_dir(self.generation.number, position)))
        done = all(FACT.build(rank, "done") in names for rank in self.generation.ranks)
        return done and (self.row(position).transient or self.fact(position).status != SEALED)
