"""The figures of an evaluation, against the definitions' own enumeration."""

from __future__ import annotations

import math
import statistics
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsbarrier.rewards.evaluation import figures, majority, pass_at


def trajectory(task: int, text: str, reward: float, **metadata: Any) -> Any:
    return {"task_index": task, "text": text, "reward": reward, "reward_parts": {}, "metadata": metadata}


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_pass_at_k_is_the_share_of_all_choices_with_a_success(solved: list[bool], data: Any) -> None:
    k = data.draw(st.integers(1, len(solved)))
    choices = [any(chosen) for chosen in combinations(solved, k)]
    assert pass_at(k, len(solved), sum(solved)) == pytest.approx(statistics.fmean(choices))


def test_majority_takes_the_most_frequent_answer() -> None:
    assert majority([3, 3, 4], [True, True, False]) == 1
    assert majority([3, 4, 4], [True, False, False]) == 0
    assert majority([3, 4], [True, False]) == 0.5


def test_figures_have_errors_over_tasks_and_sources_of_their_own() -> None:
    tasks = {0: [1, 1, 0, 0], 1: [0, 0, 0, 0], 2: [1, 1, 1, 1]}
    sources = {0: "gsm8k", 1: "aime", 2: "gsm8k"}
    given = [
        trajectory(task, "it is 7" if reward else f"no {sample}", reward, data_source=sources[task])
        for task, rewards in tasks.items()
        for sample, reward in enumerate(rewards)
    ]
    found = figures(given, {"": 1.0})
    means = [0.5, 0.0, 1.0]
    assert found["reward_se"] == pytest.approx(statistics.stdev(means) / math.sqrt(3))
    assert found["pass_at_2"] == pytest.approx((5 / 6 + 0 + 1) / 3)
    assert found["pass_at_4"] == pytest.approx(2 / 3) and found["pass_at_4_se"] == pytest.approx(1 / 3)
    # Of the first task two say 7, and everybody else says something else.
    assert found["majority_at_4"] == pytest.approx(2 / 3)
    assert found["reward/gsm8k"] == 0.75 and found["reward/aime"] == 0 and "reward/aime_se" not in found
    assert "reward" not in found and "pass_at_1" not in found


def test_each_set_has_figures_of_its_own_and_counts_alike() -> None:
    aime = [{**trajectory(0, f"is {n}", float(n == 0)), "eval_set": "aime"} for n in range(4)]
    easy = [{**trajectory(task, "is 7", 0.5), "eval_set": "easy"} for task in (1, 1, 2, 2)]
    found = figures([*aime, *easy], {"aime": 1.0, "easy": 0.4})
    assert (found["aime/reward"], found["easy/reward"], found["reward_mean"]) == (0.25, 0.5, 0.375)
    assert (found["aime/pass_at_4"], found["aime/majority_at_4"]) == (1, 0.25)
    assert found["easy/pass_at_2"] == 1, "each set has a threshold of its own"
    assert "aime/reward_se" not in found and found["easy/reward_se"] == 0 and "pass_at_4" not in found
    # Of a set that nobody could judge nothing is said, and the mean is that of the others.
    broken = [{**one, "metadata": {"reward_error": "late"}} for one in aime]
    assert figures([*broken, *easy], {"aime": 1.0, "easy": 0.4})["reward_mean"] == 0.5


def test_a_merged_evaluation_has_its_figures_in_its_result(tmp_path: Path) -> None:
    from trainer_bench import trajectory as sampled
    from trainer_bench import write_groups

    from fsbarrier.aggregate import work
    from fsbarrier.processes.worker_contract import ProgressWriter
    from fsbarrier.settings.sections import Settings

    groups = [
        [
            {**sampled(task, sample, [1, 2], [-1.0], reward), "metadata": {"data_source": "s"}}
            for sample, reward in enumerate(rewards)
        ]
        for task, rewards in enumerate(([1.0, 0.0], [0.0, 0.0]))
    ]
    write_groups(tmp_path / "part", groups)
    spec = {
        "parts": [{"path": str(tmp_path / "part"), "valid_bytes": None, "tasks": [0, 1]}],
        "out": str(tmp_path / "merged"),
        "expected": [0, 1],
        "metadata": {},
        "success": {"": 1.0},
    }
    result = work(spec, Settings(), ProgressWriter(None))
    assert (result["reward_mean"], result["pass_at_2"], result["reward/s"]) == (0.25, 0.5, 0.25)
    # Train rollouts have none of them.
    spec |= {"success": None, "out": str(tmp_path / "train")}
    assert {"pass_at_2", "last_rewards"}.isdisjoint(work(spec, Settings(), ProgressWriter(None)))
    # They have those of their sets, and what the next draw depends on: the last reward of each task that was ever drawn.
    spec |= {"sets": {"a": [0], "b": [1], "c": [7]}, "last_rewards": {"0": 0.0, "7": 1.0}, "keep": 1}
    result = work(spec, Settings(), ProgressWriter(None))
    assert (result["train_reward/a"], result["train_reward/b"], result["left_out"]) == (
        0.5,
        0.0,
        1,
    ) and "train_reward/c" not in result
    assert result["last_rewards"] == {"0": 0.5, "1": 0.0, "7": 1.0}
