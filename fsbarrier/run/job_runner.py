"""Runs a node's work beside its loop: one job at a time, in its own thread, cancellable at any moment.

The daemon's loop calls `launch`, `cancel`, `progress` and `unfit`, and reads `report`. A job never changes the node's state: the loop
publishes its report as a fact. fsbarrier/node.py describes the whole way of a row.

A job runs like this, in its thread:
1. It reads what the row needs from the shared directory (`_begin`), and retries while the directory fails.
2. Once in each era, it checks whether the nodes fit together and suffice for the run (`_admit`).
3. It calls the row's function, `each` or `leader` of the phase, exactly once, with a WorkingNode. Everything that the function does (run a
   program, start engines, publish) goes through that object, which checks for cancellation at each step.
4. It sets `report` and wakes the loop. The report is a result, or a failure with the end of a log.

A job ends in one of four ways:
- The function returns: `report.ok` is true, and its value is what the function returned, plus the times measured.
- The function fails, because of a program, a setting, or a bug: `report.ok` is false. The other nodes read this and may retry.
- This node cannot do any work, for example because the shared directory keeps failing (NodeUnfit): there is no report, since it would blame
  the program. `unfit` gives the reason, and the loop ends the node. It also does so if the thread hangs in the directory, where nothing
  can end it.
- The loop cancels it (Cancelled): there is no report. `cancel` sets the flag and waits for the thread, which ends its program first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from fsbarrier.context import Context
from fsbarrier.coordination.observer import Observer
from fsbarrier.errors import FsbarrierError, NodesRefused, ProgramFailed, StoreError, TooFewNodes
from fsbarrier.processes.failure_reason import only_noticed
from fsbarrier.program import Program, value_of
from fsbarrier.protocol.facts import JsonObject, Payload
from fsbarrier.protocol.state import Node, RowPart, WorkReport
from fsbarrier.protocol.succession import STARTS
from fsbarrier.run.admission import problems
from fsbarrier.run.job import Cancelled, InBackground, NodeUnfit, RowJob, Workplace
from fsbarrier.run.working_node import WorkingNode
from fsbarrier.rundir.logs import SHOWN_LINES
from fsbarrier.rundir.runrecord import RunRecord
from fsbarrier.rundir.session_settings import in_force

T = TypeVar("T")

# How long `cancel` waits: longer than supervisor.KILL_S, the limit for ending a program that hangs in the kernel.
CANCEL_S = 60.0
# How much of a line a failure's fact contains.
SHOWN_CHARACTERS = 10_000


@dataclass
class JobRunner:
    """The daemon's `WorkRunner`. `wake` is called when a job has a report."""

    make_context: Callable[[Node], Context]
    workplace: Workplace
    wake: Callable[[], None]
    # How the last launched job ended; None while it runs.
    report: WorkReport | None = None
    _unfit: StoreError | None = None
    _job: RowJob | None = None
    _thread: InBackground | None = None
    # The last era (`Generation.era`) whose nodes were checked.
    _admitted: int = 0

    # --- called from the node's loop ---

    def launch(self, node: Node, part: RowPart) -> None:
        """Start `part` of the work in the node's row."""
        self.cancel()
        host = self.workplace.host
        self._job = RowJob(host.flag(), host.now)
        self._thread = host.call_in_background(partial(self._run, node, part, self._job))

    def cancel(self) -> None:
        """End the running job; returns when its thread has ended. Raises StoreError if it cannot be ended."""
        job, thread = self._job, self._thread
        if job is None or thread is None:
            return
        job.cancel.set()
        self._thread = None
        thread.join(CANCEL_S)
        # Clear it after the join, because the thread may report until then.
        self.report = None
        if thread.is_alive():
            where = self.workplace.log_path
            raise StoreError(f"the work of this node does not end within {CANCEL_S:g} s; does {where} hang?")

    def unfit(self) -> StoreError | None:
        """Why no job can run on this node, whatever its program; None if jobs can run. The node ends then, since a "failed" fact would
        blame the program.

        A thread that hangs in the shared directory is such a reason, because nothing can end a call that hangs in the kernel.
        """
        job, stall_s = self._job, self.workplace.stall_timeout_s
        if job is not None and job.doing and job.clock() - job.alive_at > stall_s:
            where = self.workplace.log_path
            self._unfit = StoreError(
                f"{job.doing}: no progress for {stall_s:g} s (coordination.stall_timeout_s); does {where} hang?"
            )
        return self._unfit

    def progress(self) -> Payload:
        """The progress of the last launched job, even after its end; {} if there is none."""
        job = self._job
        if job is None:
            return {}
        if self.report is None:
            job.read_progress()
        frozen = {name: engine.status for name, engine in self.workplace.frozen.items()}
        return {**job.progress, "frozen": frozen} if frozen else job.progress

    # --- the job's thread ---

    def _run(self, node: Node, part: RowPart, job: RowJob) -> None:
        started, value, ok = job.clock(), dict[str, object](), False
        try:
            context = self._begin(node, job)
            function = context.phase.each if part is RowPart.EACH else context.phase.leader
            assert function is not None
            returned = function(WorkingNode(context, job, self.workplace))
            value, ok = {**value_of(returned, function), **job.times}, True
        except Cancelled:
            return
        except NodeUnfit as error:
            self._unfit = error
            self.wake()
            return
        except (NodesRefused, TooFewNodes) as error:
            value = {**failure(str(error), code=error.exit_code), "refused": True}
        except (FsbarrierError, OSError) as error:
            value = failure(str(error), code=_code_of(error))
        except (Exception, SystemExit) as error:
            # A bug in a user's program file, or in our code, is reported like any other failure, so that the other nodes can retry.
            value = failure(f"{type(error).__name__}: {error}")
        if not job.cancel.is_set():
            frozen = self.workplace.frozen.values()
            events = (*job.events, *(line for engine in frozen for line in engine.news()))
            self.report = WorkReport(part, ok, value, job.clock() - started, events)
            self.wake()

    def _begin(self, node: Node, job: RowJob) -> Context:
        """Read the facts for the row. The context's later reads are retried too, since the row's function is called only once.

        Raises NodeUnfit, NodesRefused.
        """
        place = self.workplace
        make = partial(self.make_context, node)
        context = self._read(node, job, lambda: place.patiently(job, make))
        job.events += self._admit(context, node)

        def read(ask: Callable[[], T]) -> T:
            return self._read(node, job, lambda: place.retried(job, ask))

        reports, parts_of, claims_unsafe = context.reports, context.parts_of, context.claims_unsafe
        return replace(
            context,
            reports=lambda phase_name: read(partial(reports, phase_name)),
            parts_of=lambda split, iteration: read(partial(parts_of, split, iteration)),
            claims_unsafe=lambda: read(claims_unsafe),
        )

    def _read(self, node: Node, job: RowJob, ask: Callable[[], T]) -> T:
        """The result of `ask`, which reads the shared directory. Raises NodeUnfit, and blames no program, if the directory keeps failing:
        another host may be able to read it."""
        try:
            with job.using_directory("reading what the phase needs"):
                return ask()
        except (OSError, StoreError) as error:
            raise NodeUnfit(f"node {node.rank}: this node cannot begin its work: {error}") from None

    def _admit(self, context: Context, node: Node) -> list[Payload]:
        """Once in each era, check whether its nodes are fit for the run; returns lines for the journal.

        A starting session is refused if they are not (NodesRefused); a running one goes on with the nodes that it has.
        """
        generation, _ = node.place
        if generation.era == self._admitted:
            return []
        self._admitted = generation.era
        noticed = problems(context)
        refused = [problem for problem in noticed if problem.refused]
        if refused and generation.reason in STARTS:
            what = "; ".join(f"{problem.what}: {problem.found}" for problem in refused)
            # With a single problem, the table would only repeat the first line.
            table = map(str, noticed) if len(noticed) > 1 else ()
            raise NodesRefused("\n".join([f"the nodes cannot carry this run: {what}", *table]))
        # Every node sees the same differences; only the leader logs them.
        if context.node_rank != context.leader:
            return []
        return [
            {"event": "nodes_differ", "what": problem.what, "found": problem.found} for problem in noticed
        ]


