"""Old facts are removed, and nobody misses them: what lies in the directory does not grow with the iterations (I9)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from core_builders import CLOSE, MERGE, OPEN, PROBE, RULES, generation

from fsbarrier import files
from fsbarrier.group.collective import Collective, CollectiveWork
from fsbarrier.group.group import make_member
from fsbarrier.node.fact_removal import AT_ONCE, FactRemoval
from fsbarrier.node.loop import NodeLoop
from fsbarrier.node.observer import Observer
from fsbarrier.node.paces import Paces
from fsbarrier.node.resume import LastGeneration
from fsbarrier.program import PHASE_NAMES, Phase, Program
from fsbarrier.protocol.facts import SEALED, Fact, Join, Position, Record
from fsbarrier.protocol.membership import Limits
from fsbarrier.protocol.state import Rules
from fsbarrier.rundir.names import FACT
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.record_store import PosixStore
from fsbarrier.sim.scenario import play

PING = Rules(Program("ping", tuple(Phase(index, name) for index, name in enumerate(PHASE_NAMES))), 2)


def run_two_nodes(folder: Path, iterations: int) -> list[str]:
    """All names below coordination/ after so many iterations of two nodes."""
    paths, store = RunPaths(folder), PosixStore()

    def start(rank: int) -> NodeLoop:
        observer = Observer(store, paths, PING.table, Paces(0.0, 0.0))
        join = Join(rank, 0, f"host{rank}", rank, "boot", until=iterations, time=str(rank))
        loop = NodeLoop(store, observer, PING, CollectiveWork(), join, lambda event, node, fields: None)
        observer.prepare()
        loop.start(0.0)
        return loop

    loops, now = [start(0), start(1)], 0.0
    while any(loop.exit is None for loop in loops):
        now += 0.1
        for loop in [loop for loop in loops if loop.exit is None]:
            beat = loop.beat()
            store.put(paths.beat(beat.rank, beat.incarnation), beat)
            loop.tick(now)
    return sorted(str(path.relative_to(paths.coordination)) for path in paths.coordination.rglob("*"))


def test_a_long_run_leaves_no_more_than_a_short_one(tmp_path: Path) -> None:
    short, long = (run_two_nodes(tmp_path / str(count), count) for count in (3, 9))
    assert len(short) == len(long)
    row = sorted(Path(name).name for name in long if "p05-" in name and "iter-" in name)
    # Of the leader the facts about the first iteration stay, too.
    assert row == ["iter-000001.node-0000.done", "iter-000009.node-0000.done", "iter-000009.node-0001.done"]


def test_a_member_gives_its_part_before_it_cleans_up(tmp_path: Path) -> None:
    """The others wait for the one, and nobody for the other."""
    done: list[str] = []

    class Noting(PosixStore):
        def mark(self, path: Path, record: Record) -> None:
            super().mark(path, record)
            done.append(f"made {path.name[:11]}")

        def remove(self, path: Path) -> None:
            super().remove(path)
            done.append(f"removed {path.name[:11]}")

    here = Join(0, 0, "host0", 1, "boot")
    member = make_member(Noting(), RunPaths(tmp_path), here, 1, Limits(6.0, 15.0, 4.0), 2.0)
    assert member.begin(0.0) and member.look(0.1)
    generation = member.snapshot.node.generation
    assert generation is not None
    for number in range(1, 5):
        member.work.asked = Collective(generation, Position(number, 0), "barrier", None, ())
        member.look(float(number))
        assert member.snapshot.outcome is not None and member.snapshot.outcome.of is member.work.asked
    assert done == [f"made iter-{n:06d}" for n in (1, 2, 3)] + [
        "removed iter-000001",
        "made iter-000004",
        "removed iter-000002",
    ]


def test_a_run_goes_on_from_what_is_left(tmp_path: Path) -> None:
    run_two_nodes(tmp_path, 5)
    observer = Observer(PosixStore(), RunPaths(tmp_path), PING.table)
    observer.prepare()
    found = LastGeneration(observer).resume_point(PING, 1.0, Fact(1, 2, SEALED))
    assert found is not None and found.position == Position(6, 0)


def test_a_start_with_listings_far_behind_looks_again(tmp_path: Path) -> None:
    """Old listings end in iteration 3, whose facts were removed. No seal is of use there, and none of what could be read."""

    class Old(PosixStore):
        def names(self, directory: Path) -> list[str]:
            fresh = super().names(directory)
            return [name for name in fresh if "iter-00000" not in name or name[:11] <= "iter-000003"]

    run_two_nodes(tmp_path, 7)
    paths = RunPaths(tmp_path)
    folder = paths.phase(1, 4, PHASE_NAMES[4])
    PosixStore().put(folder / FACT.build(3, 1, "done"), Fact(1, 1, "done"))
    observer = Observer(Old(), paths, PING.table)
    observer.prepare()
    for path in paths.beats.iterdir():
        path.unlink()
    last = LastGeneration(observer)
    assert last.resume_point(PING, 1.0, None) is None
    assert last.resume_point(PING, 1.0, Fact(1, 2, SEALED)) is None
    found = LastGeneration(Observer(PosixStore(), paths, PING.table))
    found.observer.prepare()
    now = found.resume_point(PING, 1.0, Fact(1, 2, SEALED))
    assert now is not None and now.position == Position(8, 0)


STOPPED = """
    nodes 3
    iterations 14
    length 0.5
    when node 0 enters train_rollout: kill node 2
    when node 0 enters {row}: stop node 0 for 100 s
    when node 0 enters {row}: stop node 1 for 100 s
    when node 0 enters {row}: start node 2
    when node 0 enters {row}, 2 s later: stop node 2 at create for 60 s
