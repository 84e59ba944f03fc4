"""The figures of an evaluation, as a merge gives them, against the definitions' own enumeration."""

from __future__ import annotations

import math
import statistics
from itertools import combinations, count, groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from trainer_bench import trajectory as sampled
from trainer_bench import work_identity

from fsbarrier.aggregate import work
from fsbarrier.settings.sections import Settings
from fsbarrier.specs import MergeReport
from fsbarrier.trajectories import RankFileWriter

SILENT: Any = SimpleNamespace(show=lambda *_, **__: None)


def merged(
    folder: Path,
    groups: list[Any],
    success: dict[str, float] | None = None,
    keep: int | None = None,
    **fields: Any,
) -> MergeReport:
    """The report of a merge of these groups into a new file."""
    path = folder / f"part-{len([*folder.iterdir()])}"
    by_task = {group[0]["task_index"]: group for group in groups}
    with RankFileWriter(path, header={}) as writer:
        writer.write([writer.framed(task, group) for task, group in by_task.items()])
        writer.finish()
    tasks = sorted(by_task)
    parts = [{"path": str(path), "valid_bytes": None, "tasks": tasks}]
    request = {"parts": parts, "out": f"{path}.merged", "expected": tasks, "metadata": {}, "keep": keep}
    spec = {**work_identity(folder), "request": request, "success": success, **fields}
    return MergeReport.from_json(work(spec, Settings(), SILENT) or {})


def trajectory(task: int, text: str, reward: float, **metadata: Any) -> Any:
    return {
        **sampled(task, 0, [1, 2], [-1.0], reward),
        "text": text,
        "reward_parts": {},
        "metadata": metadata,
    }


def figures(folder: Path, trajectories: list[Any], success: dict[str, float]) -> dict[str, Any]:
    """What the merge of an evaluation says of it."""
    groups = [list(group) for _, group in groupby(trajectories, key=lambda one: one["task_index"])]
    report = merged(folder, groups, success)
    return {**report.figures, "reward_mean": report.reward_mean}


def test_pass_at_k_is_the_share_of_all_choices_with_a_success(tmp_path: Path) -> None:
    """Each number of successes among up to eight samples, in a set of its own."""
    numbers, wanted, all_of_them = count(), {}, []
    for samples in range(2, 9):
        for solved in range(samples + 1):
            task, outcomes = next(numbers), [number < solved for number in range(samples)]
            all_of_them += [{**trajectory(task, "x", float(one)), "eval_set": f"s{task}"} for one in outcomes]
            for k in {2, 4, 8, samples} & {*range(samples + 1)}:
                choices = [any(chosen) for chosen in combinations(outcomes, k)]
                wanted[f"s{task}/pass_at_{k}"] = statistics.fmean(choices)
    found = figures(tmp_path, all_of_them, {f"s{task}": 1.0 for task in range(next(numbers))})
    assert {name: one for name, one in found.items() if "pass_at" in name} == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("answers", "share"), [((3, 3, 4), 1), ((4, 4, 3), 0), ((3, 4), 0.5), ((4, 3, 3, 4), 0.5)]
)
def test_majority_takes_the_most_frequent_answer(
    tmp_path: Path, answers: tuple[int, ...], share: float
) -> None:
    """Three is right."""
    given = [trajectory(0, f"it is {answer}", float(answer == 3)) for answer in answers]
    assert figures(tmp_path, given, {"": 1.0})[f"majority_at_{len(answers)}"] == share


def test_figures_have_errors_over_tasks_and_sources_of_their_own(tmp_path: Path) -> None:
    tasks = {0: [1, 1, 0, 0], 1: [0, 0, 0, 0], 2: [1, 1, 1, 1]}
    sources = {0: "gsm8k", 1: "aime", 2: "gsm8k"}
    given = [
        trajectory(task, "it is 7" if reward else f"no {sample}", reward, data_source=sources[task])
        for task, rewards in tasks.items()
        for sample, reward in enumerate(rewards)
    ]
    found = figures(tmp_path, given, {"": 1.0})
    means = [0.5, 0.0, 1.0]
    assert found["reward_se"] == pytest.approx(statistics.stdev(means) / math.sqrt(3))
    assert found["pass_at_2"] == pytest.approx((5 / 6 + 0 + 1) / 3)
    assert found["pass_at_4"] == pytest.approx(2 / 3) and found["pass_at_4_se"] == pytest.approx(1 / 3)
    # Of the first task two say 7, and everybody else says something else.
    assert found["majority_at_4"] == pytest.approx(2 / 3)
    assert found["reward/gsm8k"] == 0.75 and found["reward/aime"] == 0 and "reward/aime_se" not in found
    assert "reward" not in found and "pass_at_1" not in found


def test_each_set_has_figures_of_its_own_and_counts_alike(tmp_path: Path) -> None:
    aime = [{**trajectory(0, f"is {n}", float(n == 0)), "eval_set": "aime"} for n in range(4)]
    easy = [{**trajectory(task, "is 7", 0.5), "eval_set": "easy"} for task in (1, 1, 2, 2)]
    found = figures(tmp_path, [*aime, *easy], {"aime": 1.0, "easy": 0.4})
    assert (found["aime/reward"], found["easy/reward"], found["reward_mean"]) == (0.25, 0.5, 0.375)
    assert (found["aime/pass_at_4"], found["aime/majority_at_4"]) == (1, 0.25)
    assert found["easy/pass_at_2"] == 1, "each set has a threshold of its own"
    assert "aime/reward_se" not in found and found["easy/reward_se"] == 0 and "pass_at_4" not in found
    # Of a set that nobody could judge nothing is said, and the mean is that of the others.
    broken = [{**one, "metadata": {"reward_error": "late"}} for one in aime]
    assert figures(tmp_path, [*broken, *easy], {"aime": 1.0, "easy": 0.4})["reward_mean"] == 0.5


def test_a_figure_is_over_all_tasks_or_is_none(tmp_path: Path) -> None:
    uneven = [trajectory(task, "x", 1.0) for task, samples in enumerate((2, 4)) for _ in range(samples)]
    found = figures(tmp_path, uneven, {"": 1.0})
    assert found["pass_at_2"] == 1 and {"pass_at_4", "majority_at_2", "majority_at_4"}.isdisjoint(found)


def test_a_merged_evaluation_has_its_figures_in_its_result(tmp_path: Path) -> None:
    groups = [
        [
            {**sampled(task, sample, [1, 2], [-1.0], reward), "metadata": {"data_source": "s"}}
            for sample, reward in enumerate(rewards)
        ]
        for task, rewards in enumerate(([1.0, 0.0], [0.0, 0.0]))
    ]
    result = merged(tmp_path, groups, {"": 1.0})
    found = result.figures
    assert (result.reward_mean, found["pass_at_2"], found["reward/s"]) == (0.25, 0.5, 0.25)
    # Train rollouts have none of them.
    result = merged(tmp_path, groups)
    assert "pass_at_2" not in result.figures and result.last_rewards is None
    # They have those of their sets, and what the next draw depends on: the last reward of each task that was ever drawn.
    drawn = {"sets": {"a": [0], "b": [1], "c": [7]}, "last_rewards": {"0": 0.0, "7": 1.0}}
    result = merged(tmp_path, groups, keep=1, **drawn)
    found = result.figures
    assert (found["train_reward/a"], found["train_reward/b"], result.left_out) == (0.5, 0.0, 1)
    assert "train_reward/c" not in found
    assert result.last_rewards == {"0": 0.5, "1": 0.0, "7": 1.0}
