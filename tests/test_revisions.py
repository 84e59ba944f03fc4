"""Settings that a later start of node 0 changes: what is refused, what holds in which iteration, and three daemons of which one is down."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from cluster import FAST, Cluster

from fsbarrier.errors import Fenced, UsageError
from fsbarrier.loader import load_program
from fsbarrier.node.context_maker import ContextMaker
from fsbarrier.node.loop import LookAgain, NodeLoop
from fsbarrier.node.observer import Observer
from fsbarrier.node.run_rules import make_rules
from fsbarrier.node.work_runner import WorkRunner
from fsbarrier.protocol.facts import Generation, Join, Member, Position, Revision
from fsbarrier.protocol.state import Announce, Node, Propose, Rules
from fsbarrier.rundir import revisions
from fsbarrier.rundir.names import SPLITS
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.record_store import PosixStore
from fsbarrier.rundir.revisions import newest_revisions, present, settings_in
from fsbarrier.rundir.runrecord import RunRecord
from fsbarrier.rundir.stop_requests import request_stop
from fsbarrier.settings.resolve import known_names
from fsbarrier.settings.section import Changes
from fsbarrier.settings.sections import Settings, changes_of, fixed_because
from fsbarrier.settings.sources import from_words
from fsbarrier.start.begin import Request, Start
from fsbarrier.start.begin import begin as begin_request
from fsbarrier.trajectories import load
from fsbarrier.view.report import page
from fsbarrier.view.run_status import look_once

FIRST = Revision(
    2, 3, {"optimizer.lr": 2e-6, "rollout.concurrency": 8}, {"optimizer.lr": 1e-6, "rollout.concurrency": 64}
)
SECOND = Revision(4, 2, {"optimizer.lr": 5e-6}, {"optimizer.lr": 2e-6})


def start(log_path: Path, *words: str, **who: Any) -> Start:
    chosen = from_words([f"log_path={log_path}", *words], known_names())
    return begin_request(Request(**{"chosen": tuple(chosen), "environ": {}, **who}))


def record(log_path: Path, number: int, *revisions: Revision) -> Path:
    """A generation with these revisions, as the nodes of a run record it."""
    paths = RunPaths(log_path)
    paths.generations.mkdir(parents=True, exist_ok=True)
    made = Generation(number, (Member(0, number),), 0, Position(1, 0), "start", revisions=revisions)
    assert PosixStore().create(paths.generation(number), made)
    return paths.generation(number)


# --- what holds when ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("revisions", "iteration", "lr", "concurrency"),
    [
        ((), 9, 1e-6, 64),
        ((FIRST,), 2, 1e-6, 8),
        ((FIRST,), 3, 2e-6, 8),
        # The run was taken back, and changed again: what was asked for last holds.
        ((FIRST, SECOND), 1, 1e-6, 8),
        ((FIRST, SECOND), 2, 5e-6, 8),
        ((FIRST, SECOND), 3, 5e-6, 8),
    ],
)
def test_an_iteration_has_the_settings_of_its_beginning(
    revisions: tuple[Revision, ...], iteration: int, lr: float, concurrency: int
) -> None:
    found = settings_in(Settings(), revisions, iteration)
    assert (found.optimizer.lr, found.rollout.concurrency) == (lr, concurrency)


def test_work_has_the_settings_and_the_choices_of_its_own_generation(tmp_path: Path) -> None:
    """Not of the newest one, which this node may have read while its work began."""
    made = RunRecord("run", "", "", "", Settings(program="ping"), "")
    program, nothing = load_program("ping"), lambda *_: ""
    observer = Observer(PosixStore(), made.paths, program)
    context = ContextMaker(
        made, program, observer, lambda *_: (), nothing, accelerators=0, cpus=1, kept_in=nothing
    )
    observer.registry.learn_join(Join(0, 1, "host", 1, "boot"))
    old = Generation(
        1, (Member(0, 1),), 0, Position(3, 0), "start", revisions=(FIRST,), choices={"rl_phase": "update"}
    )
    observer.registry.learn(replace(old, number=2, revisions=(FIRST, SECOND)))
    node = Node(0, 1, 0.0, generation=old, position=Position(3, 0))
    found = context(node).settings
    assert (found.optimizer.lr, found.rl_phase) == (2e-6, "update")


def test_a_record_names_no_program_and_no_setting_that_there_is_not(tmp_path: Path) -> None:
    forged = Revision(
        2, 1, {"trainer.command": "evil", "custom.x": 1, "later.name": 1, "optimizer.lr": 2e-6}, {}
    )
    expected = Settings().with_values({"optimizer.lr": 2e-6})
    assert settings_in(Settings(), (forged,), 1) == expected
    assert present(Settings(), (forged,)) == expected


IMPOSSIBLE: list[dict[str, object]] = [
    {"num_nodes": "x"},
    {"num_nodes": 10**30},
    {"rank_weights": 5},
    {"optimizer.lr": float("nan")},
    {"optimizer.lr": "1e-6"},
    {"rollout.tasks": -5},
    {"rollout.tasks": None},
    {"rollout.tasks": [1]},
    {"eval_interval": True},
]


@pytest.mark.parametrize("values", IMPOSSIBLE, ids=str)
def test_what_asks_for_values_that_no_start_could_choose_counts_as_unreadable(
    tmp_path: Path, values: dict[str, object]
) -> None:
    paths, store = RunPaths(tmp_path), PosixStore()
    observer = Observer(
        store, paths, load_program("ping"), can_hold=partial(revisions.can_hold, Settings(num_nodes=3))
    )
    record(tmp_path, 9, FIRST)
    observer.prepare()
    store.create(paths.join(0, 1), Join(0, 1, "host", 1, "boot", stated={"optimizer.lr": 2e-6}))
    store.create(paths.join(0, 2), Join(0, 2, "host", 1, "boot", stated=values))
    store.create(paths.join(1, 1), Join(1, 1, "host", 1, "boot", choices={"no choice": 1}))
    record(tmp_path, 10, FIRST, Revision(10, 1, values, {}))
    me = Node(2, 1, 0.0)
    assert observer.view(me, 0.0).unreadable is not None
    assert observer.newest is not None and observer.newest.number == 9
    assert {join.rank: join.incarnation for join in observer.joins.values()} == {0: 1}
    # A setting that this version does not know, or that never changes, is nothing of that kind.
    store.create(paths.join(0, 3), Join(0, 3, "host", 1, "boot", stated={"later.name": 1, "model": 5}))
    observer.hurry()
    observer.view(me, 1.0)
    assert observer.joins[0].incarnation == 3


def test_every_setting_says_whether_it_changes_and_why_not() -> None:
    for name in known_names():
        assert changes_of(name) is not Changes.NEVER or fixed_because(name), name
    assert changes_of("optimizer.lr") is Changes.NEXT_ITERATION
    assert changes_of("checkpoint.keep") is Changes.AT_ONCE
    assert changes_of("model") is changes_of("algorithm.loss") is changes_of("custom.x") is Changes.NEVER


def test_what_the_newest_record_that_can_be_read_says(tmp_path: Path) -> None:
    assert newest_revisions(RunPaths(tmp_path)) == ()
    record(tmp_path, 9, FIRST)
    newest = record(tmp_path, 10, FIRST, SECOND)
    assert newest_revisions(RunPaths(tmp_path)) == (FIRST, SECOND)
    newest.write_bytes(newest.read_bytes()[:-9])
    assert newest_revisions(RunPaths(tmp_path)) == (FIRST,)


# --- what a start may say -------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Path:
    start(tmp_path / "run", "program=ping", "num_nodes=3", "optimizer.lr=1", master=True)
    return tmp_path / "run"


def test_node_0_changes_a_setting_and_states_what_it_repeats(run: Path) -> None:
    said: list[str] = []
    chosen = from_words([f"log_path={run}", "optimizer.lr=2", "rollout.tasks=96"], known_names())
    found = begin_request(Request(tuple(chosen), {}, master=True), said.append)
    assert found.stated == {"optimizer.lr": 2.0, "rollout.tasks": 96}
    assert (found.settings.optimizer.lr, found.record.settings.optimizer.lr) == (2.0, 1.0)
    assert said == ["optimizer.lr changes with the next iteration from 1 to 2"]


def test_what_was_changed_holds_for_starts_that_do_not_repeat_it(run: Path) -> None:
    record(run, 1, Revision(1, 4, {"optimizer.lr": 2.0}, {"optimizer.lr": 1.0}))
    for who in ({"master": True}, {"worker": 2}):
        found = start(run, **who)
        assert (found.settings.optimizer.lr, found.stated) == (2.0, {})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["optimizer.betas=0.8,0.9"],
            "because the saved optimizer state depends on it",
        ),
        (["algorithm.loss=gspo"], "algorithm.loss=gspo contradicts this run's record (grpo, from "),
        (["program=toy"], "because what the run has made so far depends on it"),
        (
            ["coordination.dead_s=99"],
            "it cannot change, because all nodes must use the same failure-detection timeouts",
        ),
        (["optimizer.lr=-1"], "optimizer.lr: must be greater than 0"),
        (["num_nodes=2", "rank_weights=1,2,3"], "rank_weights=1,2,3: 3 weights for 2 nodes"),
        (["update.recency=2", "rollout.temperature=0.5"], "cannot change while update.recency is above 1"),
    ],
)
def test_what_is_not_safe_is_refused_with_the_reason(run: Path, words: list[str], message: str) -> None:
    for who in ({"master": True}, {"worker": 1}) if "contradicts" in message else ({"master": True},):
        with pytest.raises(UsageError) as caught:
            start(run, *words, **who)
        assert message in str(caught.value)


@pytest.fixture
def with_sets(tmp_path: Path) -> Path:
    words = ("eval.sets.aime.samples=8", "eval.sets.gsm.file=test.jsonl")
    start(tmp_path / "run", "program=ping", *words, master=True)
    return tmp_path / "run"


def test_a_set_of_held_out_tasks_changes_in_all_but_its_file(with_sets: Path) -> None:
    words = ("eval.sets.aime.samples=16", "eval.sets.gsm.tasks=50", "eval.sets.gsm.file=test.jsonl")
    found = start(with_sets, *words, master=True)
    assert found.stated == {"eval.sets.aime.samples": 16, "eval.sets.gsm.tasks": 50}
    assert {name: (one.samples, one.tasks) for name, one in found.settings.eval_sets.items()} == {
        "aime": (16, 0),
        "gsm": (1, 50),
    }
    # From the next iteration on; the other set stays as it is, and so does what nobody has named.
    changed = Revision(2, 5, {"eval.sets.aime.samples": 16}, {"eval.sets.aime.samples": 8})
    recorded = found.record.settings
    assert settings_in(recorded, (changed,), 4) == recorded
    assert settings_in(recorded, (changed,), 5).eval.sets["aime"].samples == 16
    assert settings_in(recorded, (changed,), 5).eval.sets["gsm"] == recorded.eval.sets["gsm"]
    # Whoever decides of revisions knows each value by its name.
    record(with_sets, 1, changed)
    assert start(with_sets, "eval.sets.aime.samples=8", master=True).stated == {"eval.sets.aime.samples": 8}
    # A table says the same, and an empty one that there is such a set.
    table = start(with_sets, "eval.sets.aime={samples=8}", "eval.sets.gsm={}", master=True)
    assert table.stated == {"eval.sets.aime.samples": 8}
    assert make_rules(recorded, load_program("ping")).settings["eval.sets.aime.samples"] == 8


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["eval.sets.gsm.file=other.jsonl"],
            "cannot change, because the run's record names the sets and their task",
        ),
        (
            ["eval.sets.math.samples=4"],
            "this run has no set math (its sets are aime, gsm), and sets cannot be added",
        ),
        (["eval.sets.math.file=math.jsonl"], "begin another run from this one's policy (init_from="),
        (["eval.sets.aime.samples=0"], "eval.sets.aime.samples: must be 1 or more"),
    ],
)
def test_what_is_not_safe_with_a_set_is_refused_with_the_reason(
    with_sets: Path, words: list[str], message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        start(with_sets, *words, master=True)
    assert message in str(caught.value)


def test_a_record_that_names_a_set_that_there_is_not_changes_nothing(with_sets: Path) -> None:
    settings = start(with_sets, master=True).settings
    forged = Revision(2, 1, {"eval.sets.math.samples": 4, "eval.sets.aime.file": "evil"}, {})
    assert settings_in(settings, (forged,), 1) == settings


def test_the_number_of_nodes_changes_with_their_weights(run: Path) -> None:
    found = start(run, "num_nodes=4", master=True)
    assert found.stated == {"num_nodes": 4, "rank_weights": [1.0] * 4}
    assert found.settings.rank_weights == (1.0,) * 4
    # It may come before node 0 has changed the number.
    assert start(run, worker=3).node_rank == 3
    assert start(run, "num_nodes=4", worker=3).stated == {"num_nodes": 4}
    record(run, 1, Revision(1, 1, found.stated, {"num_nodes": 3, "rank_weights": [1.0] * 3}))
    assert start(run, worker=3).settings.num_nodes == 4


def test_a_node_that_comes_back_by_itself_asks_for_nothing_again(tmp_path: Path) -> None:
    """Its command line was taken in with its first start, and the run may have been changed since."""
    store, paths, program = PosixStore(), RunPaths(tmp_path), load_program("ping")
    observer = Observer(store, paths, program)
    observer.prepare()
    join = Join(2, 0, "host", 1, "boot", stated={"optimizer.lr": 2.0})
    # Joining starts no work.
    work = cast(WorkRunner, None)
    node = NodeLoop(store, observer, Rules(program, 3), work, join, lambda event, node, fields: None)
    node.start(0.0)
    node._perform(Announce(2), 0.0)
    stated = [found.stated for n in (1, 2) if (found := store.read(paths.join(2, n), Join)) is not None]
    assert stated == [{"optimizer.lr": 2.0}, {}]


def test_a_node_that_comes_back_and_finds_its_next_start_taken_ends(tmp_path: Path) -> None:
    store, paths, program = PosixStore(), RunPaths(tmp_path), load_program("ping")
    observer = Observer(store, paths, program)
    observer.prepare()
    work = cast(WorkRunner, None)
    here = Join(2, 0, "host", 1, "boot")
    node = NodeLoop(store, observer, Rules(program, 3), work, here, lambda event, node, fields: None)
    node.start(0.0)
    store.create(paths.join(2, 2), Join(2, 2, "elsewhere", 1, "boot"))
    with pytest.raises(Fenced, match="another process took this rank"):
        node._perform(Announce(2), 0.0)


def test_whoever_finds_its_generation_recorded_by_another_follows_no_impossible_one(tmp_path: Path) -> None:
    """It may be recorded between a node's look and its own proposal."""
    store, paths, program = PosixStore(), RunPaths(tmp_path), load_program("ping")
    observer = Observer(store, paths, program, can_hold=partial(revisions.can_hold, Settings(num_nodes=3)))
    observer.prepare()
    work = cast(WorkRunner, None)
    here = Join(2, 0, "host", 1, "boot")
    node = NodeLoop(store, observer, Rules(program, 3), work, here, lambda event, node, fields: None)
    mine = Generation(1, (Member(2, 1),), 2, Position(1, 0), "start")
    record(tmp_path, 1, Revision(1, 1, {"rollout.tasks": -5}, {}))
    assert node._perform(Propose(mine), 0.0) is LookAgain.LATER and observer.newest is None
    record(tmp_path, 2, FIRST)
    assert node._perform(Propose(replace(mine, number=2)), 0.0) is LookAgain.NOW
    assert observer.newest is not None and observer.newest.number == 2


