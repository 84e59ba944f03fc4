"""A job is one launch of a row's work. RowJob cancels it and shows its progress; Workplace is shared by all jobs of a node."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from fsbarrier import trajectories
from fsbarrier.context import PartOnDisk
from fsbarrier.errors import StoreError
from fsbarrier.network.listening import listen, reachable
from fsbarrier.processes.kept_program import KeptProgram
from fsbarrier.processes.supervisor import Child
from fsbarrier.processes.worker_contract import read_progress
from fsbarrier.protocol.facts import JsonObject, Payload
from fsbarrier.protocol.membership import OUTAGE_S
from fsbarrier.rundir.checkpoints import PolicyUnreadable
from fsbarrier.rundir.journal import TIMES, number
from fsbarrier.rundir.names import PART
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.specs import TRAINER
from fsbarrier.store.mounts import claims_unsafe
from fsbarrier.store.reading import NotPlain, check_plain
from fsbarrier.store.retry import patiently
from fsbarrier.training.weights_copy import WeightsCopy

if TYPE_CHECKING:
    from fsbarrier.engine.accelerators import Accelerator
    from fsbarrier.engine.frozen import FrozenEngine
    from fsbarrier.engine.replicas import Replicas

T = TypeVar("T")


class NodeUnfit(StoreError):
    """This node cannot do any work, but another node may be able to."""


class Cancelled(Exception):
    """The job was cancelled, so its report is not needed."""


class InBackground(Protocol):
    """A call in a thread."""

    def join(self, timeout: float) -> None: ...

    def is_alive(self) -> bool: ...


class Surroundings:
    """The parts of a host that a node's work uses: clock, threads, processes, network, and mounted files. The simulator replaces them."""

    def now(self) -> float:
        """The monotonic clock."""
        return time.monotonic()

    def flag(self) -> threading.Event:
        """A flag that one thread sets, and for which another may wait."""
        return threading.Event()

    def call_in_background(self, call: Callable[[], None]) -> InBackground:
        """Call it in a thread of its own."""
        thread = threading.Thread(target=call, name="work", daemon=True)
        thread.start()
        return thread

    def start(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        log_file: Path,
        name: str,
        pass_fds: Sequence[int] = (),
        private_network: bool = False,
    ) -> Child:
        """Start a program. Raises the errors of Child.start."""
        return Child.start(
            argv, env=env, log_file=log_file, name=name, pass_fds=pass_fds, private_network=private_network
        )

    def keep(self, name: str, processes: int, path: Path) -> KeptProgram:
        """Make a program whose processes stay between jobs, without starting it. Raises OSError."""
        return KeptProgram(name, processes, path)

    def listen(self, addresses: Sequence[str]) -> list[socket.socket]:
        """Listen on a free port of these addresses. Raises OSError."""
        return listen(addresses)

    def reachable(self, addresses: Sequence[str], port: int) -> list[str]:
        """The addresses that answer on `port`."""
        return reachable(addresses, port)

    def cpus(self) -> int:
        """The cores that this process may use."""
        return len(os.sched_getaffinity(0))

    def claims_unsafe(self, log_path: Path) -> str:
        """Why claims are not safe in the run's directory; "" if they are."""
        return claims_unsafe(log_path)

    def parts_on_disk(self, paths: RunPaths, split: str, iteration: int) -> tuple[PartOnDisk, ...]:
        """List the part files of one iteration, with their durable groups, by name (oldest generation first within a rank)."""
        parts, folder = [], paths.trajectories(split)
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            part = PART.parse(path.name)
            if part is None or (part.split, part.iteration) != (split, iteration):
                continue
            try:
                check_plain(path.lstat(), path)
            except (NotPlain, IsADirectoryError):
                # The name is a node's, but the file is not, so it is ignored.
                continue
            scanned = trajectories.scan_rank_file(path)
            if scanned.groups:
                policy = str(scanned.header.get("policy", ""))
                tasks = tuple(group.task_index for group in scanned.groups)
                unjudged = frozenset(
                    group.task_index for group in scanned.groups if not group.stats.is_finished
                )
                signal = frozenset(group.task_index for group in scanned.groups if group.stats.signal)
                how = str(scanned.header.get("sampled_how", ""))
                parts.append(PartOnDisk(path.name, policy, scanned.valid_bytes, tasks, unjudged, signal, how))
        return tuple(parts)


