"""`fsbarrier daemon`: one node of a pool. It runs one node rank of one job at a time and takes part in scheduling.

A single thread beats, reads the log, decides and runs jobs. If the shared directory hangs, the heartbeat stops too, and the other nodes
continue without this one. Any daemon may schedule; to avoid races, only the living node with the lowest number does.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fsbarrier.network.this_host import host_name
from fsbarrier.pool.directory import Pool
from fsbarrier.pool.queue import STOPPED, Assignment, Ended, Joined, Placed, next_decision
from fsbarrier.processes.signals import Interrupted, end_once, ending_signals_handled
from fsbarrier.processes.supervisor import Child, StartFailed, own_program, with_this_package
from fsbarrier.protocol.facts import Beat, Member
from fsbarrier.protocol.membership import GONE, Ledger
from fsbarrier.rundir.heartbeats import read_beats
from fsbarrier.rundir.record_store import PosixStore

Say = Callable[[str], None]
# Maximum polling interval of the pool directory.
LOOK_S = 0.5
# A run's daemon needs a second or two to stop its own programs.
GRACE_S = 10.0


def serve(root: Path, dead_s: float, shared_group: bool, environ: Mapping[str, str], say: Say) -> int:
    """Serve the pool at `root` until a signal arrives; returns the exit code. `environ`: of the jobs. Raises UsageError, StoreError."""
    pool = Pool(root)
    pool.make(shared_group=shared_group)
    # From here on a signal raises Interrupted, and the child is stopped on the way out.
    with ending_signals_handled(end_once):
        try:
            # Each start of a daemon is a new node of the pool. What an earlier daemon on this host ran goes to another node once its
            # heartbeats are missed.
            number = pool.append(Joined(host_name(), os.getpid()))
            say(f"joined the pool {root} as node {number}; Ctrl-C leaves it and stops the current job's node")
            _Node(pool, number, dead_s, environ, say).run()
        except Interrupted as stopped:
            say("left the pool and stopped its programs; another node takes over")
            return stopped.code
    return 0


@dataclass
class _Node:
    pool: Pool
    number: int
    dead_s: float
    environ: Mapping[str, str]
    say: Say
    _ledger: Ledger = field(default_factory=Ledger)
    _counter: int = 0
    _child: Child | None = None
    _serves: Assignment | None = None

    def run(self) -> None:
        """The main loop, until an exception ends it. Stops the child on the way out."""
        pause, look_s = threading.Event(), min(LOOK_S, self.dead_s / 10)
        try:
            while True:
                self._beat("busy" if self._serves else "idle")
                living, dead = self._look_at_others()
                self.pool.read()
                if self.number == min(living):
                    self._decide(living, dead)
                self._serve()
                pause.wait(look_s)
        finally:
            self._end_child()
            self._beat("left")

    def _beat(self, state: str) -> None:
        self._counter += 1
        beat = Beat(self.number, 1, self._counter, host_name(), os.getpid(), state)
        PosixStore().put(self.pool.paths.beat(self.number, 1), beat)

    def _look_at_others(self) -> tuple[set[int], set[int]]:
        """The nodes known to be alive, including this one, and those known to be dead."""
        beats, now = read_beats(self.pool.root), time.monotonic()
        pulses = {number: beat.pulse for number, beat in beats.items()}
        self._ledger = self._ledger.observe(pulses, now, now, self.dead_s / 2)
        living, dead = {self.number}, set[int]()
        for number in beats.keys() - living:
            node = Member(number, 1)
            silent_s = self._ledger.age(node, now)
            if beats[number].state in GONE or (silent_s is not None and silent_s >= self.dead_s):
                dead.add(number)
            elif self._ledger.moved(node):
                living.add(number)
        return living, dead

    def _decide(self, living: set[int], dead: set[int]) -> None:
        decision = next_decision(self.pool.queue, living, dead)
        if decision is None or not self.pool.decide(decision):
            return
        if isinstance(decision, Placed):
            nodes = sorted(decision.ranks.values())
            what = f"runs on node{'s' * (len(nodes) > 1)} {', '.join(map(str, nodes))}"
        else:
            reason = f" ({decision.reason})" if decision.reason else ""
            what = f"over, exit code {decision.exit_code}{reason}"
        self.say(f"job {decision.job}: {what}")

    def _serve(self) -> None:
        """Start or stop the child according to the log."""
        assigned = self.pool.queue.place_of(self.number)
        if assigned is not None and self.pool.queue.jobs[assigned.job].stop:
            self._report(assigned, self._end_child() or STOPPED)
            return
        if self._serves != assigned:
            self._end_child()
            if assigned is not None:
                self._start(assigned)
        if self._child is not None and self._serves and (code := self._child.poll()) is not None:
            self._report(self._serves, code)

    def _start(self, assigned: Assignment) -> None:
        job = self.pool.queue.jobs[assigned.job].job
        self.say(f"job {assigned.job} ({job.name}): starting node {assigned.rank}")
        where = ["--log-path", str(self.pool.run_of(assigned.job))]
        if assigned.rank == 0:
            words = ["--master", "--num-nodes", str(job.nodes), *where, *job.words]
        else:
            shared = [flag for flag in ("--shared-group", "--trust-mount") if flag in job.words]
            words = ["--worker", str(assigned.rank), *where, *shared]
        self._serves = assigned
        try:
            self._child = Child.start(
                own_program("fsbarrier", "run", *words),
                env=with_this_package(self.environ),
                cwd=job.folder,
                log_file=self.pool.log(assigned.job, assigned.rank),
                name=f"job {assigned.job}, node {assigned.rank}, on {host_name()}",
            )
        except StartFailed as error:
            self.say(str(error))
            self._report(assigned, error.returncode)

    def _report(self, assigned: Assignment, code: int) -> None:
        self.say(f"job {assigned.job}: node {assigned.rank} ended with exit code {code}")
        self.pool.append(Ended(assigned.job, assigned.rank, assigned.by, code))
        self._child = self._serves = None

    def _end_child(self) -> int | None:
        """Stop the child and return its exit code; None if there is no child."""
        child, self._child, self._serves = self._child, None, None
        return child.stop(min(GRACE_S, self.dead_s / 2)) if child is not None else None
