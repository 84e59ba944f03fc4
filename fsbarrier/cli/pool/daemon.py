"""`fsbarrier daemon`: one node of a pool. It runs one node rank of one job at a time and takes part in scheduling.

A single thread beats, reads the directory, decides and runs jobs. If the shared directory hangs, the heartbeat stops too, and the other
nodes continue without this one. Any daemon may schedule; to avoid races, only the living node with the lowest number does.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from fsbarrier.cli.launchers.processes import Interrupted, ending_signals
from fsbarrier.cli.pool.directory import PoolDirectory
from fsbarrier.cli.pool.facts import STOPPED, Facts, Job, Placement, next_decision
from fsbarrier.cli.start import ranks
from fsbarrier.coordination.free_ranks import free_ranks
from fsbarrier.coordination.rank_lock import RankLock, RankTaken, hold_rank
from fsbarrier.errors import Fenced
from fsbarrier.processes.supervisor import Child, StartFailed, own_program, with_this_package
from fsbarrier.protocol.facts import Beat, Join, Member
from fsbarrier.protocol.membership import GONE, Ledger
from fsbarrier.rundir.heartbeats import HeartbeatReader
from fsbarrier.rundir.names import GENERATION, START, StartName
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.record_store import PosixStore
from fsbarrier.store.identity import boot_id, host_name

Say = Callable[[str], None]
# Maximum polling interval of the pool directory.
LOOK_S = 0.5
# A run's daemon needs a second or two to stop its own programs.
GRACE_S = 10.0


def serve(root: Path, dead_s: float, shared_group: bool, say: Say) -> int:
    """Serve the pool at `root` until a signal arrives; returns the exit code. Raises UsageError, StoreError, Fenced."""
    pool = PoolDirectory(root)
    pool.make(shared_group=shared_group)
    # From here on a signal raises Interrupted, and the context managers release whatever was acquired.
    with ending_signals():
        try:
            with _membership(pool, dead_s) as (start, lock):
                lock.note_start(start.incarnation)
                say(
                    f"joined the pool {root} as node {start.rank}; Ctrl-C leaves it and stops the current job's node"
                )
                _Node(pool, start, dead_s, say).run()
        except Interrupted as stopped:
            say("left the pool and stopped its programs; another node takes over")
            return 128 + stopped.number
    return 0


@contextmanager
def _membership(pool: PoolDirectory, dead_s: float) -> Iterator[tuple[StartName, RankLock]]:
    """Acquire a node number that no other daemon holds: the one this host had before, or a new one."""
    store = PosixStore()
    store.make_dir(pool.paths.joins)
    store.make_dir(pool.paths.status)
    while True:
        known = START.parse_all(store.names(pool.paths.joins))
        highest = max((start.rank for start in known), default=-1)
        for start in free_ranks(pool.paths, highest + 2, dead_s):
            join = Join(start.rank, start.incarnation, host_name(), os.getpid(), boot_id())
            with ExitStack() as stack:
                try:
                    lock = stack.enter_context(hold_rank(pool.root, "pool", start.rank, dead_s / 2))
                except RankTaken:
                    continue
                if store.create(pool.paths.join(start.rank, start.incarnation), join):
                    yield start, lock
                    return


@dataclass
class _Node:
    pool: PoolDirectory
    me: StartName
    dead_s: float
    say: Say
    _ledger: Ledger = field(default_factory=Ledger)
    _counter: int = 0
    _child: Child | None = None
    _serves: Placement | None = None

    def run(self) -> None:
        """The main loop, until an exception ends it. Stops the child on the way out."""
        reader = HeartbeatReader(PosixStore(), self.pool.paths.status)
        pause, look_s = threading.Event(), min(LOOK_S, self.dead_s / 10)
        try:
            while True:
                self._beat("busy" if self._serves else "idle")
                living, dead = self._look_at_others(reader)
                facts = self.pool.read()
                if self.me.rank == min(living):
                    self._decide(facts, living, dead)
                self._serve(facts)
                pause.wait(look_s)
        finally:
            self._end_child()
            self._beat("left")

    def _beat(self, state: str) -> None:
        self._counter += 1
        job = self._serves.job if self._serves else 0
        here = self.me.rank, self.me.incarnation
        beat = Beat(*here, self._counter, host_name(), os.getpid(), state, progress={"job": job})
        PosixStore().put(self.pool.paths.beat(*here), beat)

    def _look_at_others(self, reader: HeartbeatReader) -> tuple[set[int], set[int]]:
        """The nodes known to be alive, including this one, and those known to be dead. Raises Fenced."""
        beats = {start: beat for start, beat in reader.read() if beat is not None}
        now = time.monotonic()
        self._ledger = self._ledger.observe(
            {start.rank: beat.pulse for start, beat in beats.items()}, now, now, self.dead_s / 2
        )
        living, dead = {self.me.rank}, set[int]()
        for start, beat in beats.items():
            if start.rank == self.me.rank:
                if start.incarnation > self.me.incarnation:
                    raise Fenced(f"node {start.rank} of the pool was started again on {beat.host}")
                continue
            member = Member(beat.rank, beat.incarnation)
            age = self._ledger.age(member, now)
            if beat.state in GONE or (age is not None and age >= self.dead_s):
                dead.add(beat.rank)
            elif self._ledger.moved(member):
                living.add(beat.rank)
        return living, dead

    def _decide(self, facts: Facts, living: set[int], dead: set[int]) -> None:
        # Only a job with a failed node needs the check whether its run has begun.
        failed = {one.job for one, code in facts.ended.items() if code and facts.over(one.job) is None}
        begun = {job for job in failed if _has_begun(facts.jobs[job])}
        decision = next_decision(facts, living, dead, begun)
        if decision is not None and self.pool.decide(facts, decision):
            what = (
                f"nodes {', '.join(map(str, sorted(decision.ranks.values())))}"
                if decision.ranks
                else f"over, exit code {decision.exit_code}"
            )
            self.say(f"job {decision.job}: {what}{f' ({decision.reason})' if decision.reason else ''}")

    def _serve(self, facts: Facts) -> None:
        """Start or stop the child according to the decisions."""
        wanted = next((one for one in facts.open_placements() if one.node == self.me.rank), None)
        if wanted is not None and wanted.job in facts.stops:
            self._report(wanted, self._end_child() or STOPPED)
            return
        if self._serves != wanted:
            self._end_child()
            if wanted is not None:
                self._start(wanted, facts.jobs[wanted.job])
        if self._child is not None and self._serves and (code := self._child.poll()) is not None:
            self._report(self._serves, code)

    def _start(self, one: Placement, job: Job) -> None:
        self.say(f"job {one.job} ({job.name}): starting node {one.rank}")
        if one.rank == 0:
            words = ["--master", "--num-nodes", str(job.nodes), "--log-path", job.log_path, *job.words]
        else:
            shared = ["--shared-group"] if "--shared-group" in job.words else []
            words = ["--worker", str(one.rank), "--log-path", job.log_path, *shared]
        environ = {name: value for name, value in os.environ.items() if name not in ranks.VARIABLES}
        self._serves = one
        try:
            self._child = Child.start(
                own_program("fsbarrier", "run", *words),
                env=with_this_package(environ),
                cwd=job.folder,
                log_file=self.pool.log(one.job, one.rank),
                name=f"job {one.job}, node {one.rank}, on {host_name()}",
            )
        except StartFailed as error:
            self.say(str(error))
            self._report(one, error.returncode)

    def _report(self, one: Placement, code: int) -> None:
        self.say(f"job {one.job}: node {one.rank} ended with exit code {code}")
        self.pool.report(one, code)
        self._child = self._serves = None

    def _end_child(self) -> int | None:
        """Stop the child and return its exit code; None if there is no child."""
        child, self._child, self._serves = self._child, None, None
        return child.stop(min(GRACE_S, self.dead_s / 2)) if child is not None else None


def _has_begun(job: Job) -> bool:
    return bool(GENERATION.parse_all(PosixStore().names(RunPaths(Path(job.log_path)).generations)))
