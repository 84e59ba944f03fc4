"""What the parts of one schedule share: virtual time, what was drawn from its seed, the disk, the history; one start of a node, and its
threads. `World` (scripts/lab/sim/world.py) starts the nodes.
"""

from __future__ import annotations

import errno
import os
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from greenlet import getcurrent, greenlet

from fsbarrier.protocol.facts import Pulse
from fsbarrier.protocol.state import Node
from sim.artifacts import Artifacts, Program
from sim.history import History, ProcessEnd, Said
from sim.setup import Draw
from sim.store import WRITING, After, MountClient, nothing

# the limit of operations between two waits of a thread; more are a livelock
LIVELOCK = 5000
Action = Callable[[], None]


class Crash(BaseException):
    """The process is killed in this operation."""


@dataclass(slots=True)
class Mishap:
    """A mishap in the `step`-th operation from now on: `how` is crash, crash-after or block."""

    how: str
    step: int = 1
    seconds: float = 0.0
    # strike only at this kind of operation, and at a path that contains this
    verb: str = ""
    inside: str = ""
    # the whole process is stopped while blocked
    stopped: bool = False


def fail(error: type[BaseException], *about: object) -> None:
    """Raises `error`."""
    raise error(*about)


class Schedule:
    """The state of one schedule."""

    def __init__(self, draw: Draw, history: History) -> None:
        self.draw, self.history, self.rng = draw, history, draw.rng
        self.now = 0.0
        self.healed = not draw.setup.mix
        self.artifacts = Artifacts()
        #: the thread that runs now
        self.running: SimThread | None = None
        # Sorted by time. It is so short that a heap would not be faster.
        self.agenda: list[tuple[float, int, Action]] = []
        self.events = 0
        # (rank, phase) -> how often its program will still fail
        self.failures: dict[tuple[int, str], int] = {}
        # the code digest of each rank's next start
        self.codes = [""] * draw.setup.nodes
        #: a process has ended, so perhaps all have
        self.ending = False

    def at(self, time: float, action: Action) -> None:
        self.events += 1
        insort(self.agenda, (time, self.events, action))

    def after(self, delay: float, action: Action) -> None:
        self.at(self.now + delay, action)

    def short(self) -> float:
        return self.rng.random() * 0.02

    def length(self) -> float:
        """The duration of a program."""
        return self.rng.choice(self.draw.lengths) * (0.5 + self.rng.random())

    def say(self, text: str, mark: str = "!") -> None:
        self.history.told.append(Said(self.now, mark, text))

    def start(self, rank: int, delay: float) -> None:
        """Start a node after `delay` seconds."""
        raise NotImplementedError

    def entered(self, node: Node) -> None:
        """A node has entered a row."""
        raise NotImplementedError


