"""What the real work of a simulated node runs on (run/job_runner.py, phases/rl.py): virtual time, programs and engines that are none, and
small files.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar, cast

from fsbarrier.context import Context, PartOnDisk, Span
from fsbarrier.coordination.observer import Observer
from fsbarrier.engine.command import Adapter
from fsbarrier.engine.engine import EngineInfo
from fsbarrier.engine.frozen import FrozenEngine, address
from fsbarrier.engine.replicas import Replicas
from fsbarrier.errors import ProgramFailed
from fsbarrier.processes.kept_program import KeptProgram
from fsbarrier.processes.supervisor import Child
from fsbarrier.protocol.facts import JsonObject
from fsbarrier.protocol.state import Node, RowPart
from fsbarrier.run.job import Cancelled, RowJob, Surroundings, Workplace
from fsbarrier.run.job_runner import ContextMaker, JobRunner
from fsbarrier.rundir.known_logprobs import KnownLogprobs
from fsbarrier.rundir.names import SPLITS
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.runrecord import RunRecord, TaskSource
from fsbarrier.specs import EngineAddress
from fsbarrier.training.weights_copy import WeightsCopy
from sim.disk import SimPath
from sim.history import Published, Served
from sim.programs import GROUP_BYTES, ProgramHost, SimProgram
from sim.schedule import Crash, Start
from sim.setup import PATHS, program

T = TypeVar("T")

GENERATIONS = cast(SimPath, PATHS.generations)
TASKS: dict[str, TaskSource] = {
    split: {"path": f"/data/{split}", "count": 18, "sha256": ""} for split in SPLITS
}
#: what a start offers of each frozen engine
OFFER = {"port": 9000, "key": ""}
#: how long the nodes of an engine wait for each other
MEETS_S = 100
#: how often a job that is cancelled may still wait
LAST_WAITS = 1000


class JobThread:
    """A job's thread."""

    def __init__(self, host: SimHost, call: Callable[[], None]) -> None:
        self._host, self.thread = host, host.process.thread(call)

    def join(self, timeout: float) -> None:
        """Let the cancelled job run to its end."""
        thread = self.thread
        if not thread.done:
            self._host.process.operation("cancel", "")
        for _ in range(LAST_WAITS):
            if thread.done:
                break
            thread.run()
        else:
            self._host.world.history.stuck.append("a cancelled job does not end")
            raise Crash
        if thread.crashed:
            raise Crash

    def is_alive(self) -> bool:
        return not self.thread.done


class SimFlag(threading.Event):
    """A flag for which a thread waits in virtual time."""

    def __init__(self, sleep: Callable[[float], None]) -> None:
        super().__init__()
        self._sleep = sleep

    def wait(self, timeout: float | None = None) -> bool:
        if not self.is_set():
            self._sleep(timeout or 0.0)
        return self.is_set()


class SimEngines:
    """A node's engines, with the methods of Replicas that its work calls."""

    def __init__(self, host: SimHost) -> None:
        self._host = host

    def ensure(
        self,
        weights: Path,
        policy_version: int,
        *,
        threads: int = 0,
        cancel: threading.Event,
        show: Callable[[int], None] = lambda ready: None,
        in_flight: bool = False,
        span: Span | None = None,
        known: KnownLogprobs | None = None,
        adapter: Adapter | None = None,
    ) -> list[EngineInfo]:
        world, rank = self._host.world, self._host.process.rank
        if span is not None:
            self._meet(span, cancel)
        # A start takes long.
        if cancel.wait(world.length() / (4 if self._host.serving else 1)):
            raise ProgramFailed("cancelled")
        wanted = self._host.artifacts.policy_in(weights) if policy_version else "start"
        action = "kept" if wanted == self._host.serving else "reloaded"
        self._host.serving = wanted
        return [EngineInfo("", "", f"on node {rank}", policy_version, 0, 0.0, action)]

    def _meet(self, span: Span, cancel: threading.Event) -> None:
        """Wait until all nodes of the engine have been asked for the same."""
        came = self._host.artifacts.spans.setdefault((span.nodes, span.turn), set())
        came.add(span.place)
        for _ in range(MEETS_S):
            if len(came) == len(span.nodes):
                return
            if cancel.wait(1.0):
                raise ProgramFailed("cancelled")
        raise ProgramFailed(f"only {sorted(came)} of {span.nodes} came in time (engine.start_timeout_s)")

    def use(self, devices: Sequence[int] | None) -> None:
        """Simulated nodes have no accelerators."""

    def release(self, *, cancel: threading.Event) -> JsonObject:
        cancel.wait(self._host.world.short())
        return {"action": "keep"}

    def none_left(self) -> str:
        return ""

    def stop(self) -> None:
        self._host.serving = ""


class SimFrozen:
    """A frozen engine's servers on one node, with the methods of FrozenEngine that its work calls."""

    failure = ""

    def __init__(self, host: SimHost, name: str) -> None:
        self._host, self._name, self._started = host, name, False

    @property
    def status(self) -> JsonObject:
        return {}

    def news(self) -> list[JsonObject]:
        return []

    @property
    def address(self) -> EngineAddress:
        return address("127.0.0.1", OFFER, self._name, MEETS_S)

    def ensure(
        self, folder: Path, devices: Sequence[int] | None, *, threads: int, cancel: threading.Event
    ) -> list[EngineInfo]:
        if not self._started and cancel.wait(self._host.world.length()):
            raise ProgramFailed("cancelled")
        self._started = True
        return []

    def release(self, *, cancel: threading.Event) -> JsonObject:
        return {"action": "keep"}