@dataclass
class RowJob:
    """One launch of a row's work. The node's loop may cancel it and read its progress; a thread does the rest."""

    cancel: threading.Event = field(default_factory=threading.Event)
    clock: Callable[[], float] = time.monotonic
    progress: Payload = field(default_factory=dict)
    # The running program's progress file.
    progress_file: Path | None = None
    # What the thread is doing in the shared directory; "" while it runs a program or an engine, since these have their own timeouts.
    doing: str = ""
    # When the thread last made progress there.
    alive_at: float = 0.0
    # The job's events, as lines for the journal.
    events: list[Payload] = field(default_factory=list)
    # The time that programs and engines spent, by purpose (`journal.TIMES`), in seconds.
    times: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def using_directory(self, doing: str) -> Iterator[None]:
        """In this block, a call to the shared directory that does not return counts as a stall."""
        self.alive_at, self.doing = self.clock(), doing
        try:
            yield
        finally:
            self.doing = ""

    def live_on(self) -> None:
        """Called between two steps in a `using_directory` block, to show progress. Raises Cancelled."""
        self.stop_if_cancelled()
        self.alive_at = self.clock()

    def stop_if_cancelled(self) -> None:
        """Raises Cancelled if the loop has cancelled the job."""
        if self.cancel.is_set():
            raise Cancelled

    def add_times(self, reported: Payload) -> None:
        """Add the times that a program or an engine reported."""
        for name in TIMES & reported.keys():
            self.times[name] = self.times.get(name, 0.0) + (number(reported, name) or 0.0)

    def read_progress(self) -> None:
        """Read the running program's progress file, if there is one."""
        if self.progress_file is not None:
            self.progress = read_progress(self.progress_file) or self.progress


@dataclass
class Workplace:
    """The state that all jobs of this node share."""

    # None: the program has no model.
    engines: Replicas | None
    work_dir: Path
    log_dir: Path
    log_path: Path
    # This node's accelerators, in the order of their numbers.
    devices: Sequence[Accelerator] = field(default=(), kw_only=True)
    # The node ends a program whose progress file and log do not change for this long.
    stall_timeout_s: float
    # The frozen engines that may have servers here, by name.
    frozen: Mapping[str, FrozenEngine] = field(default_factory=dict)
    # How long a job retries reads of the shared directory while that fails.
    outage_s: float = OUTAGE_S
    # How long a program may take to end after SIGTERM, before it is killed.
    grace_s: float = 2.0
    # The sockets that `Node.listen` opened, held until the update's program takes them over.
    rendezvous: list[socket.socket] = field(default_factory=list)
    # The last model folder that was compared with its manifest.
    checked_model: Path | None = None
    # This node's copy of the newest weights, if it has a place for one.
    weights: WeightsCopy | None = None
    programs_started: int = 0
    # The programs whose processes stay between jobs, by name (`Launch.resident`).
    residents: dict[str, KeptProgram] = field(default_factory=dict)
    # The era (`Generation.era`) in which the resident trainer may be used.
    era: int = 0
    host: Surroundings = field(default_factory=Surroundings)

    @property
    def own_engines(self) -> Replicas:
        """This node's engines of the policy. Raises StoreError if there are none."""
        if self.engines is None:
            raise StoreError("this program has no engine")
        return self.engines

    def engines_gone(self) -> str:
        """Why programs that call the engines cannot go on; "" if they can."""
        failures = (engine.failure for engine in self.frozen.values() if engine.failure)
        return self.own_engines.none_left() or next(failures, "")

    def patiently(self, job: RowJob, ask: Callable[[], T]) -> T:
        """Call `retried`. The simulator overrides this to add a delay."""
        return self.retried(job, ask)

    def retried(self, job: RowJob, ask: Callable[[], T]) -> T:
        """The result of `ask`, which reads the shared directory, retried for `outage_s` while that fails.

        Raises OSError, StoreError, PolicyUnreadable, Cancelled, and immediately whatever else `ask` raises.
        """
        failures = (OSError, StoreError, PolicyUnreadable)
        try:
            return patiently(
                ask,
                self.outage_s,
                passes=lambda error: isinstance(error, failures),
                cancel=job.cancel,
                clock=job.clock,
            )
        except failures:
            job.stop_if_cancelled()
            raise

    def resident_name(self, era: int) -> str:
        """The name of the resident trainer if it is alive and of this era, else "". Ends any other trainer. Raises ProgramFailed."""
        trainer = self.residents.get(TRAINER)
        if trainer is not None and (era != self.era or not trainer.alive):
            self.end_resident(TRAINER)
        self.era = era
        return self.residents[TRAINER].name if TRAINER in self.residents else ""

    def end_resident(self, name: str) -> None:
        """End a resident program; returns when all its processes have ended. Raises ProgramFailed."""
        resident = self.residents.pop(name, None)
        if resident is not None:
            resident.stop(self.grace_s)

    def end_residents(self) -> None:
        """End all resident programs. Raises ProgramFailed."""
        for name in list(self.residents):
            self.end_resident(name)

    def close_rendezvous(self) -> None:
        """Close our sockets of an update's port: its program has its own by now, or does not use them."""
        while self.rendezvous:
            self.rendezvous.pop().close()


def plain_values(value: Payload) -> JsonObject:
    """The numbers and texts of a record, without its lists and objects."""
    return {k: v for k, v in value.items() if isinstance(v, (int, float, str)) or v is None}