class Start:
    """One start of one node: its threads, its programs, and how it is struck."""

    def __init__(self, schedule: Schedule, number: int, rank: int, client: MountClient) -> None:
        self.schedule, self.number, self.rank, self.client = schedule, number, rank, client
        self.host, self.started = client.host, schedule.now
        self.up, self.joined = True, False
        # The whole host is stopped, with its programs; or only this process.
        self.frozen = self.paused = False
        #: what waits until it is not stopped any more
        self.deferred: list[Action] = []
        self.woke_at = 0.0
        #: until when an operation hung or hangs
        self.hung_at = 0.0
        self.mishap: Mishap | None = None
        self.programs: list[Program] = []
        self.threads: list[SimThread] = []
        # operations since this process last waited
        self.operations = 0
        own = schedule.draw.clocks
        self.offset = own.uniform(0, 1e6) if schedule.draw.setup.clocks else 0.0
        self.rate = own.choice((1.0, 1.0001, 0.9999)) if schedule.draw.setup.clocks else 1.0

    @property
    def clock(self) -> float:
        """This process's own monotonic clock."""
        return self.offset + self.schedule.now * self.rate

    def thread(self, call: Action) -> SimThread:
        """A new thread, which begins in a moment."""
        return SimThread(self, call)

    # --- what happens in its operations ---

    def operation(self, verb: str, path: str) -> After:
        """Called before each operation: perhaps it raises an error or hangs. Returns what to call after the operation."""
        self.operations += 1
        if self.operations > LIVELOCK:
            self.schedule.history.stuck.append(f"node {self.rank}: a livelock; the last was {verb} {path}")
            raise Crash
        client, thread = self.client, self.schedule.running
        if client.slow_s and verb in WRITING and thread is not None:
            self.schedule.history.reached.add(f"a slow {verb}")
            thread.sleep(self.schedule.rng.random() * client.slow_s)
        if client.outage is not None and client.outage.strikes(verb, path):
            code = client.outage.code
            if client.outage.verbs:
                self.schedule.history.reached.add(f"{errno.errorcode[code]} at {verb}")
            raise OSError(code, os.strerror(code), path)
        mishap = self.mishap
        if mishap is not None and mishap.verb in ("", verb) and mishap.inside in path:
            mishap.step -= 1
            if mishap.step <= 0:
                self.mishap = None
                return self._strike(mishap)
        return self._chance(verb, path)

    def _strike(self, mishap: Mishap) -> After:
        if mishap.how == "crash":
            raise Crash
        if mishap.how == "crash-after":
            return partial(fail, Crash)
        thread = self.schedule.running
        assert thread is not None
        if mishap.stopped:
            self.pause(mishap.seconds, frozen=True)
        else:
            self.schedule.say(f"node {self.rank}: an operation hangs for {mishap.seconds:g} s")
        self.hung_at = self.schedule.now + mishap.seconds
        # If it is a heartbeat that hangs, this is as if the filesystem failed.
        self.schedule.history.outages.append((self.rank, self.schedule.now, self.hung_at))
        self.schedule.history.silenced.append((self.number, self.schedule.now, self.hung_at))
        thread.sleep(mishap.seconds, hangs=True)
        return nothing

    def _chance(self, verb: str, path: str) -> After:
        """An operation fails now and then. Creates fail more often, since their errors are ambiguous."""
        schedule = self.schedule
        rate = schedule.draw.error_rate * (5 if verb == "create" else 1)
        if not rate or verb == "cancel" or schedule.rng.random() >= rate:
            return nothing
        how = schedule.rng.choice(schedule.draw.errors)
        schedule.history.faults.add(how)
        code = schedule.rng.choice((errno.EIO, errno.ESTALE))
        if how == "error":
            raise OSError(code, os.strerror(code), path)
        return partial(fail, OSError, code, os.strerror(code), path)

    # --- what happens to it ---

    def pause(self, seconds: float, *, frozen: bool) -> None:
        if self.up and not self.paused:
            self.paused, self.frozen = True, frozen
            self.schedule.history.silenced.append(
                (self.number, self.schedule.now, self.schedule.now + seconds)
            )
            self.schedule.say(
                f"node {self.rank} is stopped for {seconds:g} s{' with its host' if frozen else ''}"
            )
            self.schedule.after(seconds, self.resume)

    def resume(self) -> None:
        if self.up and self.paused:
            self.paused, self.woke_at = False, self.schedule.now
            self.schedule.say(f"node {self.rank} wakes up")
            waiting, self.deferred = self.deferred, []
            for action in waiting:
                self.schedule.after(self.schedule.short(), action)

    def kill(self, why: str, *, host: bool = False) -> None:
        """Kill the process and its programs; with `host`, everything on its host."""
        if self.up:
            self._over(None, why)
            self.schedule.say(f"node {self.rank} is dead: {why}")
            if not host:
                self.leave_death_notice()

    def end(self, code: int, why: str) -> None:
        """The process ends with this exit code; perhaps somebody starts it again."""
        if not self.up:
            return
        self._over(code, why)
        schedule = self.schedule
        schedule.say(f"node {self.rank} ends with code {code}: {why}")
        if code == 2:
            schedule.codes[self.rank] = ""
        if not schedule.healed and code in (2, 3, 143) and schedule.rng.random() < 0.6:
            schedule.start(self.rank, 1 + schedule.rng.random() * 20)

    def _over(self, code: int | None, why: str) -> None:
        self.up = self.paused = False
        self.schedule.ending = True
        self.schedule.history.ended[self.number] = ProcessEnd(self.schedule.now, self.rank, code, why)
        for program in self.programs:
            program.stop()
        if self.schedule.running is None:
            self.end_threads()

    def ran(self, thread: SimThread) -> None:
        """One of its threads has run for a moment."""
        if thread.crashed:
            self.kill("killed in the middle of an operation")
        if not self.up:
            self.end_threads()

    def end_threads(self) -> None:
        """End what is left of the threads of a process that has ended."""
        for thread in self.threads:
            thread.kill()

    def signal(self) -> None:
        """SIGTERM."""

    def leave_death_notice(self) -> None:
        """Killed, it may leave a last heartbeat."""

    # --- what the world is told ---

    def beat_written(self, pulse: Pulse) -> None:
        """One of its heartbeats is on the disk."""


class SimThread:
    """A thread of a process, as a greenlet: it runs when nothing else does, until it sleeps, so that everything happens in one order."""

    def __init__(self, owner: Start, call: Action) -> None:
        self.owner, self._call = owner, call
        self.done = self.crashed = False
        self._killed = False
        #: it waits in the middle of an operation
        self.hangs = False
        self._sleeps = 0
        self._greenlet = greenlet(self._main)
        owner.threads = [*(thread for thread in owner.threads if not thread.done), self]
        self._wake_after(owner.schedule.short())

    def _main(self) -> None:
        try:
            self._call()
        except Crash:
            self.crashed = True
        finally:
            self.done = True

    def sleep(self, seconds: float, *, hangs: bool = False) -> None:
        """Called from inside: wait, perhaps not so long, unless it `hangs`. Raises Crash after `kill`."""
        self.hangs = hangs
        self._wake_after(seconds)
        assert self._greenlet.parent is not None
        self._greenlet.parent.switch()
        self.hangs = False
        if self._killed:
            raise Crash

    def wake(self) -> None:
        """End the wait."""
        if not self.done and not self.hangs:
            self._wake_after(0.0)

    def _wake_after(self, seconds: float) -> None:
        self._sleeps += 1
        self.owner.schedule.after(seconds, partial(self._woken, self._sleeps))

    def _woken(self, sleep: int) -> None:
        owner = self.owner
        if self.done or sleep != self._sleeps or not owner.up:
            return
        if owner.paused:
            owner.deferred.append(partial(self._woken, sleep))
            return
        self.run()
        owner.ran(self)

    def run(self) -> None:
        """Let it go on until it sleeps again or ends. Raises what it raises."""
        schedule = self.owner.schedule
        before, schedule.running = schedule.running, self
        self.owner.operations = 0
        # It returns to whoever lets it run.
        self._greenlet.parent = getcurrent()
        try:
            self._greenlet.switch()
        finally:
            schedule.running = before

    def kill(self) -> None:
        """Called from outside: end it where it is."""
        self._killed = True
        if not self._greenlet:
            self.done = True
        if not self.done:
            self.run()
