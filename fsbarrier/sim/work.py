"""What the real work of a simulated node runs on (run/job_runner.py, phases/rl.py): virtual time, programs and engines that are none, and
small files.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from fsbarrier.engine.engine import EngineInfo
from fsbarrier.engine.replicas import Replicas
from fsbarrier.errors import ProgramFailed
from fsbarrier.processes.kept_program import KeptProgram
from fsbarrier.processes.supervisor import Child
from fsbarrier.program import Context, PartOnDisk
from fsbarrier.protocol.facts import JsonObject
from fsbarrier.protocol.state import Node, RowPart
from fsbarrier.run.context_maker import ContextMaker
from fsbarrier.run.job import Cancelled, RowJob, Surroundings, Workplace
from fsbarrier.run.job_runner import JobRunner
from fsbarrier.rundir.names import SPLITS
from fsbarrier.rundir.runrecord import RunRecord, TaskSource
from fsbarrier.rundir.weights_copy import WeightsCopy
from fsbarrier.sim.disk import SimPath
from fsbarrier.sim.faults import Crash, Livelock
from fsbarrier.sim.history import Published, Served
from fsbarrier.sim.interruptible import InterruptibleCall
from fsbarrier.sim.programs import GROUP_BYTES, SimProgram
from fsbarrier.sim.setup import PATHS

if TYPE_CHECKING:
    from fsbarrier.sim.process import Process
    from fsbarrier.sim.world import World

T = TypeVar("T")

GENERATIONS = cast(SimPath, PATHS.generations)
TASKS: dict[str, TaskSource] = {
    split: {"path": f"/data/{split}", "count": 18, "sha256": ""} for split in SPLITS
}
#: how often a job that is cancelled may still wait
LAST_WAITS = 1000


class SimThread:
    """A job's thread. It runs when nothing else does, and parks while it waits."""

    def __init__(self, host: SimHost, call: Callable[[], None]) -> None:
        self._host, self._done, self._crashed, self._waits = host, False, False, 0
        self._call = InterruptibleCall(partial(self._guarded, call))
        self._wake_after(host.world.short())

    def _guarded(self, call: Callable[[], None]) -> str:
        try:
            call()
        except Crash:
            self._crashed = True
        return ""

    def sleep(self, seconds: float) -> None:
        """Called by the job: wait, perhaps not so long."""
        self._wake_after(seconds)
        self._call.park()

    def wake(self) -> None:
        """End the wait."""
        self._wake_after(0.0)

    def _wake_after(self, seconds: float) -> None:
        self._waits += 1
        self._host.world.after(seconds, partial(self._woken, self._waits))

    def _woken(self, wait: int) -> None:
        process = self._host.process
        if self._done or wait != self._waits or not process.up:
            return
        if process.paused:
            process.deferred.append(partial(self._woken, wait))
        else:
            process.client.done = 0
            self._run()

    def _run(self) -> None:
        self._done = self._call.go_on()
        self._host.take_note_of_what_is_public()

    def join(self, timeout: float) -> None:
        """Let the cancelled job run to its end."""
        if not self._done:
            self._host.process.trouble.cancelling()
        for _ in range(LAST_WAITS):
            if self._done:
                break
            self._run()
        else:
            raise Livelock("a cancelled job does not end")
        if self._crashed:
            raise Crash

    def is_alive(self) -> bool:
        return not self._done

    def kill(self) -> None:
        if not self._done:
            self._call.kill()
            self._done = True


class SimFlag(threading.Event):
    """A flag for which a job waits in virtual time."""

    def __init__(self, host: SimHost) -> None:
        super().__init__()
        self._host = host

    def wait(self, timeout: float | None = None) -> bool:
        if not self.is_set():
            self._host.sleep(timeout or 0.0)
        return self.is_set()


class SimEngines:
    """A node's engines, with the methods of Replicas that its work calls."""

    def __init__(self, host: SimHost) -> None:
        self._host = host
        #: the policy that they really serve
        self.serving = ""

    def ensure(
        self,
        weights: Path,
        policy_version: int,
        *,
        threads: int = 0,
        cancel: threading.Event,
        show: Callable[[int], None],
    ) -> list[EngineInfo]:
        world, rank = self._host.world, self._host.process.rank
        if cancel.wait(world.length() / 4):
            raise ProgramFailed("cancelled")
        wanted = self._host.artifacts.policy_in(weights) if policy_version else "start"
        action, self.serving = "kept" if wanted == self.serving else "reloaded", wanted
        return [EngineInfo("", "", f"on node {rank}", policy_version, 0, 0.0, action)]

    def release(self, *, cancel: threading.Event) -> JsonObject:
        cancel.wait(self._host.world.short())
        return {"action": "keep"}

    def none_left(self) -> str:
        return ""

    def stop(self) -> None:
        self.serving = ""


