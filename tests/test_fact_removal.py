"""Old facts are removed, and nobody misses them: what lies in the directory does not grow with the iterations (I9)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from core_builders import ASSIGN, CLOSE, MERGE, OPEN, PROBE, PUBLISH, RULES, decided, generation
from node_loops import NO_PAUSES, PING, node_loop, observer, settle
from sim.scenario import play

from fsbarrier.coordination.own_facts import AT_ONCE, OwnFacts
from fsbarrier.coordination.resume import LastGeneration
from fsbarrier.coordination.row_watch import RowWatch
from fsbarrier.group.collective import Collective
from fsbarrier.group.member import make_member
from fsbarrier.loader import load_program
from fsbarrier.program import PHASE_NAMES, RL_SLICES, Program
from fsbarrier.protocol.facts import SEALED, Fact, Generation, Join, Member, Position, Record
from fsbarrier.protocol.membership import Limits
from fsbarrier.protocol.state import Entered, Node, ResumePoint, Role, RowPart, Rules, Stage
from fsbarrier.rundir.names import FACT
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.record_store import PosixStore

PING_RULES = Rules(PING, 2)


def run_two_nodes(folder: Path, iterations: int, rules: Rules = PING_RULES) -> list[str]:
    """All names below coordination/ after so many iterations of two nodes."""
    seen = [observer(folder, intervals=NO_PAUSES) for _ in range(2)]
    loops = [node_loop(one, rank, rules, until=iterations) for rank, one in enumerate(seen)]
    paths, now = RunPaths(folder), 0.0
    while any(loop.exit is None for loop in loops):
        now += 0.1
        for loop in [loop for loop in loops if loop.exit is None]:
            loop.write_beat(loop.beat(), now)
            settle(loop.tick, now)
    return sorted(str(path.relative_to(paths.coordination)) for path in paths.coordination.rglob("*"))


def test_a_long_run_leaves_no_more_than_a_short_one(tmp_path: Path) -> None:
    """Generations of two iterations: the leader's facts of this one and the one before, and the members' last ones."""
    short, long = (
        run_two_nodes(tmp_path / str(count), count, replace(PING_RULES, longest=2)) for count in (8, 14)
    )
    facts = [
        [Path(name).name for name in names if "p05-" in name and "iter-" in name] for names in (short, long)
    ]
    assert len(facts[0]) == len(facts[1])
    last = {f"iter-{n:06d}.node-0000.done" for n in (11, 12, 13, 14)} | {"iter-000014.node-0001.done"}
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
    settle(member.tick, 0.1)
    generation = member.generation
    assert generation is not None
    for number in range(1, 5):
        member.work.asked = Collective(generation, Position(number, 0), "barrier()", None, ())
        settle(member.tick, float(number))
        assert member.outcome(member.work.asked) == ()
    assert done == [f"made iter-{n:06d}" for n in (1, 2, 3, 4)] + ["removed iter-000001"]


def test_a_run_goes_on_from_what_is_left(tmp_path: Path) -> None:
    run_two_nodes(tmp_path, 5)
    found = LastGeneration(observer(tmp_path)).resume_point(PING_RULES, 1.0, Fact(1, 2, SEALED))
    assert found is not None and found.position == Position(6, 0)


def test_a_start_with_listings_far_behind_seals_no_row_that_was_passed(tmp_path: Path) -> None:
    """Its listings end in iteration 3. It finds the names of the leader's facts taken, and looks again from there."""

    class Old(PosixStore):
        def names(self, directory: Path) -> list[str]:
            fresh = super().names(directory)
            return [name for name in fresh if "iter-00000" not in name or name[:11] <= "iter-000003"]

    run_two_nodes(tmp_path, 4)
    paths, seal = RunPaths(tmp_path), Fact(1, 2, SEALED)
    behind = observer(tmp_path, Old())
    for path in paths.beats.iterdir():
        path.unlink()
    last, looks = LastGeneration(behind), 1
    while (found := last.resume_point(PING_RULES, 1.0, seal)) is None:
        looks += 1
    assert looks > 3 and found.position == Position(4, 13), (
        "the last row is repeated, whose facts it does not list"
    )
    assert seal not in [PosixStore().read(path, Fact) for path in paths.facts_of(1).rglob("iter-*")]


