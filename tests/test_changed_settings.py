"""What changes between the starts of a run: settings, and code of the user's own."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cluster import FAST, Cluster
from node_loops import node_loop, observer

from fsbarrier.cli.start.begin import Request, Start
from fsbarrier.cli.start.begin import begin as begin_request
from fsbarrier.cli.start.node_checks import try_user_code
from fsbarrier.coordination.loop import LookAgain
from fsbarrier.coordination.observer import Observer
from fsbarrier.errors import Fenced, UsageError
from fsbarrier.loader import load_program
from fsbarrier.protocol.facts import Generation, Join, Member, Payload, Position
from fsbarrier.protocol.state import Announce, Node, Propose
from fsbarrier.run.fingerprint import code_digests, one_digest
from fsbarrier.run.job import Workplace
from fsbarrier.run.job_runner import ContextMaker
from fsbarrier.rundir.names import SPLITS
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.rundir.record_store import PosixStore
from fsbarrier.rundir.runrecord import RunRecord
from fsbarrier.rundir.session_settings import can_hold, in_force
from fsbarrier.settings.resolve import resolve
from fsbarrier.settings.sections import Settings, known_names
from fsbarrier.settings.sources import ChosenValue, from_words
from fsbarrier.trajectories import load

LOWER = {"optimizer.lr": 2e-6, "rollout.concurrency": 8}


def start(log_path: Path, *words: str, **who: Any) -> Start:
    chosen = from_words([f"log_path={log_path}", *words], known_names())
    return begin_request(Request(**{"chosen": tuple(chosen), "environ": {}, **who}))


def record(log_path: Path, number: int, settings: Payload) -> Path:
    """A generation with these settings, as the nodes of a run record it."""
    paths = RunPaths(log_path)
    paths.generations.mkdir(parents=True, exist_ok=True)
    made = Generation(number, (Member(0, number),), 0, Position(1, 0), "start", settings=settings)
    assert PosixStore().create(paths.generation(number), made)
    return paths.generation(number)


# --- what holds ---------------------------------------------------------------------------------------------------------------


def test_work_has_the_settings_and_the_choices_of_its_own_generation(tmp_path: Path) -> None:
    """Not of the newest one, which this node may have read while its work began."""
    made = RunRecord("run", "", "", "", Settings(program="ping"), "")
    program, here = load_program("ping"), Path()
    seen = Observer(PosixStore(), made.paths, program)
    place = Workplace(None, here, here, here, stall_timeout_s=60.0)
    context = ContextMaker(made, program, seen, place)
    seen.registry.learn_join(Join(0, 1, "host", 1, "boot"))
    old = Generation(
        1, (Member(0, 1),), 0, Position(3, 0), "start", settings=LOWER, choices={"rl_phase": "update"}
    )
    seen.registry.learn(replace(old, number=2, settings={"optimizer.lr": 5e-6}))
    node = Node(0, 1, 0.0, generation=old, position=Position(3, 0))
    found = context(node).settings
    assert (found.optimizer.lr, found.rl_phase) == (2e-6, "update")


def test_a_record_names_no_program_and_no_setting_that_there_is_not(tmp_path: Path) -> None:
    forged = {"trainer.command": "evil", "custom.x": 1, "later.name": 1, "optimizer.lr": 2e-6}
    assert in_force(Settings(), forged) == Settings().with_values({"optimizer.lr": 2e-6})


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
    record(tmp_path, 9, LOWER)
    seen = observer(tmp_path, can_hold=partial(can_hold, Settings(num_nodes=3)))
    store.create(paths.join(0, 1), Join(0, 1, "host", 1, "boot", stated={"optimizer.lr": 2e-6}))
    store.create(paths.join(0, 2), Join(0, 2, "host", 1, "boot", stated=values))
    store.create(paths.join(1, 1), Join(1, 1, "host", 1, "boot", choices={"no choice": 1}))
    me = Node(2, 1, 0.0)
    seen.view(me, 0.0)
    assert {join.rank: join.incarnation for join in seen.joins.values()} == {0: 1}
    # A setting that this version does not know, or that never changes, is nothing of that kind.
    store.create(paths.join(0, 3), Join(0, 3, "host", 1, "boot", stated={"later.name": 1, "model": 5}))
    seen.schedule.poll_now()
    seen.view(me, 1.0)
    assert seen.joins[0].incarnation == 3
    record(tmp_path, 10, values)
    seen.schedule.poll_now()
    with pytest.raises(OSError, match="cannot be read"):
        seen.view(me, 2.0)
    assert seen.newest is not None and seen.newest.number == 9


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
    assert said == ["optimizer.lr changes from 1 to 2 if this start begins a session"]


def test_what_was_changed_holds_for_starts_that_do_not_repeat_it(run: Path) -> None:
    record(run, 1, {"optimizer.lr": 2.0})
    for who in ({"master": True}, {"worker": 2}):
        found = start(run, **who)
        assert (found.settings.optimizer.lr, found.stated) == (2.0, {})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["optimizer.betas=0.8,0.9"], "it is fixed for the life of a run"),
        (["algorithm.loss=gspo"], "algorithm.loss=gspo contradicts this run's record (grpo, from "),
        (["program=toy"], "it is fixed for the life of a run"),
        (["coordination.dead_s=99"], "it is fixed for the life of a run"),
        (["optimizer.lr=-1"], "optimizer.lr: must be a number > 0"),
        (["num_nodes=2", "rank_weights=1,2,3"], "rank_weights=1,2,3: 3 weights for 2 nodes"),
        (["update.recency=2", "rollout.temperature=0.5"], "cannot change while update.recency is above 1"),
    ],
)
def test_what_is_not_safe_is_refused_with_the_reason(run: Path, words: list[str], message: str) -> None:
    for who in ({"master": True}, {"worker": 1}) if "contradicts" in message else ({"master": True},):
        with pytest.raises(UsageError) as caught:
            start(run, *words, **who)
        assert message in str(caught.value)


def test_the_number_of_nodes_changes_with_their_weights(run: Path) -> None:
    found = start(run, "num_nodes=4", master=True)
    assert found.stated == {"num_nodes": 4, "rank_weights": [1.0] * 4}
    assert found.settings.rank_weights == (1.0,) * 4
    # It may come before node 0 has changed the number.
    assert start(run, worker=3).node_rank == 3
    assert start(run, "num_nodes=4", worker=3).stated == {"num_nodes": 4}
    record(run, 1, found.stated)
    assert start(run, worker=3).settings.num_nodes == 4


def test_a_node_that_comes_back_and_finds_its_next_start_taken_ends(tmp_path: Path) -> None:
    node = node_loop(observer(tmp_path), 2)
    node.store.create(RunPaths(tmp_path).join(2, 2), Join(2, 2, "elsewhere", 1, "boot"))
    with pytest.raises(Fenced, match="another process took this rank"):
        node._perform(Announce(2), 0.0)


def test_whoever_finds_its_generation_recorded_by_another_follows_no_impossible_one(tmp_path: Path) -> None:
    """It may be recorded between a node's look and its own proposal."""
    seen = observer(tmp_path, can_hold=partial(can_hold, Settings(num_nodes=3)))
    node = node_loop(seen, 2)
    mine = Generation(1, (Member(2, 1),), 2, Position(1, 0), "start")
    record(tmp_path, 1, {"rollout.tasks": -5})
    assert node._perform(Propose(mine), 0.0) is LookAgain.LATER and seen.newest is None
    record(tmp_path, 2, LOWER)
    assert node._perform(Propose(replace(mine, number=2)), 0.0) is LookAgain.NOW
    assert seen.newest is not None and seen.newest.number == 2


