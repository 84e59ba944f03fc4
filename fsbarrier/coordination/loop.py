"""One node of a run: look, decide, act. The same code runs in the daemon, in the simulator and in other clients.

- A *look* (observer.py) lists the directories that are due and reads what is new in them. The result is a `View`.
- A *decision* (protocol/machine.py) is `step(node, view, now, rules)`: the next `Node`, and a list of actions. It does no I/O.
- An *action* changes something outside the node: it publishes a fact, proposes a generation, or starts or cancels work.

`NodeLoop.tick(now)` looks once and performs one action. If none is pending, the state machine decides first. A tick performs only one,
because an action may take seconds on a busy disk: before the next one the node checks the time and looks at what is due.
A failed action stays pending, and the next tick tries it again (`tick` names the exceptions).

The loop has no clock, thread or process of its own. In the daemon the main thread calls `tick` and the heartbeat thread calls `beat` and
`write_beat` (both through life.py), so that a slow action does not look like death. The work runs in a third thread: `launch` returns at
once, and a later look takes the `WorkReport`. That thread never calls the loop.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Protocol

from fsbarrier.coordination.observer import Observer
from fsbarrier.coordination.own_facts import OwnFacts
from fsbarrier.coordination.resume import LastGeneration
from fsbarrier.errors import Fenced
from fsbarrier.protocol.codec import encode
from fsbarrier.protocol.facts import SEALED, Beat, Fact, Generation, Join, Payload, Position
from fsbarrier.protocol.machine import Rule, awaited, step
from fsbarrier.protocol.membership import JOINING, PREPARING, UNWRITABLE
from fsbarrier.protocol.state import (
    UNREADY,
    Action,
    Announce,
    CancelWork,
    Entered,
    Exit,
    FindResumePoint,
    Launch,
    Node,
    Note,
    Propose,
    Publish,
    RowPart,
    Rules,
    Stage,
    View,
    WorkReport,
)
from fsbarrier.rundir.journal import summary
from fsbarrier.rundir.phase_time import PhaseTime
from fsbarrier.rundir.record_store import Store

#: Actions that do not change the node, so the state machine asks again while there is a reason to, and a failed one must not be
#: repeated blindly. Example: node 2 is silent, and an outage keeps node 0 from creating a generation without it. After the outage
#: node 2 is heard again.
ASKED_AGAIN = (Propose, FindResumePoint)
#: If this node waits for the others longer than this, the journal says when its own work was done.
LONG_S = 5.0

#: writes an event, the node as it is then, and the event's fields to the journal
WriteEvent = Callable[[str, Node, Payload], None]


class WorkRunner(Protocol):
    """Does a node's work outside the loop: in a thread of the daemon, in a group's caller, or in the simulator."""

    def launch(self, node: Node, part: RowPart) -> None:
        """Begin `part` of the work in the node's row. Work that still runs is ended first."""

    def cancel(self) -> None:
        """End the running work completely and discard its report. Raises StoreError if it cannot be ended."""

    @property
    def report(self) -> WorkReport | None:
        """How the last launched work ended; None while it runs. It stays the same until the next launch."""

    def progress(self) -> Payload:
        """How far the work is, for the heartbeat."""


class LookAgain(Enum):
    """When to call `tick` again."""

    #: at once, since actions are pending or there may be something new
    NOW = 0
    #: after a short pause, since work has just been launched, or another node's record is not readable yet
    LATER = 1
    #: at the usual pace, since there was nothing to do or this node's listings are stale
    AT_USUAL_PACE = 2