"""


@pytest.mark.parametrize(
    "row",
    [
        pytest.param("update", id="in-the-first-iteration-of-the-generation"),
        pytest.param("train_rollout of iteration 4", id="in-a-later-one"),
    ],
)
def test_a_seal_that_comes_iterations_too_late_ends_nothing(row: str) -> None:
    """Node 2 takes the others for dead and is stopped just before it seals their row. When it wakes they are iterations further."""
    history, broken = play(STOPPED.format(row=row))
    assert broken == []
    assert [event for event in history.events if event.event == "generation_sealed"] == []
    seals = [
        write.time
        for write in history.writes
        if isinstance(write.record, Fact) and write.record.status == SEALED
    ]
    assert len(seals) <= 1
    assert max(record.start for _, record in history.generations.values()).iteration > 4


def removal(folder: Path, number: int, **more: Any) -> tuple[FactRemoval, Any]:
    """What node 0, the leader, removes in generation `number` of three nodes, which begins in iteration 1."""
    made = FactRemoval(PosixStore(), RunPaths(folder), RULES)
    record = generation(number, **more)
    made.begin(record)
    return made, record


def publish(folder: Path, number: int, iteration: int, phase: int, *ranks: int) -> list[str]:
    row = RULES.table.rows[phase]
    directory = RunPaths(folder).phase(number, row.index, row.name)
    PosixStore().make_dir(directory)
    for rank in ranks:
        PosixStore().put(directory / FACT.build(iteration, rank, "done"), Fact(rank, 1, "done"))
    return PosixStore().names(directory)


def left(folder: Path) -> set[str]:
    return {path.name for path in (folder / "coordination").rglob("iter-*")}


def test_the_leader_removes_no_fact_before_the_folder_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader, record = removal(tmp_path, 1)
    leader.open(record, 2)
    publish(tmp_path, 1, 2, MERGE, 0)
    names = publish(tmp_path, 1, 3, MERGE, 0)

    def fails(store: PosixStore, path: Path) -> None:
        raise OSError(5, "the server is away", str(path))

    with monkeypatch.context() as patch, pytest.raises(OSError, match="away"):
        patch.setattr(PosixStore, "remove_dir", fails)
        leader.remove_old(0, record, Position(3, MERGE), names)
    assert left(tmp_path) == {"iter-000002.node-0000.done", "iter-000003.node-0000.done"}
    leader.remove_old(0, record, Position(3, MERGE), names)
    assert left(tmp_path) == {"iter-000003.node-0000.done"}


def test_facts_stay_until_the_next_iteration_has_said_what_was_decided(tmp_path: Path) -> None:
    """A session of updates alone begins with a transient row. The first row after it tells what was decided before."""
    leader, record = removal(tmp_path, 1, start=(1, PROBE), choices={"rl_phase": "update"})
    leader.open(record, 2)
    publish(tmp_path, 1, 2, PROBE, 0)
    names = publish(tmp_path, 1, 3, PROBE, 0)
    leader.remove_old(0, record, Position(3, PROBE), names)
    assert RunPaths(tmp_path).open(1, 2).is_dir()
    leader.remove_old(0, record, Position(3, CLOSE), [])
    assert not RunPaths(tmp_path).open(1, 2).exists()


def test_what_older_generations_left_goes_too(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        publish(tmp_path, number, 1, OPEN, 0, 1, 2)
        lots = RunPaths(tmp_path).claims(number, 1, "train")
        PosixStore().make_dir(lots)
        for lot in range(2 * AT_ONCE):
            (lots / f"lot-0000-{lot:06d}").touch()
    leader, record = removal(tmp_path, 4)
    leader.remove_old(0, record, Position(1, OPEN), [])
    assert RunPaths(tmp_path).facts_of(1).is_dir(), "a generation that has done no iteration removes nothing"
    for phase in range(5):
        leader.remove_old(0, record, Position(2, phase), [])
    folders = {path.name for path in RunPaths(tmp_path).coordination.iterdir()}
    assert folders == {"gen-000003"}


def test_a_follower_removes_nothing_but_its_own(tmp_path: Path) -> None:
    publish(tmp_path, 1, 1, MERGE, 0, 1, 2)
    names = publish(tmp_path, 1, 2, MERGE, 0, 1, 2)
    follower, record = removal(tmp_path, 1)
    follower.remove_old(1, record, Position(2, MERGE), names)
    assert left(tmp_path) == {
        *(f"iter-000001.node-{rank:04d}.done" for rank in (0, 2)),
        *(f"iter-000002.node-{rank:04d}.done" for rank in (0, 1, 2)),
    }


def test_the_store_asks_the_server_and_removes_what_killed_processes_left(tmp_path: Path) -> None:
    store, folder = PosixStore(), tmp_path / "a" / "b"
    assert not store.is_there_now(folder)
    store.make_dir(folder, durable=True)
    assert store.is_there_now(folder) and list(folder.iterdir()) == []
    files.temporary_beside(folder / "record").touch()
    store.remove_dir(folder)
    store.remove_dir(folder)
    store.remove(folder / "record")
    assert not folder.exists()


def test_a_folder_is_there_if_the_server_says_so_and_no_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed, remembered = tmp_path / "open-000003", os.stat(tmp_path)
    with monkeypatch.context() as patched:
        for lookup in ("stat", "lstat"):
            patched.setattr(os, lookup, lambda *_, **__: remembered)
        assert not PosixStore().is_there_now(removed)