# --- three daemons --------------------------------------------------------------------------------------------------------------


def tasks_of(log_path: Path, iteration: int) -> int:
    return len(load(RunPaths(log_path).merged(SPLITS[0], iteration))["trajectories"])


@pytest.mark.timeout(900)
def test_settings_change_when_all_nodes_are_started_again(tmp_path: Path) -> None:
    with Cluster(tmp_path, 3, "--rl-phase", "rollout", *FAST) as cluster:
        cluster.start()
        cluster.wait_for(lambda e: e["event"] == "iteration_finished")
        # While others are at work, other values are refused, also of node 0.
        cluster.kill(0)
        before, cluster.flags = cluster.flags, (*cluster.flags, "toy.tasks=6")
        cluster.start(0)
        assert cluster.wait(0) == {0: 2}
        assert "toy.tasks=6 contradicts this run's settings (24)" in cluster.said(0)
        cluster.flags = before
        cluster.start(0)
        # All that node 0's starts so far have left in the journal is not what is waited for: this start must be a member.
        cluster.beating(0, lambda beat: beat.state == "running" and beat.pid == cluster.processes[0].pid)
        cluster.stop()
        assert cluster.wait() == {0: 0, 1: 0, 2: 0}
        # A new session, the workers first, one of which names what node 0 will name.
        cluster.start(1)
        cluster.start_as(2, "--worker", "2", "toy.tasks=6")
        for rank in (1, 2):
            cluster.beating(rank, lambda beat: beat.state == "joining" and beat.counter > 10)
        cluster.flags = (*before, "toy.tasks=6")
        cluster.start(0)
        began = cluster.wait_for(lambda e: e["event"] == "generation_started" and "settings" in e)
        assert (began["settings"], began["members"]) == ({"toy.tasks": 6}, [0, 1, 2])
        cluster.wait_for(
            lambda e: e["event"] == "iteration_finished" and e["generation"] >= began["generation"],
        )
        cluster.stop()
        assert cluster.wait() == {0: 0, 1: 0, 2: 0}
        done = max(e["iteration"] for e in cluster.events() if e["event"] == "iteration_finished")
        since = began["iteration"]
        assert {i: tasks_of(cluster.log_path, i) for i in range(1, done + 1)} == {
            i: 24 if i < since else 6 for i in range(1, done + 1)
        }


