"""Reads from the newest generation's facts where it left the run, and fences that generation with a seal.

Why a seal. Listings may be stale, and a node that looks dead may be at work. Example: node 2 was restarted, and its listings are 20 s
stale. Nodes 0 and 1 look dead to it, and row 7 shows no fact of their leader, node 0. If node 2 resumed at row 7, it would decide row 7
again while nodes 0 and 1 pass it with another decision: a split brain.

So node 2 creates the leader's fact of row 7 itself, as a seal. Only one of the two can create that name. If the seal is first, node 0
cannot publish, and no member ever passes row 7. If node 0 was first, node 2 reads its decision and tries the next row.

The leader's facts stay as long as their generation, so a row that was passed cannot be sealed. If the listings do not even show a newer
generation, the seal is of no use, but does no harm either: the next generation's number is taken.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fsbarrier.coordination.observer import Observer
from fsbarrier.protocol.facts import SEALED, Decision, Fact, Generation, Payload, Position
from fsbarrier.protocol.rows import Row
from fsbarrier.protocol.state import ResumePoint, Rules
from fsbarrier.protocol.succession import with_decision
from fsbarrier.rundir.names import FACT, PHASE_FOLDER


@dataclass
class LastGeneration:
    """Reads the newest generation's facts, each of them once, since facts are immutable."""

    observer: Observer
    _facts: dict[tuple[int, Position], Fact] = field(default_factory=dict)

    def resume_point(self, rules: Rules, now: float, seal: Fact | None = None) -> ResumePoint | None:
        """Where the newest generation is, or was when it ended. `seal` fences it there, even if members are still alive.

        Returns None if a heartbeat has named a newer generation meanwhile, or if the members went on since this node looked. A fact that
        exists but cannot be read raises OSError, since treating it as absent would lose a decision. If a member has entered a later row,
        the leader's fact about this row must exist.
        """
        generation = self.observer.newest
        if generation is None:
            return ResumePoint(Position(1, rules.span({})[0]), at=now, sealed=True)
        rules = rules.under(generation.settings)
        past = _PastGeneration(self.observer, rules, generation, *rules.span(generation.choices), self._facts)
        try:
            point = self._where_it_was_left(past, now, seal)
        except OSError:
            # Facts of older generations are removed, so the error means nothing if a newer generation has begun.
            if self.observer.newest is generation:
                raise
            return None
        return point if self.observer.newest is generation else None

    def _where_it_was_left(self, past: _PastGeneration, now: float, seal: Fact | None) -> ResumePoint | None:
        reached: Position | None = past.furthest()
        if seal is not None and reached is not None:
            reached = past.end(reached, seal)
        if reached is None:
            return None
        decisions = past.decisions(reached)
        while past.all_done(reached):
            if value := past.decision(reached):
                decisions = with_decision(decisions, past.row(reached).name, reached.iteration, value)
            reached = past.after(reached)
            if reached.phase == past.first:
                break
        row = past.row(reached)
        resumed = row.index + 1 if past.result_is_there(reached) else past.rules.table.resume_index(row)
        resumed = max(past.first, resumed)
        position = Position(reached.iteration, resumed)
        span = past.first, past.last
        return ResumePoint(position, decisions, past.generation.number, now, span, sealed=seal is not None)


