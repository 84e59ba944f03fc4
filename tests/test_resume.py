"""Where a run is taken up again: what old listings hide is found all the same, and the generation before goes no further (I3)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsbarrier.coordination.group.collective import CollectiveWork
from fsbarrier.coordination.loop import NodeLoop
from fsbarrier.coordination.observer import Observer
from fsbarrier.coordination.poll_intervals import PollIntervals
from fsbarrier.coordination.resume import LastGeneration
from fsbarrier.program import PHASE_NAMES, RL_SLICES, Phase, Program
from fsbarrier.protocol.facts import SEALED, Fact, Generation, Join, Member, Position
from fsbarrier.protocol.state import ResumePoint, Rules
from fsbarrier.rundir.names import FACT
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.record_store import PosixStore

ROWS = tuple(Phase(index, name) for index, name in enumerate(PHASE_NAMES))
RULES = Rules(Program("ping", ROWS, RL_SLICES), 2)
SEAL = Fact(9, 1, SEALED)


class Old(PosixStore):
    """A mount whose listings of the facts stay as they were when they were first asked for."""

    def __init__(self) -> None:
        self.known: dict[Path, list[str]] = {}

    def names(self, directory: Path) -> list[str]:
        fresh = super().names(directory)
        return self.known.setdefault(directory, fresh) if "/gen-" in str(directory) else fresh


class Left:
    """What a generation of nodes 0 (the leader) and 1 left."""

    def __init__(self, folder: Path, store: PosixStore, **more: Any) -> None:
        self.observer = Observer(store, RunPaths(folder), RULES.table)
        self.observer.prepare()
        members = (Member(0, 1), Member(1, 1))
        generation = Generation(1, members, 0, Position(1, 0), "start", **more)
        store.create(self.observer.paths.generation(1), generation)
        self.observer.prepare()

    def publish(self, phase: int, *ranks: int) -> None:
        directory = self.observer.row.row_dir(1, Position(1, phase))
        self.observer.store.make_dir(directory)
        for rank in ranks:
            self.observer.store.put(directory / FACT.build(1, rank, "done"), Fact(rank, 1, "done"))

    def resume_point(self, seal: Fact | None = SEAL) -> ResumePoint:
        """Where it was left, after as many looks as that takes."""
        last = LastGeneration(self.observer)
        while (found := last.resume_point(RULES, 1.0, seal)) is None:
            pass
        return found

    def leaders(self, phase: int) -> str:
        path = self.observer.row.row_dir(1, Position(1, phase)) / FACT.build(1, 0, "done")
        return PosixStore().must_read(path, Fact).status


def test_what_old_listings_hide_is_found(tmp_path: Path) -> None:
    left = Left(tmp_path, Old())
    left.publish(0, 0)
    assert left.resume_point(None).position == Position(1, 0)
    left.publish(0, 1)
    for phase in range(1, 11):
        left.publish(phase, 0, 1)
    left.publish(11, 0)
    assert left.resume_point(None).position == Position(1, 0)
    assert left.resume_point().position == Position(
        1, 11
    )  # whose facts it lists for the first time: node 1's is not there
    assert (left.leaders(11), left.leaders(12)) == ("done", SEALED)


def test_a_row_whose_facts_are_all_to_be_seen_was_passed(tmp_path: Path) -> None:
    left = Left(tmp_path, PosixStore())
    left.publish(0, 0, 1)
    assert left.resume_point().position == Position(1, 1)
    left.publish(1, 1)  # too late: the leader's is a seal
    assert left.resume_point().position == Position(1, 1) == left.resume_point(None).position


def test_a_run_that_was_finished_needs_no_seal(tmp_path: Path) -> None:
    left = Left(tmp_path, PosixStore(), until=1)
    for phase in range(14):
        left.publish(phase, 0, 1)
    assert left.resume_point().position == Position(2, 0)
    assert list((tmp_path / "coordination").rglob("iter-000002*")) == []


def test_a_session_that_only_rolled_out_was_left_by_its_own_rows(tmp_path: Path) -> None:
    left = Left(tmp_path, PosixStore(), choices={"rl_phase": "rollout"})
    for phase in range(7):
        left.publish(phase, 0, 1)
    found = left.resume_point(None)
    assert (found.position, found.span) == (Position(2, 0), (0, 6))


def test_a_fact_that_cannot_be_read_is_an_error_and_no_seal(tmp_path: Path) -> None:
    left = Left(tmp_path, PosixStore())
    left.publish(0, 0, 1)
    path = left.observer.row.row_dir(1, Position(1, 0)) / FACT.build(1, 0, "done")
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(OSError, match="cannot be read"):
        left.resume_point()


def test_members_that_live_do_not_pass_a_seal_and_go_on_behind_it(tmp_path: Path) -> None:
    """A node that takes them for dead ends their generation and dies itself: they stop there, and form the next one."""
    paths, store, passed = RunPaths(tmp_path), PosixStore(), list[tuple[int, Position]]()

    def record(event: str, node: Any, fields: Any) -> None:
        if event == "phase_finished":
            passed.append((node.generation.number, node.position))

    def start(rank: int) -> NodeLoop:
        observer = Observer(store, paths, RULES.table, PollIntervals(0.0, 0.0))
        join = Join(rank, 0, f"host{rank}", rank, "boot", until=1, time=str(rank))
        loop = NodeLoop(store, observer, RULES, CollectiveWork(), join, record)
        observer.prepare()
        loop.start(0.0)
        return loop

    loops, sealed = [start(0), start(1)], Position(9, 9)
    for tenths in range(300):
        for loop in [loop for loop in loops if loop.exit is None]:
            loop.write_beat(loop.beat(), tenths / 10)
            loop.tick(tenths / 10)
        if sealed.iteration == 9 and len(passed) > 6:
            intruder = Observer(store, paths, RULES.table)
            intruder.prepare()
            LastGeneration(intruder).resume_point(RULES, 0.0, SEAL)
            names = [name for name in PHASE_NAMES if (found := _seal_in(paths, name)) is not None and found]
            sealed = Position(1, PHASE_NAMES.index(names[0]))
    assert [loop.exit.code for loop in loops if loop.exit is not None] == [0, 0]
    assert max(place for number, place in passed if number == 1) < sealed
    assert min(place for number, place in passed if number == 2) == sealed
    assert max(number for number, _ in passed) == 2


def _seal_in(paths: RunPaths, name: str) -> bool:
    path = paths.phase(1, PHASE_NAMES.index(name), name) / FACT.build(1, 0, "done")
    return path.exists() and b'"status":"sealed"' in path.read_bytes()
