"""Runs the program that sends each iteration's metrics to trackers (`tracker.names`), on the leader's node.

The run never waits for that program, which reads the journals itself. If it fails, the journal says so, and the run goes on.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from fsbarrier.errors import ProgramFailed, StoreError
from fsbarrier.processes.secret_variables import without_variables
from fsbarrier.processes.supervisor import Child, own_program, with_this_package
from fsbarrier.protocol.facts import Payload
from fsbarrier.protocol.state import Node
from fsbarrier.rundir.runrecord import RunRecord
from fsbarrier.rundir.session_settings import in_force
from fsbarrier.settings.sections import Settings, TrackerSettings
from fsbarrier.store import files

#: a launcher's variables about training processes, which do not apply to the trackers' program
NOT_FOR_IT = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
#: how often one daemon restarts a program that ended by itself
RESTARTS = 3
#: how long the end of a node waits for the last iterations to be sent; the next start sends the rest
LAST_S = 10.0
FINISHED_S = 60.0


class TrackerProgram:
    """The trackers' program of one node, which runs while this node leads."""

    def __init__(self, record: RunRecord, work_dir: Path, log_file: Path) -> None:
        self._record, self._log_file = record, log_file
        self._spec, self._wanted, self._problems = (
            work_dir / f"trackers.{name}" for name in ("spec", "wanted", "problems")
        )
        self._read = 0
        # What the thread does next; None: end.
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._child: Child | None = None
        self._running: TrackerSettings | None = None
        self._ends = self._iteration = 0
        self._last_s = LAST_S
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
            wanted = settings if generation.leader == node.rank and settings.tracker.names else None
            if wanted is not None and self._thread is None:
                self._thread = threading.Thread(target=self._carry_out_orders, name="trackers", daemon=True)
                self._thread.start()
            self._order(partial(self._run_with, wanted))
        elif event == "iteration_finished" and node.position is not None:
            self._order(partial(self._bring_up_to, node.position.iteration))

    def troubles(self) -> Iterator[Payload]:
        """The failures since the last call, for the journal."""
        while not self._troubles.empty():
            yield self._troubles.get()

    def close(self) -> None:
        """Wait a while for the last iterations to be sent, and end the program."""
        self._order(None)
        if self._thread is not None:
            self._thread.join(self._last_s + LAST_S)

    def _order(self, order: Callable[[], None] | None) -> None:
        if self._thread is not None:
            self._orders.put(order)

    # --- in the thread ---

    def _carry_out_orders(self) -> None:
        while True:
            order = self._orders.get()
            # A failure here must not end the run.
            try:
                (order or self._stop)()
            except (ProgramFailed, StoreError, OSError) as error:
                self._troubles.put({"tracker": "", "why": str(error)})
            if order is None:
                return

    def _run_with(self, settings: Settings | None) -> None:
        """Start or restart the program with these settings; None: end it."""
        wanted = settings.tracker if settings is not None else None
        if wanted == self._running and (self._child is None) == (wanted is None):
            return
        self._stop()
        self._running, self._ends = wanted, 0
        if settings is not None:
            self._start(settings)

    def _start(self, settings: Settings) -> None:
        spec = {"log_path": str(self._record.log_path), **settings.tracker.as_json()}
        self._spec.write_text(json.dumps(spec))
        self._tell_the_program("")
        words = [self._spec, self._wanted, self._problems]
        named = (settings.judge.api_key_env, settings.engine.api_key_env, *NOT_FOR_IT)
        env = without_variables(os.environ, named) | {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
        self._child = Child.start(
            own_program("fsbarrier.workers.track", *map(str, words)),
            env=with_this_package(env),
            log_file=self._log_file,
            name="trackers",
        )
        self._settings = settings

    def _bring_up_to(self, iteration: int) -> None:
        self._iteration = iteration
        self._tell_troubles()
        if self._child is None or self._running is None:
            return
        if (code := self._child.poll()) is not None:
            self._troubles.put({"tracker": "", "why": _end_in_words(self._child, code)})
            self._ends += 1
            if self._ends > RESTARTS:
                self._child = None
                return
            self._start(self._settings)
        self._tell_the_program("")

    def _tell_the_program(self, word: str) -> None:
        files.write_atomic(self._wanted, f"{self._iteration} {word}\n".encode())

    def _stop(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        with contextlib.suppress(OSError):
            self._tell_the_program("end")
        try:
            code = child.wait(self._last_s)
            if code is None:
                rest = "a start that goes on tells the rest"
                why = f"had not told everything after {self._last_s:.0f} s, and was ended; {rest}"
                self._troubles.put({"tracker": "", "why": why})
            elif code != 0:
                self._troubles.put({"tracker": "", "why": _end_in_words(child, code)})
        finally:
            child.stop(grace_s=1.0)
            self._tell_troubles()

    def _tell_troubles(self) -> None:
        try:
            with self._problems.open("rb") as stream:
                stream.seek(self._read)
                data = stream.read(1 << 16)
        except FileNotFoundError:
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.splitlines():
            found = json.loads(line)
            if isinstance(found, Mapping):
                self._troubles.put({"tracker": str(found.get("tracker")), "why": str(found.get("why"))})


def _end_in_words(child: Child, code: int) -> str:
    return f"the program ended with exit code {code}: {' | '.join(child.last_log_lines(2))}"
