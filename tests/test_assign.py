"""Which tasks an iteration takes, as phases/rl.py decides it: more than are wanted, those that were cut off, fixed shares."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from recording_node import RecordingNode

from fsbarrier.context import Context, PartOnDisk
from fsbarrier.decisions import PartGroups, RolloutDecision, RolloutReport
from fsbarrier.loader import load_module
from fsbarrier.node import Node, Weights
from fsbarrier.protocol.assign import TaskSet, draw_rounds, lots
from fsbarrier.protocol.facts import Member, Position
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.settings.sections import EvalSettings, RolloutSettings, Settings, TrainSet, TrainSettings
from fsbarrier.settings.value_types import RlPhase

rl = load_module("rl")


def context(phase: str = "train_assign", iteration: int = 3, **changes: Any) -> Context:
    """What node 0 of two sees, with the settings of `changes` that begin with "rollout_"."""
    rollout = {"tasks": 4} | {
        name[8:]: changes.pop(name) for name in list(changes) if name.startswith("rollout_")
    }
    known: dict[str, Any] = {
        "run_id": "r",
        "paths": RunPaths(Path("/run")),
        "settings": Settings(num_nodes=2, rank_weights=(3.0, 1.0), rollout=RolloutSettings(**rollout)),
        "tasks": {"train": {"count": 100, "path": "/data/train.jsonl"}},
        "model": Path("/model"),
        "node_rank": 0,
        "incarnation": 1,
        "members": (Member(0, 1), Member(1, 1)),
        "leader": 0,
        "generation": 2,
        "iteration": iteration,
        "attempt": 0,
        "phase": next(row for row in rl.PROGRAM.rows if row.name == phase),
        "decisions": {},
    }
    return Context(**{**known, **changes})


def assigned(ctx: Context) -> dict[str, Any]:
    return decided(rl.assign_train, ctx)


def decided(row: Callable[[Node], Any], ctx: Context) -> dict[str, Any]:
    """What a row returns, as the others read it."""
    value: dict[str, Any] = json.loads(json.dumps(row(RecordingNode(ctx)).as_json()))
    return value


def cut_off(ctx: Context, done: list[int], **report: Any) -> Any:
    reports = {0: RolloutReport("p", done, **report), 1: RolloutReport()}
    return rl.tasks_cut_off(ctx, [5, 6, 7, 8], [PartGroups("p", None, done)], reports)


def test_refills_are_other_tasks_in_rounds_that_are_shared_out_one_by_one() -> None:
    plain, more = assigned(context()), assigned(context(rollout_max_refills=3))
    assert plain["rounds"] is None and plain["keep"] is None
    # The first round is what it is without refills, and no task comes twice.
    assert more["wanted"][:4] == plain["wanted"] and len(set(more["wanted"])) == 16
    assert (more["rounds"], more["keep"], more["with_signal"]) == ([4, 4, 4, 4], 4, [0, 0, 0, 0])
    assert [len(share) for share in more["shares"].values()] == [12, 4]
    for number in range(4):
        of_round = set(more["wanted"][4 * number : 4 * number + 4])
        assert [len(of_round.intersection(share)) for share in more["shares"].values()] == [3, 1]
    assert assigned(context(rollout_max_refills=3)) == more
    assert assigned(context(rollout_max_refills=3, iteration=4))["wanted"][4:] != more["wanted"][4:]
    few = context(rollout_max_refills=3, tasks={"train": {"count": 10, "path": "/data/train.jsonl"}})
    assert assigned(few)["rounds"] == [4, 4, 2]
    none = context(rollout_max_refills=3, tasks={"train": {"count": 4, "path": "/data/train.jsonl"}})
    assert assigned(none)["rounds"] is None


def draw(*, iteration: int = 1, count: int = 10, rounds: int = 1, **more: Any) -> list[list[int]]:
    """Of 40 easy tasks from 0 on, 30 others from 100 on and 5 hard ones from 200 on, by 2 : 5 : 3."""
    sets = [
        TaskSet("easy", range(40), 2.0),
        TaskSet("fair", range(100, 130), 5.0),
        TaskSet("hard", range(200, 205), 3.0),
    ]
    return draw_rounds(sets, count, rounds, seed=7, iteration=iteration, **more)


def test_each_set_has_its_share_of_every_round() -> None:
    drawn = [draw(iteration=number, rounds=2) for number in range(1, 9)]
    for first, second in drawn:
        assert [sum(100 * n <= task < 100 * n + 100 for task in first) for n in range(3)] == [2, 5, 3]
        # There are no more than two hard ones left.
        assert len({*first, *second}) == len(first) + len(second) == 19
    # Whoever draws again draws the same, in the same order, in which the sets are mixed.
    assert drawn[0] == draw(rounds=2) and drawn[0][0] == draw()[0] != sorted(draw()[0])
    # Six iterations are a pass over the 30, twenty over the 40.
    assert {task for first, _ in drawn[:6] for task in first if 100 <= task < 200} == {*range(100, 130)}
    few = draw_rounds([TaskSet("", range(3))], 8, 2, seed=0, iteration=1)
    assert [sorted(tasks) for tasks in few] == [[0, 1, 2]]


def test_weights_decide_how_likely_a_task_is_drawn() -> None:
    """The first of two draws without replacement is task i with probability weight_i / sum of the weights."""
    weights = {0: 8.0, 1: 1.0, 2: 1.0, 3: 0.0}
    drawn = [
        draw_rounds([TaskSet("", range(4))], 1, 3, seed=0, iteration=number, weight_of=weights.__getitem__)
        for number in range(1, 2001)
    ]
    firsts = Counter(rounds[0][0] for rounds in drawn)
    assert abs(firsts[0] / 2000 - 0.8) < 0.03 and abs(firsts[1] / 2000 - 0.1) < 0.03 and not firsts[3]
    # What weighs nothing is in no refill, and comes only where nothing else is left.
    assert all(sorted(chain(*rounds)) == [0, 1, 2] for rounds in drawn)
    (whole,) = draw_rounds([TaskSet("", range(4))], 4, 2, seed=0, iteration=1, weight_of=weights.__getitem__)
    assert sorted(whole) == [0, 1, 2, 3] and whole[-1] == 3


def test_a_draw_knows_the_last_rewards_from_the_merge_before(tmp_path: Path) -> None:
    train = TrainSettings({"a": TrainSet(), "b": TrainSet(where="level=2:", weight=3.0)}, ("0:1", "0.5:0"))
    settings = replace(context().settings, train=train)
    tasks: Any = {
        "train.a": {"count": 6, "path": "/data/a.jsonl"},
        "train.b": {"count": 9, "path": "/data/b.jsonl", "picked": [2, 4, 6, 8]},
    }
    solved = {"8": 1.0, "10": 0.75, "12": 0.25}
    before = {"train_aggregate": {"iteration": 2, "value": {"merged": "m", "last_rewards": solved}}}
    ctx = context(settings=settings, tasks=tasks, decisions=before)
    # Numbers of the second file begin after the first; of its four tasks two are solved, and one of them makes up the three.
    wanted = assigned(ctx)["wanted"]
    assert {12, 14} < {*wanted} and len([task for task in wanted if task >= 6]) == 3 == len(wanted) - 1
    decisions = {**before, "train_assign": {"iteration": 3, "value": assigned(ctx)}}
    rounds = rl.train_rounds(ctx, RolloutDecision.from_json(assigned(ctx)))
    assert rounds[0].files == {"/data/a.jsonl": 0, "/data/b.jsonl": 6}
    node = RecordingNode(replace(ctx, decisions=decisions))
    rl.aggregate_train(node)
    (merge,) = node.specs
    assert merge.last_rewards == solved and sorted(chain(*merge.sets.values())) == sorted(wanted)


def test_groups_with_signal_that_are_there_count_for_their_round() -> None:
    drawn = assigned(context(rollout_max_refills=1))["wanted"]
    first = PartOnDisk("p", "start", 100, tuple(drawn[:5]), with_signal=frozenset(drawn[2:5]))
    # What another part has of a task that is taken from the first does not count.
    second = PartOnDisk("q", "start", 100, (drawn[0], drawn[6]), with_signal=frozenset({drawn[0]}))
    decision = assigned(context(rollout_max_refills=1, parts_of=lambda split, iteration: (first, second)))
    assert decision["with_signal"] == [2, 1]
    assert sorted(task for share in decision["shares"].values() for task in share) == sorted(
        [drawn[5], drawn[7]]
    )


@pytest.mark.parametrize(
    ("told", "begun"), [(({"rounds": 2}, {"rounds": 2}), 2), (({"rounds": 1}, {}), 1), (({}, {}), 3)]
)
def test_the_merge_wants_the_tasks_of_the_rounds_that_were_begun(
    told: tuple[dict[str, Any], ...], begun: int
) -> None:
    decision = assigned(context(rollout_max_refills=2))
    reports = {rank: {"part": f"p{rank}", "tasks": [], **one} if one else {} for rank, one in enumerate(told)}
    ctx = context(
        "train_aggregate",
        decisions={"train_assign": {"iteration": 3, "value": decision}},
        reports=lambda _: reports,
    )
    node = RecordingNode(ctx)
    merged = rl.aggregate_train(node)
    (merge,) = node.specs
    assert [*merge.request.expected] == decision["wanted"][: 4 * begun] and merge.request.keep == 4
    assert merged.rounds == begun


def test_tasks_are_cut_off_only_where_the_phase_was_ended_with_enough() -> None:
    ctx = context(rollout_completion_threshold=0.7)
    assert cut_off(ctx, [5, 7, 8], ended_early=True) == [6]
    assert cut_off(ctx, [5, 7, 8], ended_early=False) == []  # missing for no reason: the merge will refuse
    assert cut_off(ctx, [5, 7], ended_early=True) == []


def test_shares_are_fixed_where_claims_are_unsafe_and_the_journal_says_so() -> None:
    node = RecordingNode(context(claims_unsafe=lambda: "an object store"))
    assert rl.assign_train(node).fixed_shares == "an object store"
    assert node.events == [{"event": "shares_fixed", "why": "an object store"}]
    assert assigned(context(rollout_take_over=False))["fixed_shares"] == "rollout.take_over is off"
    node = RecordingNode(context())
    assert rl.assign_train(node).fixed_shares == "" and not node.events


FIRST = {"policy_version": 1, "folder": "policy-000001.g0002", "digest": "ab" * 32}


@pytest.mark.parametrize(
    ("policy", "published", "adopted"),
    [
        ("start", None, True),
        ("policy-000001.g0002:abababababababab", FIRST, True),
        # the same version, made by another generation, or twice in one folder
        ("policy-000001.g0001:abababababababab", FIRST, False),
        ("policy-000001.g0002:cdcdcdcdcdcdcdcd", FIRST, False),
        ("start", FIRST, False),
        ("", None, False),
    ],
)
def test_adopted_groups_are_not_shared_out_again(
    policy: str, published: dict[str, object] | None, adopted: bool
) -> None:
    decisions = {"weights_publish": {"iteration": 1, "value": published}} if published else {}
    drawn = assigned(context(decisions=decisions))["wanted"]
    part = PartOnDisk("p", policy, 100, (drawn[2], 98, drawn[0]))
    decision = assigned(context(decisions=decisions, parts_of=lambda split, iteration: (part,)))
    left = [task for share in decision["shares"].values() for task in share]
    if adopted:
        assert decision["adopted"] == [{"name": "p", "valid_bytes": 100, "tasks": [drawn[2], drawn[0]]}]
        assert left == [drawn[1], drawn[3]]
    else:
        assert decision["adopted"] == [] and left == drawn


def test_what_was_sampled_otherwise_is_not_adopted() -> None:
    """The evaluation that ended a session, when the next one asks for more samples."""
    ctx = context("eval_decide", iteration=1, tasks={"test": {"count": 3, "path": "/t"}})
    how = rl.sampled_how(ctx, "test")
    more = replace(ctx.settings, eval=EvalSettings(samples=8))
    part = PartOnDisk("p", "start", 100, (0, 1, 2), sampled_how=how)
    for settings, taken in ((ctx.settings, 3), (more, 0)):
        known = replace(ctx, settings=settings, parts_of=lambda split, iteration: (part,))
        decision = rl.decide_eval(RecordingNode(known))
        assert sum(len(one.tasks) for one in decision.adopted) == taken
    assert rl.rollout_spec(ctx, decision, rl.eval_rounds(ctx)).sampled_how == how


@pytest.mark.parametrize(
    ("before", "how", "final", "best"),
    [
        (None, "", None, (0.6, 2)),
        (0.7, "abc", None, (0.7, 1)),
        (0.5, "abc", None, (0.6, 2)),
        # It was sampled otherwise: 0.7 was not better than 0.6.
        (0.7, "def", None, (0.6, 2)),
        # The session before ended with the evaluation of this very policy; this iteration has none.
        (0.7, "abc", 2, (0.8, 2)),
        (0.7, "abc", 1, (0.7, 1)),
    ],
)
def test_the_best_policy_has_the_highest_reward_of_those_sampled_in_one_way(
    before: float | None, how: str, final: int | None, best: tuple[float, int]
) -> None:
    published: dict[str, Any] = {"policy_version": 2, "folder": "policy-000002.g0001"}
    if before is not None:
        published["best"] = {"reward": before, "version": 1, "folder": None, "sampled_how": how}
    decisions = {"weights_publish": {"iteration": 2, "value": published}}
    if final is None:
        decisions["eval_rollout"] = {"iteration": 3, "value": {"reward_mean": 0.6, "sampled_how": "abc"}}
    else:
        value = {"reward_mean": 0.8, "policy_version": final, "sampled_how": "abc"}
        decisions["iteration_end"] = {"iteration": 2, "value": value}
    found = context(settings=Settings(), decisions=decisions).best_evaluated
    assert found is not None and (found.reward, found.version) == best


@pytest.mark.parametrize(
    ("until", "rl_phase", "interval", "evaluated"),
    [
        (3, "both", 7, True),
        (None, "both", 1, False),
        (4, "both", 1, False),
        (3, "update", 1, False),
        (3, "both", 0, False),
    ],
)
def test_the_last_policy_is_evaluated_where_the_run_ends(
    until: int | None, rl_phase: RlPhase, interval: int, evaluated: bool
) -> None:
    settings = Settings(num_nodes=2, rank_weights=(3.0, 1.0), rl_phase=rl_phase, eval_interval=interval)
    tasks = {"test": {"count": 8, "path": "/t"}}
    ctx = context("iteration_end", settings=settings, tasks=tasks)
    start, end = (rl.PROGRAM.row(Position(3, phase), until, rl_phase) for phase in (12, 13))
    if (until, rl_phase) != (3, "both"):
        assert (start.leader, end.each, end.leader) == (None, None, None)
        return
    decision = decided(start.leader, ctx)
    assert bool(decision["wanted"]) == decision["evaluate"] == evaluated
    node = RecordingNode(replace(ctx, decisions={"engine_start": {"iteration": 3, "value": decision}}))
    # The node that follows it shares its records.
    assert (end.each(node) is not None) == evaluated == bool(node.specs)
    if evaluated:
        # As iteration 4 would.
        (spec,) = node.specs
        assert spec.identity.iteration == 4 and "iteration4_rank_0" in spec.part.name
    else:
        # Something is on record, so that no later start comes back for it.
        assert end.leader(node).as_json()


@pytest.mark.parametrize(
    ("published", "policy"),
    [
        ({}, "start"),
        (
            {"folder": "policy-000002.g0001", "policy_version": 2, "digest": "a1b2" * 16},
            "policy-000002.g0001:a1b2a1b2a1b2a1b2",
        ),
    ],
)
def test_engines_are_told_which_policy_was_published(published: dict[str, Any], policy: str) -> None:
    decisions: dict[str, Any] = {"eval_assign": {"iteration": 3, "value": {"shares": {"0": [1], "1": []}}}}
    if published:
        decisions["weights_publish"] = {"iteration": 2, "value": published}
    tasks = {"test": {"count": 8, "path": "/t"}}
    ctx = context("engine_start", decisions=decisions, tasks=tasks)
    folder = Path("/run/checkpoints/policy-000002.g0001/model") if published else Path("/model")
    version, threads = published.get("policy_version", 0), ctx.threads
    wanted, node = Weights(folder, version, threads, policy, first_model=Path("/model")), RecordingNode(ctx)
    rl.start_engine(node)
    decision = RolloutDecision.from_json(assigned(replace(ctx, tasks=context().tasks)))
    rl.rollout(node, decision, [])
    assert node.served == [wanted, wanted]


def test_lots_are_the_share_in_order_and_few() -> None:
    assert lots([]) == [] and lots([7]) == [(7,)]
    for count in (1, 127, 128, 129, 1000, 100_000):
        cut = lots(range(count))
        assert [task for lot in cut for task in lot] == list(range(count))
        assert len(cut) <= 128 and len({len(lot) for lot in cut[:-1]}) <= 1
