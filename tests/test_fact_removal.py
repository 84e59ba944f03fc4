"""Old facts are removed, and nobody misses them: what lies in the directory does not grow with the iterations (I9)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from core_builders import ASSIGN, CLOSE, MERGE, OPEN, PROBE, PUBLISH, RULES, decided, generation

from fsbarrier.coordination.group.collective import Collective, CollectiveWork
from fsbarrier.coordination.group.member import make_member
from fsbarrier.coordination.loop import NodeLoop
from fsbarrier.coordination.observer import Observer
from fsbarrier.coordination.own_facts import AT_ONCE, OwnFacts
from fsbarrier.coordination.poll_intervals import PollIntervals
from fsbarrier.coordination.resume import LastGeneration
from fsbarrier.coordination.row_watch import RowWatch
from fsbarrier.program import PHASE_NAMES, Phase, Program
from fsbarrier.protocol.facts import SEALED, Fact, Join, Position, Record
from fsbarrier.protocol.membership import Limits
from fsbarrier.protocol.state import Entered, Rules
from fsbarrier.rundir.names import FACT
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.record_store import PosixStore
from fsbarrier.sim.scenario import play

PING = Rules(Program("ping", tuple(Phase(index, name) for index, name in enumerate(PHASE_NAMES))), 2)


def run_two_nodes(folder: Path, iterations: int, rules: Rules = PING) -> list[str]:
    """All names below coordination/ after so many iterations of two nodes."""
    paths, store = RunPaths(folder), PosixStore()

    def start(rank: int) -> NodeLoop:
        observer = Observer(store, paths, rules.table, PollIntervals(0.0, 0.0))
        join = Join(rank, 0, f"host{rank}", rank, "boot", until=iterations, time=str(rank))
        loop = NodeLoop(store, observer, rules, CollectiveWork(), join, lambda event, node, fields: None)
        observer.prepare()
        loop.start(0.0)
        return loop

    loops, now = [start(0), start(1)], 0.0
    while any(loop.exit is None for loop in loops):
        now += 0.1
        for loop in [loop for loop in loops if loop.exit is None]:
            loop.write_beat(loop.beat(), now)
            loop.tick(now)
    return sorted(str(path.relative_to(paths.coordination)) for path in paths.coordination.rglob("*"))


def test_a_long_run_leaves_no_more_than_a_short_one(tmp_path: Path) -> None:
    """Generations of two iterations: the leader's facts of this one and the one before, and the members' last ones."""
    short, long = (run_two_nodes(tmp_path / str(count), count, replace(PING, longest=2)) for count in (7, 13))
    facts = [
        [Path(name).name for name in names if "p05-" in name and "iter-" in name] for names in (short, long)
    ]
    assert len(facts[0]) == len(facts[1])
    last = {f"iter-{n:06d}.node-0000.done" for n in (11, 12, 13)} | {"iter-000013.node-0001.done"}
    assert last <= set(facts[1]) <= last | {"iter-000012.node-0001.done"}
    assert sum(name.startswith("generations/") for name in long) == 7


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
    member.begin(0.0)
    assert member.look(0.1)
    generation = member.generation
    assert generation is not None
    for number in range(1, 5):
        member.work.asked = Collective(generation, Position(number, 0), "barrier()", None, ())
        member.look(float(number))
        assert member.outcome(member.work.asked) == ()
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


def test_a_start_with_listings_far_behind_seals_no_row_that_was_passed(tmp_path: Path) -> None:
    """Its listings end in iteration 3. It finds the names of the leader's facts taken, and looks again from there."""

    class Old(PosixStore):
        def names(self, directory: Path) -> list[str]:
            fresh = super().names(directory)
            return [name for name in fresh if "iter-00000" not in name or name[:11] <= "iter-000003"]

    run_two_nodes(tmp_path, 4)
    paths, seal = RunPaths(tmp_path), Fact(1, 2, SEALED)
    observer = Observer(Old(), paths, PING.table)
    observer.prepare()
    for path in paths.beats.iterdir():
        path.unlink()
    last, looks = LastGeneration(observer), 1
    while (found := last.resume_point(PING, 1.0, seal)) is None:
        looks += 1
    assert looks > 3 and found.position == Position(4, 13), (
        "the last row is repeated, whose facts it does not list"
    )
    assert seal not in [PosixStore().read(path, Fact) for path in paths.facts_of(1).rglob("iter-*")]


def test_of_each_row_the_last_two_decisions_are_found_however_long_ago_they_were(tmp_path: Path) -> None:
    """A result may be empty, as that of an evaluation that was not due."""
    paths, record = RunPaths(tmp_path), generation(1, decisions={"merge": decided(0, {"n": 0})})
    store, observer = PosixStore(), Observer(PosixStore(), paths, RULES.table)
    observer.prepare()
    store.create(paths.generation(1), record)
    values = {
        ASSIGN: {5: {"a": 5}, 6: {"a": 6}},
        MERGE: {2: {"n": 2}},
        PUBLISH: {1: {"v": 1}, 3: {"v": 3}, 4: {"v": 4}},
    }
    for phase, row in enumerate(RULES.table.rows):
        store.make_dir(paths.phase(1, phase, row.name))
        for iteration in range(1, 7 if phase < PROBE else 6):
            value = values.get(phase, {}).get(iteration, {})
            for rank in record.ranks:
                path = paths.phase(1, phase, row.name) / FACT.build(iteration, rank, "done")
                store.put(path, Fact(rank, 1, "done", value if rank == 0 else {}))
    observer.prepare()
    found = LastGeneration(observer).resume_point(RULES, 1.0)
    assert found is not None and found.position == Position(6, PROBE)
    assert found.decisions == {
        "assign": decided(6, {"a": 6}, (5, {"a": 5})),
        "merge": decided(2, {"n": 2}, (0, {"n": 0})),
        "publish": decided(4, {"v": 4}, (3, {"v": 3})),
    }


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


def publish(folder: Path, number: int, iteration: int, phase: int, *ranks: int) -> list[str]:
    row = RULES.table.rows[phase]
    directory = RunPaths(folder).phase(number, row.index, row.name)
    PosixStore().make_dir(directory)
    for rank in ranks:
        PosixStore().put(directory / FACT.build(iteration, rank, "done"), Fact(rank, 1, "done"))
    return PosixStore().names(directory)


def test_what_older_generations_left_goes_too(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        publish(tmp_path, number, 1, OPEN, 0, 1, 2)
        lots = RunPaths(tmp_path).claims(number, 1, "train")
        PosixStore().make_dir(lots)
        for lot in range(2 * AT_ONCE):
            (lots / f"lot-0000-{lot:06d}").touch()
    leader, record = (
        OwnFacts(PosixStore(), RowWatch(PosixStore(), RunPaths(tmp_path), RULES.table), RULES),
        generation(4),
    )

    def pass_rows(iteration: int, *phases: int) -> None:
        for phase in phases:
            leader.enter(Entered(Position(iteration, phase), record))
            leader.clean_up(0)

    pass_rows(1, *range(CLOSE + 1))
    assert RunPaths(tmp_path).facts_of(1).is_dir(), "a generation that has done no iteration removes nothing"
    pass_rows(2, *range(CLOSE))
    folders = {path.name for path in RunPaths(tmp_path).coordination.iterdir()}
    assert folders == {"gen-000003", "gen-000004"}