class SimHost(ProgramHost, Surroundings):
    """A process's host, as its work sees it."""

    def now(self) -> float:
        return self.process.clock

    def flag(self) -> threading.Event:
        return SimFlag(self.sleep)

    def call_in_background(self, call: Callable[[], None]) -> JobThread:
        def run() -> None:
            call()
            self.take_note_of_what_is_public()

        made = JobThread(self, run)
        self.thread = made.thread
        return made

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
        program = self._program()
        program.start(argv, env=env, log_file=log_file, name=name, pass_fds=pass_fds)
        return cast(Child, program)

    def keep(self, name: str, processes: int, path: Path) -> KeptProgram:
        return cast(KeptProgram, self._program(name, stays=True))

    def listen(self, addresses: Sequence[str]) -> list[socket.socket]:
        return [cast(socket.socket, _Listener(40000 + self.artifacts.stamp()))]

    def reachable(self, addresses: Sequence[str], port: int) -> list[str]:
        self.sleep(self.world.short())
        return list(addresses)

    def cpus(self) -> int:
        return 1

    def claims_unsafe(self, log_path: Path) -> str:
        return ""

    def parts_on_disk(self, paths: RunPaths, split: str, iteration: int) -> tuple[PartOnDisk, ...]:
        """The parts as this host sees them, perhaps not up to their ends."""
        until = self.world.now - self.world.rng.random() * self.process.client.habits.oldest_s
        parts = []
        for path, part in sorted(self.artifacts.parts.items()):
            if (part.split, part.iteration) == (split, iteration):
                tasks = tuple(task for task, when, _ in part.groups if when <= until)
                if tasks:
                    parts.append(PartOnDisk(Path(path).name, part.policy, len(tasks) * GROUP_BYTES, tasks))
        return tuple(parts)

    def _program(self, name: str = "", *, stays: bool = False) -> SimProgram:
        program, process = SimProgram(self, name, stays=stays), self.process
        process.programs = [*(other for other in process.programs if other.alive), program]
        return program

    def sleep(self, seconds: float) -> None:
        self.take_note_of_what_is_public()
        super().sleep(seconds)

    def take_note_of_what_is_public(self) -> None:
        """A job has run for a moment: note what it has published meanwhile."""
        node, artifacts, history = self.node, self.artifacts, self.world.history
        if node is None or node.part is not RowPart.LEADER:
            return
        generation, position = node.place
        generations_shown = tuple(self.process.client.shown(GENERATIONS))
        for split, iteration in (("train", 0), ("test", 0), ("test", 1)):
            path = artifacts.paths.merged(split, position.iteration + iteration)
            stamp = path.read_text() if path.exists() else "0"
            if stamp not in ("0", artifacts.public.get(str(path))):
                artifacts.public[str(path)] = stamp
                history.published.append(Published(str(path), int(stamp), generations_shown))
        if (folder := artifacts.served_now()) != artifacts.served:
            artifacts.served = folder
            version = int(Path(folder).name.partition("-")[2].partition(".")[0])
            history.served.append(Served(folder, version, generation.number, generations_shown))


class _Listener:
    """A socket that listens."""

    def __init__(self, port: int) -> None:
        self._port = port

    def getsockname(self) -> tuple[str, int]:
        return "", self._port

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        """Nothing is open."""


class SimWorkplace(Workplace):
    """A use of the shared directory takes a while, sometimes long."""

    host: SimHost

    def pause(self, job: RowJob) -> None:
        world = self.host.world
        if world.rng.random() < 0.3:
            self.host.sleep(world.length() / 2 if world.draw.slow_checks else world.short())
        if job.cancel.is_set():
            raise Cancelled

    def patiently(self, job: RowJob, ask: Callable[[], T]) -> T:
        self.pause(job)
        return super().patiently(job, ask)


class SimRunner(JobRunner):
    """Between the context and the row's function time passes, and other nodes may do something."""

    workplace: SimWorkplace

    def _begin(self, node: Node, job: RowJob) -> Context:
        context = super()._begin(node, job)
        self.workplace.pause(job)
        return context


def make_work(process: Start, observer: Observer, wake: Callable[[], None]) -> JobRunner:
    """The real runner of a process's work."""
    host, world = SimHost(process), process.schedule
    draw, root, copies = world.draw, world.artifacts.root, None
    folder = root / f"p{process.number}"
    if draw.copies_weights:
        copies = WeightsCopy(folder / "weights")
        copies.folder.mkdir(parents=True)
    place = SimWorkplace(
        engines=cast(Replicas, SimEngines(host)),
        work_dir=folder,
        log_dir=folder / "logs",
        log_path=root,
        stall_timeout_s=draw.settings.coordination.stall_timeout_s,
        outage_s=draw.intervals.outage_s,
        weights=copies,
        frozen={name: cast(FrozenEngine, SimFrozen(host, name)) for name in draw.settings.engines},
        host=host,
    )
    record = RunRecord("sim", "", "", "", draw.settings, "", TASKS, "/model", log_path=root)
    make = ContextMaker(record, program(), observer, place)

    def make_context(node: Node) -> Context:
        host.node = node
        return make(node)

    return SimRunner(make_context, place, wake)
