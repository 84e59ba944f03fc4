"""Runs the program that sends each iteration's metrics to trackers (`tracker.names`), on the leader's node.

It has one end of a socket: the daemon tells it the number of each finished iteration, and it answers only with what fails, for the journal.
The run never waits for it, and goes on without it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from pathlib import Path

from fsbarrier.errors import ProgramFailed, StoreError
from fsbarrier.processes.supervisor import Child, own_program, with_this_package
from fsbarrier.processes.worker_contract import WorkerFiles
from fsbarrier.protocol.facts import Payload
from fsbarrier.protocol.state import Node
from fsbarrier.rundir.runrecord import RunRecord
from fsbarrier.rundir.session_settings import in_force
from fsbarrier.settings.secrecy import without_variables
from fsbarrier.settings.sections import Settings
from fsbarrier.specs import TrackSpec

MODULE = "fsbarrier.workers.track"
#: a launcher's variables about training processes, which do not apply to the trackers' program
NOT_FOR_IT = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
#: how long the end of a node, or of a finished run, waits for the last iterations to be sent; the next start sends the rest
LAST_S, FINISHED_S = 10.0, 60.0
MESSAGE_BYTES = 64 * 1024


class TrackerProgram:
    """The trackers' program of one node, which runs while this node leads."""

    def __init__(self, record: RunRecord, work_dir: Path, log_file: Path) -> None:
        self._record, self._log_file, self._files = record, log_file, WorkerFiles(work_dir / "trackers")
        # None: this node does not lead, or there are no trackers.
        self._settings: Settings | None = None
        self._iteration, self._last_s = 0, LAST_S
        self._child: Child | None = None
        self._socket: socket.socket
        self._troubles: list[Payload] = []

    def tell(self, event: str, node: Node, fields: Payload) -> None:
        """React to an event of the journal."""
        if event == "node_ended" and fields.get("state") == "finished":
            self._last_s = FINISHED_S
        if event == "generation_started" and node.generation is not None:
            settings = in_force(self._record.settings, node.generation.settings)
            wanted = settings if node.generation.leader == node.rank and settings.tracker.names else None
            if (wanted and wanted.tracker) != (self._settings and self._settings.tracker):
                self._end(0.0)
            self._settings = wanted
        elif event == "iteration_finished" and node.position is not None:
            self._iteration = node.position.iteration
        else:
            return
        if self._settings is not None:
            # A failure here must not end the run. This iteration is sent with the next one.
            try:
                self._send(self._settings)
            except (ProgramFailed, StoreError, OSError) as error:
                self._trouble(str(error))

    def troubles(self) -> list[Payload]:
        """The failures since the last call, for the journal."""
        self._hear()
        troubles, self._troubles = self._troubles, []
        return troubles

    def close(self) -> None:
        """Wait a while for the last iterations to be sent, and end the program."""
        self._end(self._last_s)

    def _send(self, settings: Settings) -> None:
        """Send the program the last finished iteration; start it if it does not run. Raises StartFailed, StoreError, OSError."""
        if self._child is not None and (code := self._child.poll()) is not None:
            end_of_log = " | ".join(self._child.last_log_lines(2))
            self._trouble(f"the program ended with exit code {code}: {end_of_log}")
            self._end(0.0)
        if self._child is None:
            self._start(settings)
        self._socket.send(b"%d" % self._iteration)

    def _start(self, settings: Settings) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        named = (settings.judge.api_key_env, settings.engine.api_key_env)
        env = without_variables(os.environ, (*named, *NOT_FOR_IT))
        with theirs:
            spec = TrackSpec(self._record.paths.record, theirs.fileno())
            self._files.write_spec({"settings": settings.as_json(), **spec.as_json()})
            self._child = Child.start(
                own_program(MODULE, "--spec", str(self._files.spec)),
                env=with_this_package(env | {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}),
                log_file=self._log_file,
                name="trackers",
                pass_fds=[theirs.fileno()],
            )

    def _end(self, wait_s: float) -> None:
        """End the program, which may send the last iterations first."""
        if self._child is None:
            return
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        try:
            if self._child.wait(wait_s) is None and wait_s:
                self._trouble(
                    f"had not told everything after {wait_s:.0f} s, and was ended; a start that goes on tells the rest"
                )
            self._child.stop(grace_s=1.0)
        except ProgramFailed as error:
            self._trouble(str(error))
        self._hear()
        self._child = None
        self._socket.close()

    def _hear(self) -> None:
        with contextlib.suppress(OSError):
            while self._child is not None and (message := self._socket.recv(MESSAGE_BYTES)):
                self._troubles.append(json.loads(message))

    def _trouble(self, why: str) -> None:
        self._troubles.append({"tracker": "", "why": why})
