"""Runs the program that sends each iteration's metrics to trackers (`tracker.names`), on the leader's node.

It is a kept program (processes/kept_program.py), whose jobs are the iterations. The run never waits for it. If it fails, the journal says
so, and the run goes on.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from fsbarrier.errors import ProgramFailed, StoreError
from fsbarrier.processes.kept_program import KeptProgram
from fsbarrier.processes.secret_variables import without_variables
from fsbarrier.processes.supervisor import own_program, with_this_package
from fsbarrier.processes.worker_contract import WorkerFiles, read_result
from fsbarrier.protocol.facts import Payload
from fsbarrier.protocol.state import Node
from fsbarrier.rundir.runrecord import RunRecord
from fsbarrier.rundir.session_settings import in_force
from fsbarrier.settings.sections import Settings

MODULE = "fsbarrier.workers.track"
#: a launcher's variables about training processes, which do not apply to the trackers' program
NOT_FOR_IT = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
#: how long the end of a node waits for the last iterations to be sent; the next start sends the rest
LAST_S = 10.0
FINISHED_S = 60.0
#: how soon the end of the node is noticed while the program works
LOOK_S = 0.2


@dataclass(frozen=True, slots=True)
class Order:
    """What the trackers should have. `settings`: None if this node does not lead, or there are no trackers. `last`: this session ends."""

    settings: Settings | None = None
    iteration: int = 0
    last: bool = False


class TrackerProgram:
    """The trackers' program of one node, which runs while this node leads."""

    def __init__(self, record: RunRecord, work_dir: Path, log_file: Path) -> None:
        self._record, self._log_file, self._files = record, log_file, WorkerFiles(work_dir / "trackers")
        self._order = Order()
        self._orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._program: KeptProgram | None = None
        # The settings of the last job.
        self._told: Settings | None = None
        self._last_s = LAST_S
        # The time at which the program is ended even if it still works; None while the node goes on.
        self._ends_at: float | None = None
        self._troubles: queue.SimpleQueue[Payload] = queue.SimpleQueue()

    def tell(self, event: str, node: Node, fields: Payload) -> None:
        """React to an event of the journal."""
        generation = node.generation
        if event == "node_ended" and fields.get("state") == "finished":
            self._last_s = FINISHED_S
        if generation is None:
            return
        if event == "generation_started":
            settings = in_force(self._record.settings, generation.settings)
            leads = generation.leader == node.rank and bool(settings.tracker.names)
            self._put(replace(self._order, settings=settings if leads else None))
        elif event == "iteration_finished" and node.position is not None:
            self._put(replace(self._order, iteration=node.position.iteration))

    def troubles(self) -> Iterator[Payload]:
        """The failures since the last call, for the journal."""
        while not self._troubles.empty():
            yield self._troubles.get()

    def close(self) -> None:
        """Wait a while for the last iterations to be sent, and end the program."""
        self._ends_at = time.monotonic() + self._last_s
        self._put(replace(self._order, last=True))
        if self._thread is not None:
            self._thread.join(self._last_s + LAST_S)

    def _put(self, order: Order) -> None:
        self._order = order
        if self._thread is None and order.settings is not None and not order.last:
            self._thread = threading.Thread(target=self._carry_out_orders, name="trackers", daemon=True)
            self._thread.start()
        self._orders.put(order)

    # --- in the thread ---

    def _carry_out_orders(self) -> None:
        order = self._orders.get()
        while True:
            # A failure here must not end the run.
            try:
                self._carry_out(order)
            except (ProgramFailed, StoreError, OSError) as error:
                self._trouble(str(error))
            if order.last:
                return
            order = self._orders.get()

    def _carry_out(self, order: Order) -> None:
        settings, told = order.settings, self._told
        changed = told is not None and (settings is None or settings.tracker != told.tracker)
        if told is not None and self._program is not None and (changed or order.last):
            self._do(told, order.iteration, last=True)
        self._told = None if order.last else settings
        if self._told is not None:
            self._do(self._told, order.iteration, last=False)

    def _do(self, settings: Settings, iteration: int, *, last: bool) -> None:
        """Bring the trackers up to an iteration; with `last` the program ends."""
        program = self._give(settings, {"iteration": iteration, "last": last})
        ended = False
        try:
            while (code := program.wait(LOOK_S)) is None:
                if self._ends_at is not None and time.monotonic() >= self._ends_at:
                    rest = "a start that goes on tells the rest"
                    self._trouble(
                        f"had not told everything after {self._last_s:.0f} s, and was ended; {rest}"
                    )
                    ended = True
                    return
            ended = last or code != 0
            if code != 0:
                said = " | ".join(program.last_log_lines(2))
                self._trouble(f"the program ended with exit code {code}: {said}")
                return
            for problem in read_result(self._files.result, MODULE).get("problems", ()):
                self._troubles.put(problem)
        finally:
            if ended:
                self._program = None
                program.stop(grace_s=1.0)

    def _give(self, settings: Settings, job: Payload) -> KeptProgram:
        """The program, with this job; a new one if there is none. Raises StartFailed, StoreError, OSError."""
        record = str(self._record.paths.record)
        self._files.write_spec({"settings": settings.as_json(), "run_record": record, **job})
        if self._program is not None:
            self._program.give(self._files.spec)
            return self._program
        named = (settings.judge.api_key_env, settings.engine.api_key_env, *NOT_FOR_IT)
        env = without_variables(os.environ, named) | {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
        program = KeptProgram("trackers", 1, self._files.folder / "jobs")
        program.start(
            own_program(MODULE, "--spec", str(self._files.spec)),
            env=with_this_package(env),
            log_file=self._log_file,
            name="trackers",
        )
        self._program = program
        return program

    def _trouble(self, why: str) -> None:
        self._troubles.put({"tracker": "", "why": why})