def test_of_each_row_the_last_two_decisions_are_found_however_long_ago_they_were(tmp_path: Path) -> None:
    """A result may be empty, as that of an evaluation that was not due."""
    paths, record = RunPaths(tmp_path), generation(1, decisions={"merge": decided(0, {"n": 0})})
    store, seen = PosixStore(), observer(tmp_path, table=RULES.table)
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
    seen.prepare()
    found = LastGeneration(seen).resume_point(RULES, 1.0)
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


# --- where a run is taken up again: what old listings hide is found all the same, and the generation before goes no further (I3) ----

RULES_OF_RL = Rules(Program("ping", PING.rows, RL_SLICES), 2)
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

    def __init__(self, folder: Path, store: PosixStore, rules: Rules = RULES_OF_RL, **more: Any) -> None:
        self.rules, self.observer = rules, observer(folder, store, rules.table)
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
        while (found := last.resume_point(self.rules, 1.0, seal)) is None:
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


def test_an_update_that_those_who_train_had_finished_is_not_begun_again(tmp_path: Path) -> None:
    """I4. The next session publishes it by the name in the last decision. A seal in place of the leader's fact does not count as one."""
    for number, (trains, done, goes_on_at) in enumerate(
        (({1}, (1,), 11), ({1}, (), 7), ({0, 1}, (1,), 7), ({0, 1}, (0, 1), 11))
    ):
        roles = [Role("placement.update", frozenset(trains))]
        rules = Rules(load_program("rl"), 2, roles_of=lambda settings, roles=roles: roles)
        left = Left(tmp_path / str(number), PosixStore(), rules)
        for phase in range(10):
            left.publish(phase, 0, 1)
        left.publish(10, *done)
        assert left.resume_point().position == Position(1, goes_on_at), (trains, done)


def test_while_others_train_a_node_knows_a_seal_from_the_leaders_fact(tmp_path: Path) -> None:
    """Both have one name, and only one of them means that the leader is done. Elsewhere it is read once all are done."""
    left = Left(tmp_path, PosixStore(), Rules(load_program("rl"), 2))
    watch, generation = left.observer.row, left.observer.newest
    assert generation is not None
    for phase, known in ((9, None), (10, SEAL)):
        directory = watch.row_dir(1, Position(1, phase))
        left.observer.store.make_dir(directory)
        left.observer.store.create(directory / FACT.build(1, 0, "done"), SEAL)
        works = Node(1, 1, 0.0, stage=Stage.RUNNING, generation=generation, part=RowPart.EACH)
        watch.read(replace(works, position=Position(1, phase)))
        assert watch.listing.leaders_fact == known


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
    paths, passed = RunPaths(tmp_path), list[tuple[int, Position]]()

    def record(event: str, node: Any, fields: Any) -> None:
        if event == "phase_finished":
            passed.append((node.generation.number, node.position))

    seen = [observer(tmp_path, table=RULES_OF_RL.table, intervals=NO_PAUSES) for _ in range(2)]
    loops = [node_loop(one, rank, RULES_OF_RL, tell=record, until=1) for rank, one in enumerate(seen)]
    sealed = Position(9, 9)
    for tenths in range(300):
        for loop in [loop for loop in loops if loop.exit is None]:
            loop.write_beat(loop.beat(), tenths / 10)
            settle(loop.tick, tenths / 10)
        if sealed.iteration == 9 and len(passed) > 6:
            intruder = observer(tmp_path, table=RULES_OF_RL.table)
            LastGeneration(intruder).resume_point(RULES_OF_RL, 0.0, SEAL)
            names = [name for name in PHASE_NAMES if (found := _seal_in(paths, name)) is not None and found]
            sealed = Position(1, PHASE_NAMES.index(names[0]))
    assert [loop.exit.code for loop in loops if loop.exit is not None] == [0, 0]
    assert max(place for number, place in passed if number == 1) < sealed
    assert min(place for number, place in passed if number == 2) == sealed
    assert max(number for number, _ in passed) == 2


def _seal_in(paths: RunPaths, name: str) -> bool:
    path = paths.phase(1, PHASE_NAMES.index(name), name) / FACT.build(1, 0, "done")
    return path.exists() and b'"status":"sealed"' in path.read_bytes()