@dataclass(frozen=True, slots=True)
class _PastGeneration:
    """The facts of one generation, which runs the rows `first` to `last`. `known`: the leaders' facts that this node has read so far, of
    any generation."""

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
        """The furthest row that a member has entered, according to the heartbeats."""
        beats = self.observer.read_beats().values()
        concerning = [
            beat for beat in beats if beat.generation == self.generation.number and beat.iteration > 0
        ]
        return max([self.generation.start, *(Position(beat.iteration, beat.phase) for beat in concerning)])

    def furthest(self) -> Position:
        """The furthest row that a member has entered, according to the heartbeats and the facts."""
        observer, number = self.observer, self.generation.number
        # If this node has read a leader's fact about a row, the leader has entered it, even if a stale listing does not show the fact.
        read = [position for generation, position in self.known if generation == number]
        root, furthest = observer.paths.facts_of(number), max([self.heard(), *read])
        if root.name not in observer.store.names(observer.paths.coordination):
            return furthest
        for row in PHASE_FOLDER.parse_all(observer.store.names(root)):
            if self.first <= row.index <= self.last:
                facts = FACT.parse_all(
                    observer.store.names(observer.paths.phase(number, row.index, row.name))
                )
                furthest = max([furthest, *(Position(fact.iteration, row.index) for fact in facts)])
        return furthest

    def end(self, reached: Position, seal: Fact) -> Position | None:
        """Create the seal in the first row from `reached` on in which the leader has not published.

        Returns the furthest row that a member may have entered. If the leader has published in a row, all rows before it were passed.
        Only the facts of all members show whether that row itself was passed. If a stale listing does not show them, the run repeats
        that one row.

        Returns None if the leader has published in two rows that this node did not know of: then the members may be at work.
        """
        if self.generation.verdict is not None or self.rules.table.transient:
            # No seal is needed: this generation has a verdict, or no later generation uses its results.
            return reached
        until, published = self.generation.until, 0
        while until is None or reached.iteration <= until:
            if self._seal(reached, seal):
                break
            published += 1
            if published > 1:
                return None
            reached = self.after(reached)
        heard = self.heard()
        if reached > heard and not self.all_done(self.before(reached)):
            reached = self.before(reached)
        return reached

    def _seal(self, position: Position, seal: Fact) -> bool:
        """Create the seal in a row; False if the leader has published there."""
        observer = self.observer
        observer.store.make_dir(observer.row.row_dir(self.generation.number, position))
        return (
            observer.store.create(self._leaders_path(position), seal) or self.fact(position).status == SEALED
        )

    def decisions(self, reached: Position) -> Mapping[str, Decision]:
        """All decisions before `reached`: for each row the newest one and the one before it (`with_decision`)."""
        decisions: Mapping[str, Decision] = self.generation.decisions
        for index in range(self.first, self.last + 1):
            for position, value in reversed(self._last_two(index, reached)):
                name = self.rules.table.rows[index].name
                decisions = with_decision(decisions, name, position.iteration, value)
        return decisions

    def _last_two(self, index: int, reached: Position) -> list[tuple[Position, Payload]]:
        """The last two decisions of row number `index` before `reached` in this generation, the newest first. Empty ones are skipped."""
        decided: list[tuple[Position, Payload]] = []
        position = Position(reached.iteration if index < reached.phase else reached.iteration - 1, index)
        while len(decided) < 2 and position >= self.generation.start:
            if value := self.decision(position):
                decided.append((position, value))
            position = Position(position.iteration - 1, index)
        return decided

    def decision(self, position: Position) -> Payload:
        """The decision of a row in which the leader has published; empty if there is none. Raises OSError."""
        decides = self.row(position).decides and not self.rules.table.transient
        return self.fact(position).value if decides else {}

    def _leaders_path(self, position: Position) -> Path:
        """The path of the leader's fact about a row."""
        directory = self.observer.row.row_dir(self.generation.number, position)
        return directory / FACT.build(position.iteration, self.generation.leader, "done")

    def fact(self, position: Position) -> Fact:
        """The leader's fact about a row in which it has published. Raises OSError."""
        key = self.generation.number, position
        if key not in self.known:
            self.known[key] = self.observer.store.must_read(self._leaders_path(position), Fact)
        return self.known[key]

    def all_done(self, position: Position) -> bool:
        """Whether all members are done with the row and it has no seal, so it was passed or the living members will pass it."""
        return self._are_done(position, self.generation.ranks)

    def result_is_there(self, position: Position) -> bool:
        """Whether the row has makers (`Row.made_by`) and all of them are done."""
        makers = self.rules.makers(self.row(position), self.generation.ranks)
        return bool(makers) and self._are_done(position, makers)

    def _are_done(self, position: Position, ranks: Collection[int]) -> bool:
        """Whether these members are done with the row. If the leader is among them, its fact must be no seal."""
        names = set(self.observer.store.names(self.observer.row.row_dir(self.generation.number, position)))
        done = all(FACT.build(position.iteration, rank, "done") in names for rank in ranks)
        sealable = self.generation.leader in ranks and not self.rules.table.transient
        return done and not (sealable and self.fact(position).status == SEALED)