# --- code of the user's own ---------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two rewards, and a file beside them."""
    for name in ("reward.py", "other.py", "unrelated.py"):
        (tmp_path / name).write_text(f"# {name}\n")
    return tmp_path


def of(folder: Path, **chosen: object) -> dict[str, str]:
    kinds = f"exact,{folder / 'reward.py'}:judge,{folder / 'other.py'}:judge"
    return code_digests(resolve([], {"program": "toy", "reward.kind": kinds, **chosen}, cross_checks=False))


def test_the_content_of_a_named_file_counts_and_its_place_does_not(folder: Path, tmp_path: Path) -> None:
    before = of(folder)
    (folder / "unrelated.py").write_text("# changed\n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("reward.py", "other.py"):
        (folder / name).rename(elsewhere / name)
    assert of(elsewhere) == before
    (elsewhere / "reward.py").write_text("# changed\n")
    after = of(elsewhere)
    assert [what for what in before if before[what] != after[what]] == ["reward.kind"]
    assert one_digest(before) != one_digest(after)


def test_programs_agents_and_trainers_count_by_the_setting_that_names_them(folder: Path) -> None:
    for name in ("mine.py", "agent.py", "loss.py", "train.py"):
        (folder / name).write_text("\n")
    (folder / "train.sh").write_text("#!/bin/sh\n")
    named = {
        "program": str(folder / "mine.py"),
        "rollout.agent": f"{folder / 'agent.py'}:Agent",
        "algorithm.loss": f"{folder / 'loss.py'}:loss",
        "trainer.command": f"/bin/sh {folder}/train.sh --script={folder}/train.py --out {{out}} {folder} nothing.py",
    }
    before = of(folder, **named)
    assert set(before) == {"fsbarrier", "reward.kind", *named}
    for file, what in {
        "mine.py": "program",
        "agent.py": "rollout.agent",
        "loss.py": "algorithm.loss",
        "train.sh": "trainer.command",
        "train.py": "trainer.command",
    }.items():
        (folder / file).write_text("# changed\n")
        after = of(folder, **named)
        assert [name for name in before if before[name] != after[name]] == [what], file
        before = after


def test_a_node_with_another_reward_is_refused_and_a_later_start_may_change_it(tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text("def judge(): return 1\n")
    chosen = ("--iterations", "1", f"reward.kind={reward}:judge")
    with Cluster(tmp_path, 2, *chosen, program="ping", real=True) as cluster:
        cluster.start(0)
        cluster.beating(0, lambda beat: True)
        reward.write_text("def judge(): return 2\n")
        cluster.start(1)
        assert cluster.wait(1) == {1: 2}
        assert "(what differs: reward.kind); start all nodes with the same" in cluster.said(1)
        reward.write_text("def judge(): return 1\n")
        cluster.start(1)
        assert cluster.wait() == {0: 0, 1: 0}, cluster.said(1)
        reward.write_text("def judge(): return 3\n")
        cluster.flags = ("--iterations", "2")
        cluster.start()
        assert cluster.wait() == {0: 0, 1: 0}, cluster.said(0)
        told = [event for event in cluster.events() if event["event"] == "code_changed"]
        # Node 1 was started with another reward, then with the first again, and now with a third.
        assert [event["what"] for event in told if event["node_rank"] == 0] == [["reward.kind"]]
        assert [event["what"] for event in told if event["node_rank"] == 1] == [["reward.kind"]] * 2
        assert "changed since the last start of this node: reward.kind" in cluster.said(0)


# --- where one stands -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    for name in ("random", "tempfile", "queue"):
        (folder / f"{name}.py").write_text("raise RuntimeError('this is not the library')\n")
    return folder


def test_a_reward_finds_its_own_modules_there(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "mine.py").write_text("FULL = 1.0\n")
    (here / "rewards").mkdir()
    file = here / "rewards" / "score.py"
    monkeypatch.chdir(here)
    settings = resolve([ChosenValue("reward.kind", f"{file}:score", "reward.kind")])
    rest = "import FULL\n\ndef score(prompt, response, answer, metadata):\n    return FULL\n"
    file.write_text(f"import random\nfrom mine {rest}")
    try_user_code(settings)
    file.write_text(f"from theirs {rest}")
    with pytest.raises(UsageError, match="theirs"):
        try_user_code(settings)
