"""One job, a launch of a row's work: how it is cancelled, how it shows its progress, and what it shares with other jobs."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from fsbarrier.errors import StoreError
from fsbarrier.node.state_upload import StateUpload
from fsbarrier.protocol.facts import JsonObject, Payload
from fsbarrier.protocol.timing import OUTAGE_S
from fsbarrier.retry import retry
from fsbarrier.rundir.checkpoints import PolicyUnreadable
from fsbarrier.rundir.weights_copy import WeightsCopy
from fsbarrier.supervision.kept_program import KeptProgram
from fsbarrier.supervision.template import Template
from fsbarrier.supervision.worker_contract import read_progress

if TYPE_CHECKING:
    from fsbarrier.engine.replicas import Replicas
    from fsbarrier.node.engines_ahead import EnginesAhead

T = TypeVar("T")

# What a piece of work gives: JSON values, of which "events" are lines for the journal.
Result = JsonObject


class NodeUnfit(StoreError):
    """This node cannot begin any work; another could."""


class Cancelled(Exception):
    """The job was cancelled; nobody waits for its report."""


@dataclass
class RowJob:
    """One launch of a row's work. The node's loop cancels it and reads its progress; its thread does all else."""

    # For how long it tries again to read the shared directory while that fails: as long as the node itself does.
    outage_s: float = OUTAGE_S
    cancel: threading.Event = field(default_factory=threading.Event)
    progress: Payload = field(default_factory=dict)
    # The file in which the program that runs now shows its progress.
    progress_file: Path | None = None
    # What its own thread does in the shared directory; "" while a program or the engine works, which have time-outs of their own.
    doing: str = ""
    # When it last made progress with that.
    alive_at: float = 0.0

    @contextmanager
    def using_directory(self, doing: str) -> Iterator[None]:
        """While this lasts, a call to the shared directory that does not come back counts as a stall."""
        self.alive_at, self.doing = time.monotonic(), doing
        try:
            yield
        finally:
            self.doing = ""

    def live_on(self) -> None:
        """Called between two steps of what `using_directory` covers, to show that it makes progress. Raises Cancelled."""
        self.stop_if_cancelled()
        self.alive_at = time.monotonic()

    def stop_if_cancelled(self) -> None:
        if self.cancel.is_set():
            raise Cancelled

    def read_progress(self) -> None:
        """Take over the running program's progress file, if there is one."""
        if self.progress_file is not None:
            self.progress = read_progress(self.progress_file) or self.progress

    def patiently(self, ask: Callable[[], T]) -> T:
        """The answer of `ask`, which reads the shared directory; repeated for `outage_s` while that fails.

        Raises OSError, Unreadable, Cancelled, and at once whatever else `ask` raises.
        """
        failures = (OSError, PolicyUnreadable)
        try:
            return retry(ask, within_s=self.outage_s, cancel=self.cancel, passing=failures)
        except failures:
            self.stop_if_cancelled()
            raise


@dataclass
class Workplace:
    """What all jobs of this node share: its engines, its programs' template, its folders, and what one job leaves for a later one."""

    # None: the program has no model.
    engines: Replicas | None
    template: Template
    work_dir: Path
    log_dir: Path
    log_path: Path
    # After so long without a sign of life, the node ends a program.
    stall_timeout_s: float
    # For so long a job tries to read the shared directory while that fails.
    outage_s: float = OUTAGE_S
    # How long a program may take to end when its job is cancelled, before it is killed.
    grace_s: float = 2.0
    # What the engines load since the daemon's start, until a phase has taken it over.
    ahead: EnginesAhead | None = None
    # Left by ServeWeights for the programs that talk to the engines: each one's address and key.
    engine_access: list[Payload] = field(default_factory=list)
    # Left by OpenRendezvous: holds the port until torchrun is started, which takes it over.
    rendezvous: socket.socket | None = None
    # The model folder in the run directory that was compared with its manifest last.
    checked_model: Path | None = None
    # This node's own copy of the newest weights, where it has a place for one.
    weights: WeightsCopy | None = None
    # Engines, by node rank and replica, whose log-probabilities were not the trainer's, and the iteration in which that was found first.
    distrusted: dict[tuple[int, int], int] = field(default_factory=dict)
    # Brings what the trainer left of its state on this node to the shared directory.
    state_upload: StateUpload = field(default_factory=StateUpload)
    programs_started: int = 0
    # Called before a program that hangs is ended, with the generation and the job's event of cancelling; gives a text about what the
    # program did, for the message of the failure.
    program_hangs: Callable[[int, threading.Event], str] = lambda generation, cancel: ""
    # The program whose processes wait for another job.
    kept: KeptProgram | None = None

    @property
    def own_engines(self) -> Replicas:
        """Raises StoreError where the program has none."""
        if self.engines is None:
            raise StoreError("this program has no engine")
        return self.engines

    def kept_in(self, generation: int) -> str:
        """The name of the program that is kept here, if it is of this generation and lives; any other is ended. Raises StillRunning."""
        if self.kept is not None and not (self.kept.alive and self.kept.generation == generation):
            self.end_kept()
        return self.kept.name if self.kept else ""

    def end_kept(self) -> None:
        """Returns when nothing of it is left. Raises StillRunning."""
        kept, self.kept = self.kept, None
        if kept is not None:
            kept.stop(self.grace_s)

    def close_rendezvous(self) -> None:
        if self.rendezvous is not None:
            self.rendezvous.close()
            self.rendezvous = None


def journal_line(event: str, value: Payload) -> Result:
    """A result as a line of the journal, which has its plain values alone."""
    plain = {k: v for k, v in value.items() if isinstance(v, (int, float, str)) or v is None}
    return {**plain, "event": event}
