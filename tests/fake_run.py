"""A run directory written by hand: what daemons would leave, with times and rewards that a test chooses. No process, no waiting."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from fsbarrier.program import PHASE_NAMES
from fsbarrier.protocol.codec import encode
from fsbarrier.protocol.facts import Beat, Fact, Generation, Join, Member, Position, Verdict
from fsbarrier.rundir import runrecord
from fsbarrier.rundir.names import FACT
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.settings.resolve import resolve
from fsbarrier.store import files

BEGIN = datetime(2026, 3, 1, 9, 0, 0, tzinfo=UTC)
#: seconds of work in each phase that has any: (phase, of the leader only)
WORK = {
    1: (0.2, True),
    2: (41.0, False),
    4: (1.4, True),
    6: (9.5, False),
    7: (0.4, False),
    8: (2.2, True),
} | {
    10: (24.0, False),
    11: (0.9, True),
    12: (1.1, False),
}


@dataclass
class FakeRun:
    """`now`: seconds since the beginning. Hosts differ in their monotonic clocks; `skew_s`: and each in its wall clock."""

    log_path: Path
    nodes: int = 3
    hosts: tuple[str, ...] = ("gpu-a", "gpu-b", "gpu-c")
    program: str = "rl"
    until: int | None = 6
    skew_s: float = 0.0
    coordination_s: float = 0.004
    boot_ids: Mapping[int, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    now: float = 0.0
    generation: int = 0
    members: tuple[int, ...] = ()
    incarnations: dict[int, int] = field(default_factory=dict)
    pids: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.paths = RunPaths(self.log_path)
        chosen = {"program": self.program, "num_nodes": self.nodes, **self.extra}
        settings = resolve((), chosen, cross_checks=False)
        record = runrecord.new(self.log_path, settings, tasks={}, model=None)
        runrecord.publish(record)
        self.run_id = record.run_id
        for folder in (self.paths.joins, self.paths.status, self.paths.generations, self.paths.events):
            files.make_dirs(folder)

    # --- single records ---

    def host(self, rank: int) -> str:
        return self.hosts[rank % len(self.hosts)]

    def join(self, rank: int, pid: int | None = None) -> None:
        incarnation = self.incarnations[rank] = self.incarnations.get(rank, 0) + 1
        self.pids[rank] = pid if pid is not None else 4000 + 10 * rank + incarnation
        boot = self.boot_ids.get(rank, f"boot-{self.host(rank)}")
        record = Join(
            rank, incarnation, self.host(rank), self.pids[rank], boot, ("192.0.2.1",), self.until, "0.1.0"
        )
        self.paths.join(rank, incarnation).write_bytes(encode(record))
        files.make_dirs(self.paths.node_logs(incarnation, rank))
        self.line(rank, "node_joined", (0, 0, 0), host=self.host(rank), pid=self.pids[rank], generation=0)

    def beat(
        self, rank: int, counter: int, state: str = "running", at: tuple[int, int] = (1, 0), **progress: Any
    ) -> None:
        iteration, phase = at
        name = PHASE_NAMES[phase] if iteration else ""
        place = (self.generation, iteration, phase, name)
        beat = Beat(
            rank,
            self.incarnations[rank],
            counter,
            self.host(rank),
            self.pids[rank],
            state,
            *place,
            progress=progress,
        )
        files.write_atomic(self.paths.beat(rank, beat.incarnation), encode(beat))

    def begin(
        self, members: tuple[int, ...], reason: str, start: tuple[int, int] = (1, 0), **more: Any
    ) -> None:
        """A new generation, entered by its members."""
        self.generation, self.members = self.generation + 1, members
        named = tuple(Member(r, self.incarnations[r], self.host(r)) for r in members)
        record = Generation(
            self.generation,
            named,
            min(members),
            Position(*start),
            reason,
            until=self.until,
            created_by=min(members),
            **more,
        )
        self.paths.generation(self.generation).write_bytes(encode(record))
        if record.verdict is None:
            fields = {
                "number": self.generation,
                "members": list(members),
                "leader": min(members),
                "reason": reason,
            }
            for rank in members:
                self.line(rank, "generation_started", (*start, 0), **fields)

    def verdict(self, code: int, reason: str) -> None:
        self.begin(self.members, "program failed", (1, 0), verdict=Verdict(code, reason))
        for rank in self.members:
            self.line(rank, "node_ended", (1, 0, 0), state="broken", code=code, reason=reason)

    def line(
        self,
        rank: int,
        event: str,
        at: tuple[int, int, int],
        *,
        after: float = 0.0,
        generation: int | None = None,
        **fields: Any,
    ) -> None:
        """One line of a node's journal, `after` seconds from now."""
        iteration, phase, _ = at
        generation = self.generation if generation is None else generation
        t = self.now + after
        boots = sorted({self.boot_ids.get(r, f"boot-{self.host(r)}") for r in range(self.nodes)})
        offset = 1000.0 + 777.0 * boots.index(self.boot_ids.get(rank, f"boot-{self.host(rank)}"))
        body = {
            "time": (BEGIN + timedelta(seconds=t + self.skew_s * rank)).isoformat(timespec="microseconds"),
            "mono_s": round(t + offset, 6),
            "run_id": self.run_id,
            "node_rank": rank,
            "generation": generation,
            "iteration": iteration,
            "phase": phase,
            "phase_name": PHASE_NAMES[phase] if iteration else "",
            "event": event,
            **fields,
        }
        with self.paths.journal(rank, self.incarnations[rank]).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(body) + "\n")

    def done(self, rank: int, iteration: int, phase: int) -> None:
        """A member's fact about a row."""
        folder = self.paths.phase(self.generation, phase, PHASE_NAMES[phase])
        files.make_dirs(folder)
        fact = Fact(rank, self.incarnations[rank], "done")
        (folder / FACT.build(iteration, rank, "done")).write_bytes(encode(fact))

    # --- whole stretches ---

    def start(self, *ranks: int) -> None:
        for rank in ranks or range(self.nodes):
            self.join(rank)
        self.now += 0.5
        self.begin(ranks or tuple(range(self.nodes)), "start")

    def row(self, iteration: int, phase: int, work_s: Mapping[int, float] | None = None) -> None:
        """All members pass one row. `work_s`: of each member; None: as WORK has it."""
        if work_s is None:
            seconds, leaders = WORK.get(phase, (0.0, True))
            work_s = {
                r: seconds * (1 + 0.03 * r) for r in self.members if not leaders or r == min(self.members)
            }
        last = max([work_s.get(rank, 0.0) for rank in self.members])
        at = (iteration, phase, 0)
        for rank in self.members:
            waits = {} if work_s.get(rank) else {"waits": True}
            self.line(rank, "phase_started", at, **waits)
        self.results(iteration, phase, last)
        whole = last + self.coordination_s
        for rank in self.members:
            own = work_s.get(rank, 0.0)
            parts = {"start_s": own / 8, "work_s": own * 7 / 8, "wait_s": whole - own} if own else {}
            self.line(rank, "phase_finished", at, after=whole, seconds=whole, **parts)
        self.now += whole

    def results(self, iteration: int, phase: int, after: float) -> None:
        """What the leader tells of the row's results."""
        leader, at, version = min(self.members), (iteration, phase, 0), iteration - 1
        train = 0.78 - 0.55 * math.exp(-0.45 * version)
        if phase == 4:
            fields = {
                "reward_mean": train,
                "trajectories": 1536,
                "groups": 96,
                "answer_tokens_mean": 310.2,
                "segments_per_episode": 1.25,
                "split": "train",
                "policy_version": version,
            }
            self.line(leader, "rolled_out", at, after=after, **fields)
        if phase == 6:
            fields = {
                "reward_mean": train + 0.02,
                "trajectories": 200,
                "split": "test",
                "policy_version": version,
            }
            self.line(leader, "evaluated", at, after=after, **fields)
        if phase == 10:
            fields = {
                "loss": 0.031 / iteration,
                "logprob_gap_mean": 2.1e-5,
                "logprob_gap_max": 4e-4,
                "optimizer_steps": 12,
                "entropy": 1.5 / iteration,
            }
            self.line(
                leader, "updated", at, after=after, **fields, grad_norm=0.8 / iteration, clip_fraction=0.013
            )
        if phase == 11:
            self.line(
                leader, "weights_published", at, after=after, policy_version=iteration, folder="checkpoints/x"
            )

    def iteration(self, number: int, phases: range = range(14)) -> None:
        for phase in phases:
            self.row(number, phase)

    def lose(self, rank: int, iteration: int, phase: int, *, after: float, resume: int) -> None:
        """A node is killed `after` seconds into a row; the others find out and go on without it."""
        at = (iteration, phase, 0)
        for member in self.members:
            self.line(member, "phase_started", at)
        self.now += after
        others = tuple(r for r in self.members if r != rank)
        for member in others:
            self.line(
                member, "node_suspected", at, after=6.2, suspect=rank, host=self.host(rank), silent_s=6.2
            )
        lost = [{"node_rank": rank, "host": self.host(rank), "why": "no heartbeat for 15.4 s"}]
        for member in others:
            self.line(member, "node_lost", at, after=15.4, lost=lost)
        self.now += 15.5
        reason = f"node {rank} ({self.host(rank)}) is lost: no heartbeat for 15.4 s"
        self.begin(others, reason, (iteration, resume))

    def fail(self, rank: int, iteration: int, phase: int, error: str, log: list[str]) -> None:
        self.line(rank, "phase_started", (iteration, phase, 0))
        self.line(rank, "work_failed", (iteration, phase, 0), after=3.0, work_s=3.0, error=error, log=log)
        self.now += 3.0

    def finish(
        self, state: str = "finished", code: int = 0, reason: str = "", at: tuple[int, int] = (1, 13)
    ) -> None:
        for rank in self.members:
            self.line(
                rank, "node_ended", (*at, 0), state=state, code=code, reason=reason or "6 iterations are done"
            )
            self.beat(rank, 99, state, at)


def long_run(log_path: Path, iterations: int = 6, *, lose_at: int | None = 3, **more: Any) -> FakeRun:
    """A whole run: rewards rise, and node 2 is lost in one iteration and back two later."""
    run = FakeRun(log_path, until=iterations, **more)
    run.start()
    for iteration in range(1, iterations + 1):
        if iteration == lose_at and run.nodes > 2:
            run.iteration(iteration, range(2))
            run.lose(2, iteration, 2, after=17.0, resume=1)
            run.iteration(iteration, range(1, 14))
        elif lose_at is not None and iteration == lose_at + 2 and run.nodes > 2:
            run.join(2)
            run.begin((0, 1, 2), f"joined: node 2 ({run.host(2)})", (iteration, 0))
            run.iteration(iteration)
        else:
            run.iteration(iteration)
    run.finish(at=(iterations, 13), reason=f"{iterations} iterations are done")
    return run