def _code_of(error: Exception) -> int:
    """The exit code of a node that cannot work because of this error."""
    return StoreError.exit_code if isinstance(error, OSError | StoreError) else ProgramFailed.exit_code


def failure(message: str, code: int = ProgramFailed.exit_code) -> JsonObject:
    """The value of a "failed" fact: the first line as the error, the log's path and last lines, each cut to `SHOWN_CHARACTERS`.

    `code`: the exit code of a node that ends because of it.
    """
    first, *rest = (line[:SHOWN_CHARACTERS] for line in message.splitlines() or ["failed"])
    value: JsonObject = {"error": first, "log": [*rest[:1], *rest[1:][-SHOWN_LINES:]]}
    if only_noticed(first):
        value["noticed"] = True
    return value if code == ProgramFailed.exit_code else {**value, "exit_code": code}


@dataclass(frozen=True, slots=True)
class ContextMaker:
    """Called with a node that is about to work, in the work's thread, where a slow disk does not hold up the loop. Raises OSError."""

    record: RunRecord
    program: Program
    observer: Observer
    workplace: Workplace

    def __call__(self, node: Node) -> Context:
        host, (generation, position) = self.workplace.host, node.place
        # Use the generation's last iteration, not the one given when the run was made: a later session may go further.
        choices = {**generation.choices, "iterations": generation.until}
        settings = replace(in_force(self.record.settings, generation.settings), **choices)
        return Context(
            run_id=self.record.run_id,
            paths=self.record.paths,
            settings=settings,
            tasks=self.record.tasks,
            model=Path(self.record.model) if self.record.model else None,
            node_rank=node.rank,
            incarnation=node.incarnation,
            members=generation.members,
            leader=generation.leader,
            generation=generation.number,
            iteration=position.iteration,
            attempt=generation.attempt,
            phase=self.program.row(position, generation.until, settings.rl_phase),
            decisions=node.decisions,
            joins=self.observer.registry.joins_of(generation),
            reports=partial(self.observer.row.reports, node),
            newest=self.observer.registry.newest_number,
            parts_of=partial(host.parts_on_disk, self.record.paths),
            claims_unsafe=partial(host.claims_unsafe, self.record.log_path),
            accelerators=len(self.workplace.devices),
            cpus=host.cpus(),
            kept=self.workplace.resident_name(generation.era),
        )
