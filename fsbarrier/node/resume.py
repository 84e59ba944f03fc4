"""Where the newest generation left the run: read from its facts on disk. A seal ends that generation there for good.

Why a seal. Listings may be old, and a node that was taken for dead may be at work. Example: node 2 was started again, and its listings
are 20 s old. Nodes 0 and 1 look dead to it, and row 7 shows no fact of their leader, node 0. If node 2 simply went on from row 7, it
would decide row 7 anew while nodes 0 and 1 pass it with another decision: the run would have split.

So node 2 creates the leader's fact of row 7 itself, as a seal. Only one of the two can create that name. If the seal is there first,
node 0 cannot publish, and no member ever passes row 7. If node 0 was first, node 2 reads its decision and tries the next row.

Facts of old iterations are removed (node/collection.py). If what the listings show is so old, node 2 looks again until they show more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fsbarrier.node.observer import Observer
from fsbarrier.node.unreadable import must_read
from fsbarrier.protocol.facts import SEALED, Fact, Generation, Payload, Position
from fsbarrier.protocol.rows import Row
from fsbarrier.protocol.state import ResumePoint, Rules
from fsbarrier.protocol.succession import with_decision
from fsbarrier.rundir.names import FACT, PHASE_FOLDER


class _Behind(Exception):
    """The members have gone on since, and have removed the facts that this node looked for."""


@dataclass
class LastGeneration:
    """Follows the newest generation's facts. It reads each fact once, since facts do not change."""

    observer: Observer
    _facts: dict[tuple[int, Position], Fact] = field(default_factory=dict)

    def resume_point(self, rules: Rules, now: float, seal: Fact | None = None) -> ResumePoint | None:
        """Where the newest generation is, or was when it ended. With `seal` it ends there, even if members of it still live.

        None where this node's listings are so old that the facts which they show were removed since. A fact that is there and cannot be
        read is an error: treating it as absent would throw a decision away. If a member entered a later row, the row was passed, and
        its leader's fact must be there. Raises OSError.
        """
        generation = self.observer.newest
        if generation is None:
            return ResumePoint(Position(1, rules.span({})[0]), at=now, sealed=True)
        trail = _Trail(self.observer, rules, generation, *rules.span(generation.choices), self._facts)
        try:
            return self._follow(trail, now, seal)
        except _Behind:
            return None

    def _follow(self, trail: _Trail, now: float, seal: Fact | None) -> ResumePoint:
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
        resumed = max(trail.first, trail.rules.table.resume_index(trail.row(reached)))
        position = Position(reached.iteration, resumed)
        span = trail.first, trail.last
        return ResumePoint(position, decisions, trail.generation.number, now, span, sealed=seal is not None)


@dataclass(frozen=True, slots=True)
class _Trail:
    """The facts of one generation, which ran the rows `first` to `last`."""

    observer: Observer
    rules: Rules
    generation: Generation
    first: int
    last: int
    known: dict[tuple[int, Position], Fact]

    def row(self, position: Position) -> Row[object]:
        return self.rules.row(position, self.generation)

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
        """The furthest row that some member has entered, by the heartbeats and by the facts in the directory."""
        observer, number = self.observer, self.generation.number
        root, furthest = observer.paths.facts_of(number), self.heard()
        if root.name not in observer.store.names(observer.paths.coordination):
            return furthest
        for row in PHASE_FOLDER.parse_all(observer.store.names(root)):
            if self.first <= row.index <= self.last:
                facts = FACT.parse_all(
                    observer.store.names(observer.paths.phase(number, row.index, row.name))
                )
                furthest = max([furthest, *(Position(fact.iteration, row.index) for fact in facts)])
        return furthest

    def end(self, reached: Position, seal: Fact) -> Position:
        """Put the seal into the first row from `reached` on in which the leader has published nothing.

        Gives the furthest row that some member may have entered. If the leader published in a row, all rows before it were passed.
        Whether that row was passed too, only the facts of all members show. If this node's listing does not show them, the run
        does that one row once more.
        """
        if self.generation.verdict is not None or self.lasting is None:
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
        observer = self.observer
        observer.store.make_dir(observer.row_dir(self.generation.number, position))
        created = observer.store.create(self._leaders(position), seal)
        if not created and self.fact(position).status != SEALED:
            return False
        if not self._was_kept(position):
            # The leader had published here. Its fact was removed, so this seal stops nobody.
            self.known.pop((self.generation.number, position), None)
            raise _Behind
        return True

    def _was_kept(self, position: Position) -> bool:
        """Whether the leader has removed no fact about this iteration until now, as the server says."""
        number, iteration = self.generation.number, position.iteration
        return iteration == self.generation.start.iteration or self.observer.store.is_there_now(
            self.observer.paths.open(number, iteration)
        )

    def decisions(self, reached: Position) -> Mapping[str, Payload]:
        """All that was decided before `reached`."""
        decisions, position = self._opening(reached)
        while position < reached:
            row = self.row(position)
            value = self.fact(position).value if row.decides else None
            if value:
                decisions = with_decision(decisions, row.name, position.iteration, value)
            position = self.after(position)
        return decisions

    def _opening(self, reached: Position) -> tuple[Mapping[str, Payload], Position]:
        """The last row before `reached` that says all that was decided until then: what it says, and where it is."""
        start = self.generation.start
        for iteration in (reached.iteration, reached.iteration - 1):
            if self.lasting is not None and start < (opening := Position(iteration, self.lasting)) < reached:
                return self.fact(opening).decisions, opening
        return self.generation.decisions, start

    @property
    def lasting(self) -> int | None:
        return self.observer.table.first_lasting((self.first, self.last))

    def _leaders(self, position: Position) -> Path:
        """The leader's fact of a row."""
        directory = self.observer.row_dir(self.generation.number, position)
        return directory / FACT.build(position.iteration, self.generation.leader, "done")

    def fact(self, position: Position) -> Fact:
        """The leader's fact of a row in which it has published. Raises OSError, and _Behind where it was removed since."""
        key = self.generation.number, position
        if key not in self.known:
            try:
                self.known[key] = must_read(self.observer.store, self._leaders(position), Fact)
            except OSError:
                if not self._was_kept(position):
                    raise _Behind from None
                raise
        return self.known[key]

    def all_done(self, position: Position) -> bool:
        """Whether all members are done with the row and no seal lies there: it was passed, or living members will pass it."""
        names = set(self.observer.store.names(self.observer.row_dir(self.generation.number, position)))
        done = all(FACT.build(position.iteration, rank, "done") in names for rank in self.generation.ranks)
        return done and (self.row(position).transient or self.fact(position).status != SEALED)