@dataclass
class NodeLoop:
    """The body of a node's loop. `join` describes this process; each joining fills in an incarnation."""

    store: Store
    observer: Observer
    rules: Rules
    work: WorkRunner
    join: Join
    write_event: WriteEvent
    #: called with the time that this node's work took; `phase_finished` includes it
    note_work: Callable[[PhaseTime], None] = lambda time: None
    #: a client's own rules in place of RUN_ANSWERS
    answers: Sequence[Rule] | None = None
    node: Node = field(init=False)
    exit: Exit | None = None
    #: the error of writing the status beside the last heartbeat; None if it was written
    unwritable: OSError | None = None
    counter: int = 0
    last_generation: LastGeneration = field(init=False)
    #: The incarnation that heartbeats may name: the last one whose join record certainly belongs to this process. While this node
    #: tries to join as the next incarnation, another process of its rank may take that number.
    announced: int = 0
    #: the incarnation whose join ended in an error, so its record may exist
    _perhaps_announced: int = 0
    _facts: OwnFacts = field(init=False)
    #: how long this node's work in its row took, and when its fact was published; None once the journal has it
    _work_done: tuple[PhaseTime, float] | None = None
    #: the actions that are still to be performed
    _pending: deque[Action] = field(default_factory=deque)
    #: the view in which there was nothing to do
    _idle_view: View | None = None
    #: the file names that this node's heartbeat may have now; several after a rename that ended in an error
    _beat_names: list[Path] = field(default_factory=list)
    #: the incarnation of the last written heartbeat
    _beating_as: int = 0
    #: the last report of work whose lines are in the journal
    _told: WorkReport | None = None

    def __post_init__(self) -> None:
        self.last_generation = LastGeneration(self.observer)
        self._facts = OwnFacts(self.store, self.observer.row, self.rules)

    def start(self, now: float, claimed: int | None = None) -> None:
        """Join the run as the next incarnation of this rank; the observer must be prepared. Raises OSError.

        `claimed`: join as exactly this incarnation. Raises Fenced if another process has it.
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
        # The first tick writes the event. If this method wrote it, an unwritable journal would make this node join twice.
        self._pending.append(Note("node_joined", {"host": self.join.host, "pid": self.join.pid}))

    def tick(self, now: float) -> LookAgain:
        """Look at what is due, decide if no action is pending, and perform one action. Returns when to call this again.

        Raises OSError when the filesystem fails, Fenced when another process has taken this rank, StoreError when work cannot be ended.
        If an action fails, it and the actions after it stay pending, since the state machine will not ask for them again. Dropped are
        only the actions that it does ask for again (`ASKED_AGAIN`), and facts about a generation that is over.

        The look comes first, so a node that cannot write still sees what the others do, and its heartbeats continue.
        """
        if self._pending:
            self.observer.read_due(self.node, now)
        elif (actions := self._decide(now)) is not None:
            self._pending.extend(actions)
        else:
            self._wait(now)
            self._facts.clean_up(self.node.rank)
            return LookAgain.AT_USUAL_PACE
        return self._act(now) if self._pending else LookAgain.NOW

    def _wait(self, now: float) -> None:
        """There is nothing to do. Raises OSError while the journal cannot be written."""
        if self._work_done is not None and now - self._work_done[1] >= LONG_S:
            # The others take long, so the journal says now when this node's work was done.
            work, self._work_done = self._work_done[0], None
            self.write_event("work_finished", self.node, work.fields())
        # A refreshed listing is not needed to wait, so an error here does no harm. If the mount fails, the next look raises.
        with contextlib.suppress(OSError):
            self._facts.refresh(self.node, now)

    def _decide(self, now: float) -> Sequence[Action] | None:
        """Look, and let the state machine decide. Returns the actions to perform; None if there is nothing to do."""
        before = self.node
        work = self.work.report if before.part in (RowPart.EACH, RowPart.LEADER) else None
        view = self.observer.view(before, now, work)
        # This comes after the look, because a journal that cannot be written must not keep this node from looking.
        if work is not None and work is not self._told:
            for line in work.events:
                self.write_event(line["event"], before, {k: v for k, v in line.items() if k != "event"})
            self._told = work
        if view is self._idle_view:
            # Most looks of a wait end here, since only the row was due and it showed nothing new.
            return None
        self.node, actions = step(before, view, now, self.rules, self.answers)
        if not actions and self.node == before:
            self._idle_view = view
            return None
        return actions

    def _act(self, now: float) -> LookAgain:
        """Perform the first pending action. Returns NOW while others are pending, else what the last one asks for."""
        # The action may change what this node sees, so the last view is outdated.
        self.observer.last_view = None
        action, after = self._pending[0], None
        try:
            after = self._perform(action, now)
        except OSError as error:
            if not (isinstance(error, FileNotFoundError) and self._is_of_the_past(action)):
                self._pending = deque(left for left in self._pending if not isinstance(left, ASKED_AGAIN))
                raise
        self._pending.popleft()
        if isinstance(action, Publish):
            # This is a good moment to remove old files, since nobody waits for this node now.
            self._facts.clean_up(self.node.rank)
        return LookAgain.NOW if self._pending else after or LookAgain.NOW

    def _is_of_the_past(self, action: Action) -> bool:
        """Whether an action publishes a fact about a generation that is over. Raises OSError.

        Example: this process was stopped while it published, and the others have removed the folder of that generation. Another try
        would fail for ever, and the node would never learn that it is no member any more.
        """
        if not isinstance(action, Publish):
            return False
        generation, _ = self.node.place
        return self.observer.registry.newest_number() > generation.number

    def awaited(self, now: float) -> Sequence[int]:
        """The missing ranks that this node waits for, according to its last view."""
        seen = self._idle_view
        return awaited(self.node, seen, now, self.rules) if seen is not None else ()

    def beat(self) -> Beat:
        """Make the next heartbeat. The heartbeat thread calls this while the loop's thread may change the node."""
        self.counter += 1
        # Read the exit before the node. Once it is set, the node no longer changes, so "finished" names the right generation.
        ended = self.exit
        node = self.node
        state = ended.state if ended is not None else node.stage
        if self.announced != node.incarnation and state == JOINING:
            # It is about to rejoin as the next incarnation, so nobody may admit the old one.
            state = "leaving"
        elif state == JOINING and node.part in UNREADY:
            state = PREPARING
        elif state == Stage.RUNNING and self.unwritable is not None:
            state = UNWRITABLE
        here, where = self.join, _place_values(node, node.position, self.rules)
        about = self.announced, self.counter, here.host, here.pid, state
        return Beat(node.rank, *about, *where, self.work.progress())

    def write_beat(self, beat: Beat, now: float) -> None:
        """Write a heartbeat: the status file, then the file name with the counter. Errors are not raised: a node that cannot write
        heartbeats declares nobody dead (`Observer`). On a full disk the name can still change, although the status cannot be written."""
        observer, store, new_path = self.observer, self.store, self.observer.paths.pulse(beat.pulse)
        # The status comes first, so that a node that sees the last heartbeat's name can read the details.
        try:
            store.put(observer.paths.beat(beat.rank, beat.incarnation), beat)
            self.unwritable = None
        except OSError as error:
            self.unwritable = error
        with contextlib.suppress(OSError):
            # When an incarnation begins, the heartbeat of the last one keeps its name.
            old_paths, self._beat_names = self._beat_names, [new_path, *self._beat_names]
            if beat.incarnation != self._beating_as:
                old_paths, self._beating_as = [], beat.incarnation
            if not any(store.rename(old_path, new_path) for old_path in old_paths):
                store.mark(new_path, beat)
            self._beat_names, observer.beaten_at = [new_path], now

    def _announce(self, incarnation: int) -> bool:
        """Join as this incarnation; False if another process has it. Raises OSError.

        A create may be ambiguous. Example: the server creates the record, its answer is lost, and the client reports EIO. The next try
        finds the name taken and reads the record, to see whether it is this node's own. Otherwise this node would believe that another
        process has its rank, and end.
        """
        join, path = (
            replace(self.join, incarnation=incarnation),
            self.observer.paths.join(self.join.rank, incarnation),
        )
        before, self._perhaps_announced = self._perhaps_announced, incarnation
        mine = self.store.create(path, join)
        self._perhaps_announced = 0
        if not mine and before == incarnation:
            recorded = self.store.read(path, Join)
            mine = recorded is not None and encode(recorded) == encode(join)
        if mine:
            self.announced = incarnation
            self.observer.registry.learn_join(join)
        return mine

    def _perform(self, action: Action, now: float) -> LookAgain | None:
        """Perform one action. Returns when to look again; None: at once, since there may be something new."""
        match action:
            case Publish(fact):
                self._facts.publish(self.node, fact)
                self._log_fact(fact, now)
            case Entered():
                self._enter(action)
            case Launch(part, at):
                self.work.launch(at or self.node, part)
                return LookAgain.LATER
            case Note(event, fields, at):
                self.write_event(event, at or self.node, fields)
            case CancelWork():
                self.work.cancel()
            case Propose(generation):
                return self._propose(generation)
            case Announce(incarnation):
                self._announce_again(incarnation)
            case FindResumePoint(seal):
                return self._find_resume_point(seal, now)
            case Exit():
                self._end(action)
        return None

    def _announce_again(self, incarnation: int) -> None:
        if not self._announce(incarnation):
            raise Fenced(f"node {self.node.rank}: another process took this rank (incarnation {incarnation})")
        self.observer.schedule.poll_now()

    def _end(self, ended: Exit) -> None:
        self.exit = ended
        self.write_event(
            "node_ended", self.node, {"state": ended.state, "code": ended.code, "reason": ended.reason}
        )

    def _find_resume_point(self, seal: bool, now: float) -> LookAgain:
        fact = Fact(self.node.rank, self.node.incarnation, SEALED) if seal else None
        resume_point = self.last_generation.resume_point(self.rules, now, fact)
        self.observer.resume_point = resume_point
        if resume_point is None:
            self.observer.schedule.poll_now()
            return LookAgain.AT_USUAL_PACE
        if seal and resume_point.generation:
            place = [resume_point.position.iteration, resume_point.position.phase]
            self.write_event(
                "generation_sealed", self.node, {"number": resume_point.generation, "goes_on_at": place}
            )
        return LookAgain.NOW

    def _log_fact(self, fact: Fact, now: float) -> None:
        """Write the journal's lines about a fact that this node has just published."""
        node, events = self.node, self._told.events if self._told is not None else ()
        work = PhaseTime.of_work(fact.work_s, fact.value)
        if fact.status != "done":
            details = {key: fact.value[key] for key in ("error", "exit_code", "log") if key in fact.value}
            self.write_event("work_failed", node, {**work.fields(), **details})
        elif self._has_work(*node.place):
            self._work_done = work, now
            self.note_work(work)
        if fact.value and fact.status == "done" and node.place[0].leader == node.rank:
            self.write_event("decision", node, {"value": summary(fact.value, events)})

    def _propose(self, generation: Generation) -> LookAgain:
        path = self.observer.paths.generation(generation.number)
        look_again = LookAgain.NOW
        if self.store.create(path, generation):
            self.observer.registry.learn(generation)
            self.write_event(
                "generation_proposed", self.node, {"number": generation.number, "reason": generation.reason}
            )
        else:
            # Another node was first, and all nodes follow its record.
            read = self.observer.registry.read_generation(generation.number)
            look_again = look_again if read else LookAgain.LATER
        self.observer.schedule.poll_now()
        return look_again

    def _enter(self, row: Entered) -> None:
        if row.begins:
            self.observer.schedule.poll_now()
        self._work_done = None
        self._facts.enter(row)
        # If this node has no work in the row, `phase_started` also says that it is done with it.
        works = self._has_work(row.generation, row.position)
        self.write_event("phase_started", self.node, {} if works else {"waits": True})

    def _has_work(self, generation: Generation, position: Position) -> bool:
        """Whether this node has work of its own in a row."""
        row = self.rules.row(position, generation)
        return row.each is not None or (row.leader is not None and generation.leader == self.node.rank)


def place(node: Node, position: Position | None, rules: Rules) -> dict[str, object]:
    """A node's position, as the fields that heartbeats and the journal share."""
    fields = ("generation", "iteration", "phase", "phase_name")
    return dict(zip(fields, _place_values(node, position, rules), strict=True))


def _place_values(node: Node, position: Position | None, rules: Rules) -> tuple[int, int, int, str]:
    if node.generation is None or position is None:
        return (node.generation.number if node.generation is not None else 0), 0, 0, ""
    return node.generation.number, position.iteration, position.phase, rules.row_name(position)
