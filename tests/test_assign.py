"""Which tasks an iteration takes, as phases/rl.py decides it: more than are wanted, those that were cut off, fixed shares."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsbarrier.loader import load_module
from fsbarrier.program import Context, PartOnDisk, Value
from fsbarrier.protocol.facts import Member
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.settings.sections import RolloutSettings, Settings

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
        "python": "python",
    }
    return Context(**{**known, **changes})


def assigned(ctx: Context) -> dict[str, Any]:
    work = rl.assign_train(ctx)
    assert isinstance(work, Value)
    return dict(work.value)


def cut_off(ctx: Context, done: list[int], **report: Any) -> Any:
    decision = {"wanted": [5, 6, 7, 8], "shares": {"0": [5, 6, 7], "1": [8]}, "adopted": [], "keep": None}
    reports = {0: {"part": "p", "tasks": done, **report}, 1: {}}
    parts = [{"path": "p", "tasks": done}]
    return rl.tasks_cut_off(ctx, decision["wanted"], parts, reports)


def test_more_tasks_than_are_wanted_when_asked_for() -> None:
    plain, more = assigned(context()), assigned(context(rollout_oversample=1.6))
    assert (len(plain["wanted"]), plain["keep"]) == (4, None)
    assert (len(more["wanted"]), more["keep"]) == (7, 4)
    assert [len(share) for share in more["shares"].values()] == [5, 2] and more["fixed_shares"] == ""


def test_what_was_cut_off_comes_first_the_next_time_and_only_then() -> None:
    drawn = assigned(context())["wanted"]
    last = {"train_aggregate": {"iteration": 2, "value": {"cut_off": [99, drawn[1]]}}}
    again = assigned(context(decisions=last, rollout_carry_over=True))
    assert again["carried"] == [99, drawn[1]]
    assert again["wanted"] == [99, drawn[1], drawn[0], drawn[2], drawn[3]]
    assert assigned(context(decisions=last))["wanted"] == drawn
    later = assigned(context(iteration=4, decisions=last, rollout_carry_over=True))
    assert later["carried"] == []


def test_tasks_are_cut_off_only_where_the_phase_was_ended_with_enough() -> None:
    ctx = context(rollout_completion_threshold=0.7)
    assert cut_off(ctx, [5, 7, 8], ended_early=True) == [6]
    assert cut_off(ctx, [5, 7, 8], ended_early=False) == []  # missing for no reason: the merge will refuse
    assert cut_off(ctx, [5, 7], ended_early=True) == []


def test_shares_are_fixed_where_claims_are_unsafe_and_the_journal_says_so() -> None:
    decision = assigned(context(claims_unsafe=lambda: "an object store"))
    assert decision["fixed_shares"] == "an object store"
    assert decision["events"] == [{"event": "shares_fixed", "why": "an object store"}]
    assert assigned(context(rollout_take_over=False))["fixed_shares"] == "rollout.take_over is off"
    assert "events" not in assigned(context())


FIRST = {"policy_version": 1, "folder": "/run/checkpoints/policy-000001.g0002", "digest": "ab" * 32}


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
    decision = assigned(context(decisions=decisions, inventory=lambda split: (part,)))
    left = [task for share in decision["shares"].values() for task in share]
    if adopted:
        assert decision["adopted"] == [{"path": "p", "valid_bytes": 100, "tasks": [drawn[2], drawn[0]]}]
        assert left == [drawn[1], drawn[3]]
    else:
        assert decision["adopted"] == [] and left == drawn


def test_a_group_without_a_judgement_is_not_adopted_but_judged_again() -> None:
    drawn = assigned(context())["wanted"]
    first = PartOnDisk("p", "start", 100, (drawn[0], drawn[1]), frozenset({drawn[1]}))
    # Here the same task was judged; a second failure is of no use.
    second = PartOnDisk("q", "start", 200, (drawn[1], drawn[2]), frozenset({drawn[2]}))
    third = PartOnDisk("r", "start", 300, (drawn[2],), frozenset({drawn[2]}))
    decision = assigned(context(inventory=lambda split: (first, second, third)))
    assert decision["adopted"] == [
        {"path": "p", "valid_bytes": 100, "tasks": [drawn[0]]},
        {"path": "q", "valid_bytes": 200, "tasks": [drawn[1]]},
    ]
    assert decision["judge_again"] == [{"path": "q", "valid_bytes": 200, "tasks": [drawn[2]]}]
    assert [task for share in decision["shares"].values() for task in share] == [drawn[2], drawn[3]]
