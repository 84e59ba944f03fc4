"""The figures of an iteration beside its mean reward: in each group's description, and of a merge."""

from __future__ import annotations

import json
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fsbarrier.aggregate import Part as PartFile
from fsbarrier.aggregate import aggregate
from fsbarrier.data.group_stats import MOST_PARTS, GroupStats, RewardPart, metrics
from fsbarrier.trajectories import RankFileWriter, scan_rank_file


def trajectory(sampled: int, reward: float, parts: dict[str, float], **changes: Any) -> dict[str, Any]:
    known = {"task_id": "t", "sample": 0, "policy_version": 0, "node_rank": 0, "finish_reason": "stop"}
    mask = array("B", [0, 0, *[1] * sampled])
    return {**known, "reward": reward, "reward_parts": parts, "loss_mask": mask, "metadata": {}, **changes}


GOOD = [
    trajectory(3, 1.0, {"right": 1.0, "polite": 0.5}),
    trajectory(9, 0.0, {"right": 0.0, "polite": 0.25}, finish_reason="length"),
]
# The reward `polite` failed here, and `right` did not; then the agent.
BAD = [
    trajectory(5, 0.0, {"right": 1.0}, metadata={"reward_error": "late"}),
    trajectory(0, 0.0, {}, metadata={"agent_error": "gone"}, loss_mask=array("B")),
]
EXPECTED = {
    "truncated": 1,
    "truncated_share": pytest.approx(1 / 3),
    "reward_errors": 1,
    "agent_errors": 1,
    "reward_std": pytest.approx(0.5**0.5),
    "groups_without_signal": 0,
    "without_signal_share": 0.0,
    "answer_tokens_mean": pytest.approx(17 / 3),
    "answer_tokens_min": 3,
    "answer_tokens_max": 9,
    "reward_parts/right": pytest.approx(2 / 3),
    "reward_parts/polite": 0.375,
    "reward_parts/polite_failed": 1,
}


def test_figures_of_several_groups_are_those_of_all_their_trajectories() -> None:
    one, other = GroupStats.of(GOOD), GroupStats.of(BAD)
    assert metrics([one, other]) == EXPECTED == metrics([GroupStats.of([*GOOD, *BAD])])
    assert GroupStats.from_json(json.loads(json.dumps(one.as_json()))) == one
    assert metrics([]) == {}
    # Nothing was sampled: no length is 0.
    assert not any(name.startswith("answer_tokens") for name in metrics([replace(GroupStats(), truncated=0)]))


def test_a_group_has_signal_where_its_judged_rewards_differ(tmp_path: Path) -> None:
    failed = trajectory(3, 0.0, {}, metadata={"reward_error": "late"})
    alike = [trajectory(3, 1.0, {}), failed, trajectory(3, 1.0, {})]
    with RankFileWriter(tmp_path / "part", header={}) as writer:
        for task, group in enumerate((alike, GOOD, [failed])):
            writer.append_group(task, group)
    groups = scan_rank_file(tmp_path / "part").groups
    assert [group.stats.signal for group in groups] == [False, True, False]
    told = metrics([group.stats for group in groups])
    # One whose rewards cannot be compared counts neither way.
    assert (told["groups_without_signal"], told["without_signal_share"]) == (1, 0.5)
    assert told["reward_std"] == pytest.approx(0.5**0.5 / 2)


def test_what_another_program_wrote_is_counted_as_far_as_it_can_be() -> None:
    foreign = {
        "reward": 1.0,
        "metadata": 7,
        "loss_mask": [1, 1],
        "reward_parts": {"a": float("nan"), "b": "x"},
    }
    assert GroupStats.of([foreign]) == GroupStats(trajectories=1, reward_sum=1.0)
    many = trajectory(1, 0.0, {f"part{n:03d}": 1.0 for n in range(100)})
    assert len(GroupStats.of([many]).parts) == MOST_PARTS
    assert GroupStats.of([trajectory(1, 0.0, {"a": 2.0})]).parts == {"a": RewardPart(2.0, 1, 0)}


def test_a_merge_tells_them_without_reading_a_trajectory(tmp_path: Path) -> None:
    for number, group in enumerate((GOOD, BAD)):
        with RankFileWriter(tmp_path / f"p{number}", header={}) as writer:
            writer.append_group(number, group)
    parts = [PartFile(tmp_path / "p0"), PartFile(tmp_path / "p1")]
    report = aggregate(parts, tmp_path / "merged", metadata={}, expected=[0, 1])
    assert report.figures == EXPECTED