class SimHost(Surroundings):
    """A process's host, as its work sees it."""

    def __init__(self, world: World, process: Process) -> None:
        self.world, self.process, self.artifacts = world, process, world.artifacts
        self.engines = SimEngines(self)
        # the node when its job began
        self.node: Node | None = None
        self._thread: SimThread | None = None
        self._programs: list[SimProgram] = []

    def now(self) -> float:
        return self.process.clock

    def flag(self) -> threading.Event:
        return SimFlag(self)

    def call_in_background(self, call: Callable[[], None]) -> SimThread:
        self._thread = SimThread(self, call)
        return self._thread

    def start(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        log_file: Path,
        name: str,
        pass_fds: Sequence[int] = (),
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

    def _program(self, name: str = "", *, stays: bool = False) -> SimProgram:
        self._programs = [one for one in self._programs if one.alive]
        self._programs.append(SimProgram(self, name, stays=stays))
        return self._programs[-1]

    def sleep(self, seconds: float) -> None:
        """The job waits."""
        assert self._thread is not None
        self._thread.sleep(seconds)

    def wake(self) -> None:
        """A program has ended, for which the job may wait."""
        if self._thread is not None and self._thread.is_alive():
            self._thread.wake()

    def kill(self) -> None:
        """The node is killed; the guards end its programs."""
        for program in self._programs:
            program.stop()
        if self._thread is not None:
            self._thread.kill()

    def take_note_of_what_is_public(self) -> None:
        """A job has run for a moment: note what it has published meanwhile."""
        node, artifacts, history = self.node, self.artifacts, self.world.history
        if node is None or node.part is not RowPart.LEADER:
            return
        generation, position = node.place
        shown = tuple(self.process.client.shown(GENERATIONS))
        for split, iteration in (("train", 0), ("test", 0), ("test", 1)):
            path = artifacts.paths.merged(split, position.iteration + iteration)
            stamp = path.read_text() if path.exists() else "0"
            if stamp not in ("0", artifacts.public.get(str(path))):
                artifacts.public[str(path)] = stamp
                history.published.append(Published(str(path), int(stamp), shown))
        if (folder := artifacts.served_now()) != artifacts.served:
            artifacts.served = folder
            version = int(Path(folder).name.partition("-")[2].partition(".")[0])
            history.served.append(Served(folder, version, generation.number, shown))


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

    def patiently(self, job: RowJob, ask: Callable[[], T]) -> T:
        world = self.host.world
        if world.rng.random() < 0.3:
            self.host.sleep(world.length() / 2 if world.slow_checks else world.short())
        if job.cancel.is_set():
            raise Cancelled
        return super().patiently(job, ask)


def make_work(world: World, process: Process) -> JobRunner:
    """The real runner of a process's work."""
    host, folder, copies = SimHost(world, process), world.artifacts.root / f"p{process.number}", None
    if process.number == world.unfit:
        # It cannot write where its programs are told what to do.
        world.history.faults.add("unfit")
        folder.write_text("")
    elif world.copies_weights:
        copies = WeightsCopy(folder / "weights")
        copies.folder.mkdir(parents=True)
    place = SimWorkplace(
        engines=cast(Replicas, host.engines),
        work_dir=folder,
        log_dir=folder / "logs",
        log_path=world.artifacts.root,
        stall_timeout_s=world.settings.coordination.stall_timeout_s,
        outage_s=world.paces.outage_s,
        weights=copies,
        host=host,
    )
    record = RunRecord("sim", "", "", "", world.settings, "", TASKS, "/model", log_path=world.artifacts.root)
    make = ContextMaker(
        record,
        world.program,
        process.observer,
        parts_of=partial(_inventory, host),
        claims_unsafe=lambda: "",
        accelerators=0,
        cpus=1,
        kept_in=place.kept_in,
    )

    def make_context(node: Node) -> Context:
        host.node = node
        return make(node)

    return JobRunner(make_context, place, lambda: process.wake(world.now + world.short()))


def _inventory(host: SimHost, split: str, iteration: int) -> tuple[PartOnDisk, ...]:
    """The parts as this host sees them, perhaps not up to their ends."""
    world = host.world
    until = world.now - world.rng.random() * host.process.client.habits.oldest_s
    found = []
    for path, part in sorted(host.artifacts.parts.items()):
        if (part.split, part.iteration) == (split, iteration):
            tasks = tuple(task for task, when in part.groups if when <= until)
            if tasks:
                found.append(PartOnDisk(Path(path).name, part.policy, len(tasks) * GROUP_BYTES, tasks))
    return tuple(found)
