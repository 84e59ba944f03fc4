"""One node of a run: look, decide, act. The same code runs in the daemon and in the simulator.

`NodeLoop.tick(now)` looks at the shared directory, lets the state machine decide, and performs its actions in the stated order until
nothing is left to do. It has no clock, no thread and no process of its own: time is passed in, work is handed to `Work`.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fsbarrier.errors import Fenced
from fsbarrier.node.collection import Collection
from fsbarrier.node.observer import Observer
from fsbarrier.node.resume import LastGeneration
from fsbarrier.node.silence import Silence
from fsbarrier.node.work_runner import WorkRunner
from fsbarrier.protocol.codec import decode, encode
from fsbarrier.protocol.facts import SEALED, Beat, Fact, Generation, Join, Payload, Position
from fsbarrier.protocol.machine import awaited, step
from fsbarrier.protocol.membership import JOINING
from fsbarrier.protocol.state import (
    Action,
    Announce,
    CancelWork,
    Entered,
    Exit,
    FindResumePoint,
    Launch,
    Node,
    Note,
    Part,
    Propose,
    Publish,
    Rules,
    Stage,
    View,
    WorkReport,
)
from fsbarrier.rundir.journal import summary
from fsbarrier.rundir.names import fact_name
from fsbarrier.rundir.phase_time import PhaseTime
from fsbarrier.rundir.record_store import Store

#: How long a node waits for the others before it writes its fact once more. Some clients keep a listing until the directory's
#: modification time changes, and that time may be coarse. Example: node 0 lists the row, and within the same second node 1's "done"
#: appears. Node 0's client sees the same time and shows the old listing, until this second write changes the time. Each further
#: write comes after twice the time.
REPEAT_S = 5.0

#: Actions that leave the node as it is, so that the state machine asks for them as long as there is reason to. Example: node 2 was
#: silent, and an outage keeps node 0 from creating the generation without it. After the outage node 2 is heard again.
ASKED_AGAIN = (Propose, FindResumePoint)

#: writes an event, the node as it is then, and the event's fields to the journal
WriteEvent = Callable[[str, Node, Payload], None]


@dataclass
class NodeLoop:
    """A node's loop body. `join` describes this process; its incarnation is filled in at each joining."""

    store: Store
    observer: Observer
    rules: Rules
    work: WorkRunner
    join: Join
    write_event: WriteEvent
    node: Node = field(init=False)
    last_generation: LastGeneration = field(init=False)
    collection: Collection = field(init=False)
    silence: Silence = field(init=False)
    exit: Exit | None = None
    counter: int = 0
    _pending: deque[Action] = field(default_factory=deque)
    #: After the last action another look at once would show nothing new: work was only just launched, or another node's record is there
    #: and cannot be read yet. Without this `tick` would look again and again without a pause.
    _look_later: bool = False
    #: the view in which there was nothing to do
    _nothing_to_do_in: View | None = None
    #: the listings showed where the run was so long ago that the facts from then are gone
    _listings_behind: bool = False
    #: The incarnation in the heartbeats: the last one whose join record is surely this process's. While this node tries to
    #: join as the next one, another process of its rank may take that number.
    _announced: int = 0
    #: The incarnation whose announcement ended in an error. Example: the server creates the join record, but its answer is lost, and
    #: the client reports EIO. The next try finds the name taken. Without this note the node would believe that another process has
    #: its rank, and end. So it reads the record and compares it with its own.
    _ambiguous: int = 0
    #: the fact that this node published last, when it is to write it again, and how long after this time
    _published: Fact | None = None
    _repeat_at: float = float("inf")
    _repeat_s: float = REPEAT_S
    #: the rows of this generation whose folder this node has made
    _rows_made: set[int] = field(default_factory=set)
    #: the row that this node entered last
    _row: Position | None = None
    #: the rows that it has passed since it last removed old facts, and what their folders showed
    _passed: list[tuple[Generation, Position, list[str]]] = field(default_factory=list)
    #: this node's pulse, under the name that it was given last
    _pulse: Path | None = None

    def __post_init__(self) -> None:
        self.last_generation = LastGeneration(self.observer)
        self.collection = Collection(self.store, self.observer.paths, self.rules)
        self.silence = Silence(self.observer)

    def start(self, now: float, claimed: int | None = None) -> None:
        """Join the run as the next incarnation of this rank; the observer has been prepared. Raises OSError.

        `claimed`: as this incarnation or not at all. Then it raises Fenced where another process has that.
        """
        newest = self.observer.newest
        previous = self.observer.joins.get(self.join.rank)
        incarnation = claimed or 1 + (previous.incarnation if previous is not None else 0)
        baseline = newest.number if newest is not None else 0
        while not self._announce(incarnation):
            if claimed:
                raise Fenced(f"node {self.join.rank} was taken by another process in this moment")
            incarnation += 1
        self.node = Node(
            self.join.rank, incarnation, now, self.join.host, started_as=incarnation, baseline=baseline
        )
        # The first look records it: a journal that cannot be written yet must not make this node join twice.
        self._pending.append(Note("node_joined", {"host": self.join.host, "pid": self.join.pid}))

    def tick(self, now: float) -> bool:
        """Look once and do what follows from it. True if anything happened. Raises OSError when the filesystem fails.

        If an action fails, it and those after it come first at the next tick: the state machine will not ask for them again. Those
        that it does ask for again (`ASKED_AGAIN`), from what can be seen by then, are dropped.
        """
        # Old facts are removed here, after the row was passed, so that no member waits for it.
        self._collect()
        busy, self._listings_behind = bool(self._pending), False
        self._act(now)
        while self.exit is None:
            before = self.node
            view = self.observer.view(before, now, self._work_report())
            if view is self._nothing_to_do_in:
                # Most looks of a wait end here: nothing was due but a look at the row, and that showed nothing new.
                break
            self.node, actions = step(before, view, now, self.rules)
            if not actions and self.node == before:
                self._nothing_to_do_in = view
                break
            if actions:
                busy, self._look_later = True, False
                self._pending.extend(actions)
                self._act(now)
                if self._look_later:
                    busy = not self._listings_behind
                    break
        for event, fields in self.silence.events(self.node, now, self.rules.limits):
            self.write_event(event, self.node, fields)
        if now >= self._repeat_at:
            self._repeat(now)
        return busy

    def _work_report(self) -> WorkReport | None:
        """How this node's own work in its row ended; None where none is under way."""
        return self.work.report() if self.node.part in (Part.EACH, Part.LEADER) else None

    def _act(self, now: float) -> None:
        pending = self._pending
        while pending:
            # The action may change what this node sees, so the last view no longer holds.
            self.observer.last_view = None
            try:
                self._perform(pending[0], now)
            except OSError:
                self._pending = deque(action for action in pending if not isinstance(action, ASKED_AGAIN))
                raise
            pending.popleft()

    def _repeat(self, now: float) -> None:
        if self.node.part is Part.ANNOUNCED and self._published is not None and self.exit is None:
            self._put(self._published, again=True)
            if self._repeat_s == REPEAT_S and self._published.status == "done":
                self._note_work(self._published)
            self._repeat_s *= 2
            self._repeat_at = now + self._repeat_s

    def awaited(self, now: float) -> Sequence[int]:
        """The ranks for which the start waits, as the last look found it."""
        seen = self._nothing_to_do_in
        return awaited(self.node, seen, now, self.rules) if seen is not None else ()

    def beat(self) -> Beat:
        """The next heartbeat."""
        self.counter += 1
        # In this order: once the exit is set the node is as it ended, so that "finished" stands beside the generation that is.
        ended = self.exit
        node = self.node
        state = ended.state if ended is not None else node.stage
        if self._announced != node.incarnation and state == JOINING:
            # It is leaving its old generation. Nobody may admit the incarnation that was in it.
            state = "leaving"
        here, where = self.join, _place(node, node.position, self.rules)
        about = self._announced, self.counter, here.host, here.pid, state
        return Beat(node.rank, *about, *where, self.work.progress())

    def write_beat(self, beat: Beat, store: Store, now: float) -> None:
        """Write a heartbeat. Where that fails, the loop meets the same filesystem, and decides what follows."""
        observer = self.observer
        # Noted before, because a write may also hang.
        observer.unheard_since = observer.unheard_since or now
        with contextlib.suppress(OSError):
            store.put(observer.paths.beat(beat.rank, beat.incarnation), beat)
            with contextlib.suppress(OSError):
                self.show_pulse(beat, store.rename, store.mark)
            observer.unheard_since = None

    def show_pulse(
        self, beat: Beat, rename: Callable[[Path, Path], bool], mark: Callable[[Path, Beat], None]
    ) -> None:
        """Let this node's pulse name a heartbeat that is written. Where that fails, the others open the heartbeat itself."""
        if beat.state != Stage.RUNNING or not self.observer.paces.pulses:
            return
        pulse = self.observer.paths.pulse(beat.rank, beat.incarnation, beat.generation, beat.counter)
        if self._pulse is None or not rename(self._pulse, pulse):
            mark(pulse, beat)
        self._pulse = pulse

    def _announce(self, incarnation: int) -> bool:
        join = replace(self.join, incarnation=incarnation)
        path = self.observer.paths.join(join.rank, incarnation)
        try:
            mine = self.store.create(path, join)
        except OSError:
            self._ambiguous = incarnation
            raise
        if not mine and self._ambiguous == incarnation:
            # The create may have been done although an error came back: see `_ambiguous`.
            mine = self.store.read(path, Join) == join
        if mine:
            self._announced = incarnation
            self.observer.learn_join(join)
        return mine

    def _perform(self, action: Action, now: float) -> None:
        if isinstance(action, Publish):
            self._publish(action.fact, now)
        elif isinstance(action, Entered):
            self._entered(action)
        elif isinstance(action, Launch):
            self.work.launch(self.node, action.part)
            self._look_later = True
        elif isinstance(action, Note):
            self.write_event(action.event, action.at or self.node, action.fields)
        elif isinstance(action, CancelWork):
            self.work.cancel()
        elif isinstance(action, Propose):
            self._propose(action.generation)
        elif isinstance(action, Announce):
            self._announce_again(action.incarnation)
        elif isinstance(action, FindResumePoint):
            self._find_resume_point(action.seal, now)
        else:
            self._end(action)

    def _announce_again(self, incarnation: int) -> None:
        # What its command line asked for was taken in, or refused, with this process's first start. The run may have changed since.
        self.join = replace(self.join, stated={})
        if not self._announce(incarnation):
            raise Fenced(f"node {self.node.rank}: another process took this rank (incarnation {incarnation})")
        self.observer.hurry()

    def _end(self, ended: Exit) -> None:
        self.exit = ended
        self.write_event(
            "node_ended", self.node, {"state": ended.state, "code": ended.code, "reason": ended.reason}
        )

    def _find_resume_point(self, seal: bool, now: float) -> None:
        fact = Fact(self.node.rank, self.node.incarnation, SEALED) if seal else None
        found = self.last_generation.resume_point(self.rules, now, fact)
        self.observer.resume_point = found
        if found is None:
            # This node's listings are behind. Another look at once would show the same.
            self._listings_behind = self._look_later = True
            self.observer.hurry()
        elif seal and found.generation:
            place = [found.position.iteration, found.position.phase]
            self.write_event(
                "generation_sealed", self.node, {"number": found.generation, "goes_on_at": place}
            )

    def _publish(self, fact: Fact, now: float) -> None:
        node, events = self.node, fact.value.get("events", ())
        if events:
            fact = replace(fact, value={name: one for name, one in fact.value.items() if name != "events"})
        self._put(fact)
        self._published, self._repeat_s, self._repeat_at = fact, REPEAT_S, now + REPEAT_S
        self._note_work(fact)
        for line in events:
            self.write_event(line["event"], node, {k: v for k, v in line.items() if k != "event"})
        if fact.value and fact.status == "done" and node.place[0].leader == node.rank:
            self.write_event("decision", node, {"value": summary(fact.value, events)})

    def _note_work(self, fact: Fact) -> None:
        """Say how long the work took, if there was any, or why it failed."""
        failed = fact.status != "done"
        if failed or self._works(*self.node.place):
            work = PhaseTime.of_work(fact.work_s, fact.value).fields()
            details = {key: fact.value[key] for key in ("error", "exit_code", "log") if key in fact.value}
            event, fields = ("work_failed", {**work, **details}) if failed else ("work_finished", work)
            self.write_event(event, self.node, fields)

    def _put(self, fact: Fact, *, again: bool = False) -> None:
        """Write this node's fact about the row it is in.

        The leader's fact is created and not replaced: if a seal has ended this generation, that lies under the same name, and must stay.
        It must outlive a loss of power, and so must what others read of a member's. Were only the name left, all would be done by the
        names, and the leader could not read what its next work needs.
        """
        node, (generation, position) = self.node, self.node.place
        row = self.rules.row(position, generation)
        name = fact_name(position.iteration, node.rank, fact.status, row.call(fact.value))
        path = self.observer.row_dir(generation.number, position) / name
        leads = generation.leader == node.rank
        if leads and position.phase == self.rules.span(generation.choices)[1]:
            self.collection.open(generation, position.iteration + 1)
        if leads and not row.transient:
            if self.store.create(path, fact):
                # The others read it as JSON, where a tuple is a list.
                self.observer.created = path, decode(encode(fact), Fact)
        elif not again and row.told_by_name(fact):
            self.store.mark(path, fact)
        else:
            # A group's caller goes on without a member that lost power.
            self.store.put(path, fact, durable=not row.transient)

    def _propose(self, generation: Generation) -> None:
        path = self.observer.paths.generation(generation.number)
        if self.store.create(path, generation):
            self.observer.learn(generation)
            self.write_event(
                "generation_proposed", self.node, {"number": generation.number, "reason": generation.reason}
            )
        else:
            record = self.store.read(path, Generation)
            self.observer.learn(record)
            # Another node's record is there but cannot be read yet: leave it to the next tick.
            self._look_later = record is None
        self.observer.hurry()

    def _entered(self, row: Entered) -> None:
        if row.begins:
            self.silence.begin()
            self._rows_made.clear()
            self._row = None
            self.collection.begin(row.generation)
            self.observer.hurry()
        if row.position.phase not in self._rows_made:
            self.store.make_dir(self.observer.row_dir(row.generation.number, row.position))
            self._rows_made.add(row.position.phase)
        # After an error this action is performed again, and must note the row only once.
        if self._row != row.position:
            if self._row is not None and not row.begins:
                names = self.observer.names_in_row(row.generation, self._row)
                self._passed.append((row.generation, self._row, names))
            self._row = row.position
        # Where this node has no work, `phase_started` also tells that its part of the row is done.
        works = self._works(row.generation, row.position)
        self.write_event("phase_started", self.node, {} if works else {"waits": True})

    def _works(self, generation: Generation, position: Position) -> bool:
        """Whether this node has work of its own in a row."""
        row = self.rules.row(position, generation)
        return row.each is not None or (row.leader is not None and generation.leader == self.node.rank)

    def _collect(self) -> None:
        """Remove what nobody needs any more because of the rows that this node has passed."""
        passed, self._passed = self._passed, []
        for generation, position, names in passed:
            # Nothing else depends on it: what cannot be removed now is removed an iteration later.
            with contextlib.suppress(OSError):
                self.collection.collect(self.node.rank, generation, position, names)


def place(node: Node, position: Position | None, rules: Rules) -> dict[str, object]:
    """Where a node is, in the fields that heartbeats and the journal share."""
    fields = ("generation", "iteration", "phase", "phase_name")
    return dict(zip(fields, _place(node, position, rules), strict=True))


def _place(node: Node, position: Position | None, rules: Rules) -> tuple[int, int, int, str]:
    if node.generation is None or position is None:
        return (node.generation.number if node.generation is not None else 0), 0, 0, ""
    return node.generation.number, position.iteration, position.phase, rules.row_name(position)