# --- three daemons --------------------------------------------------------------------------------------------------------------


def tasks_of(log_path: Path, iteration: int) -> int:
    return len(load(RunPaths(log_path).merged(SPLITS[0], iteration))["trajectories"])


@pytest.mark.timeout(900)
def test_a_change_reaches_a_node_that_was_down(tmp_path: Path) -> None:
    with Cluster(tmp_path, 3, *FAST, "coordination.dead_s=4") as cluster:
        cluster.start()
        cluster.wait_for(lambda e: e["event"] == "iteration_finished", deadline_s=250)
        cluster.kill(2)
        cluster.kill(0)
        cluster.flags = (*cluster.flags, "toy.tasks=6")
        cluster.start(0)
        changed = cluster.wait_for(
            lambda e: e["event"] == "settings_changed" and e["node_rank"] == 1, deadline_s=250
        )
        since, generation = changed["from_iteration"], changed["generation"]
        assert (changed["values"], changed["before"]) == ({"toy.tasks": 6}, {"toy.tasks": 24})
        # A worker that says what held before is refused, and one that says nothing follows.
        refused = Cluster(tmp_path, 3, *FAST)
        with refused:
            refused.start_as(2, "--worker", "2", "toy.tasks=24")
            assert refused.wait(deadline_s=250) == {2: 2}
        assert "toy.tasks=24 contradicts this run's settings (6)" in refused.said(2)
        cluster.start(2)
        done_here = ("phase_finished", 2, "train_rollout")
        back = cluster.wait_for(
            lambda e: (
                (e["event"], e["node_rank"], e["phase_name"]) == done_here and e["generation"] > generation
            ),
            deadline_s=250,
        )
        cluster.wait_for(
            lambda e: e["event"] == "iteration_finished" and e["iteration"] > back["iteration"],
            deadline_s=250,
        )
        request_stop(cluster.log_path, now=False)
        assert cluster.wait(deadline_s=250) == {0: 0, 1: 0, 2: 0}
        done = max(e["iteration"] for e in cluster.events() if e["event"] == "iteration_finished")
        assert {i: tasks_of(cluster.log_path, i) for i in range(1, done + 1)} == {
            i: 24 if i < since else 6 for i in range(1, done + 1)
        }
    reader, status = look_once(cluster.log_path)
    assert f"iteration {since}: toy.tasks 24 → 6" in page(reader, status)
