"""From merged trajectories to a batch: who counts, with which advantage, in which order; and how it is dealt out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from trainer_bench import Bench, settings, trajectory, write_groups

from fsbarrier.errors import FsbarrierError, UsageError

pytestmark = pytest.mark.torch


def group(task: int, rewards: list[float], **fields: Any) -> list[dict[str, Any]]:
    return [
        {**trajectory(task, sample, [task + 2, 3, 4, sample + 5], [-0.5, -1.0], reward), **fields}
        for sample, reward in enumerate(rewards)
    ]


def prepared(work: Bench, groups: list[list[dict[str, Any]]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(result, batch) of preparing these groups."""
    import torch

    write_groups(work.folder / "merged", groups)
    result = work.prepare()
    return result, torch.load(work.folder / "batch", weights_only=True)


def test_groups_without_signal_are_left_out(tmp_path: Path) -> None:
    result, batch = prepared(
        Bench(tmp_path, settings()), [group(0, [1, 1, 1]), group(1, [0, 1, 1]), group(2, [0, 0, 0])]
    )
    assert (result["groups"], result["dropped_groups"], result["trajectories"]) == (3, 2, 3)
    assert result["tokens"] == 6 and result["reward_mean"] == pytest.approx(5 / 9)
    assert batch["weights"].tolist() == pytest.approx([-1.1547, 0.57735, 0.57735], abs=1e-4)
    assert batch["token_ids"].tolist()[:4] == [3, 3, 4, 5]
    assert batch["offsets"].tolist() == [0, 4, 8, 12]


def test_what_was_cut_off_is_kept_masked_or_shaped(tmp_path: Path) -> None:
    """Four answers of two tokens at a limit of four; the last two are as long as may be, one of them a success all the same."""

    def weights(**chosen: Any) -> list[float]:
        four = group(0, [1, 0, 1, 0])
        for one in four[2:]:
            one |= {"finish_reason": "length"}
            for name, more in (("token_ids", [9, 9]), ("loss_mask", [1, 1]), ("logprobs", [-1.0, -1.0])):
                one[name] += type(one[name])(one[name].typecode, more)
        (tmp_path / "merged").unlink(missing_ok=True)
        work = Bench(tmp_path, settings(rollout__max_tokens=4, algorithm__normalize_std=False, **chosen))
        return [round(weight, 6) for weight in prepared(work, [four])[1]["weights"].tolist()]

    assert weights() == [0.5, -0.5, 0.5, -0.5]
    assert weights(algorithm__truncated="mask") == [0.5, -0.5]
    # They lose 1 each, and so the mean loses 0.5.
    assert weights(algorithm__truncated="shape") == [1, 0, 0, -1]
    assert weights(algorithm__truncated="mask", algorithm__loss="rft") == [1]


def test_what_was_cut_off_loses_its_reward_also_where_all_are_right_or_the_engine_cut_it(
    tmp_path: Path,
) -> None:
    """Answers of two tokens at a limit of a hundred; engine.max_model_len has cut off the last one."""
    four = group(0, [1, 1, 1, 1])
    four[3] |= {"finish_reason": "length"}
    chosen = {"algorithm__truncated": "shape", "algorithm__normalize_std": False}
    _, batch = prepared(
        Bench(tmp_path, settings(rollout__max_tokens=100, **chosen)), [four, group(1, [1, 1])]
    )
    assert batch["weights"].tolist() == [0.25, 0.25, 0.25, -0.75]


def test_a_batch_may_decide_what_its_sequences_weigh(tmp_path: Path) -> None:
    work = Bench(tmp_path, settings(algorithm__advantage="reinforce_plus_plus"))
    _, batch = prepared(work, [group(0, [1, 0, 0, 0]), group(1, [2, 1, 1, 1])])
    weights = batch["weights"]
    assert weights.mean().item() == pytest.approx(0, abs=1e-6)
    # Every token counts once, two in each sequence.
    assert weights.repeat_interleave(2).std().item() == pytest.approx(1, abs=1e-4)
    assert weights[1] < weights[5] < weights[4]


def save_with_torch(path: Path, groups: list[list[dict[str, Any]]]) -> None:
    import torch

    tensors = {"token_ids": torch.int32, "loss_mask": torch.uint8, "logprobs": torch.float32}
    plain = [sample for its_own in groups for sample in its_own]
    for sample in plain:
        sample |= {name: torch.tensor(sample[name].tolist(), dtype=dtype) for name, dtype in tensors.items()}
    torch.save({"trajectories": plain, "metadata": {}}, path)


def test_the_same_task_under_two_policy_versions_is_two_groups(tmp_path: Path) -> None:
    """In a file that a user has made; in a rank's own file the later group of a task takes the place of the earlier one."""
    save_with_torch(tmp_path / "merged", [group(0, [0, 1]), group(0, [1, 1], policy_version=1)])
    result = Bench(tmp_path, settings()).prepare()
    assert (result["groups"], result["dropped_groups"], result["trajectories"]) == (2, 1, 2)


def test_a_file_that_torch_wrote_is_read_too(tmp_path: Path) -> None:
    save_with_torch(tmp_path / "merged", [group(0, [0, 1])])
    assert Bench(tmp_path, settings()).prepare()["trajectories"] == 2


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 no", b"hello"])
def test_a_file_of_something_else_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "merged").write_bytes(content)
    with pytest.raises(FsbarrierError, match="merged"):
        Bench(tmp_path, settings()).prepare()


def test_a_part_of_the_rollouts_is_not_taken_for_all(tmp_path: Path) -> None:
    write_groups(tmp_path / "merged", [group(task, [0, 1]) for task in range(3)])
    whole = (tmp_path / "merged").read_bytes()
    (tmp_path / "merged").write_bytes(whole[: len(whole) * 2 // 3])
    with pytest.raises(UsageError, match="is a rank's unfinished file"):
        Bench(tmp_path, settings()).prepare()


def test_damaged_trajectories_are_named(tmp_path: Path) -> None:
    bad = group(0, [0, 1])
    bad[1]["logprobs"][3] = float("nan")
    with pytest.raises(UsageError, match="task t0, sample 1: a log-probability is not a finite number"):
        prepared(Bench(tmp_path, settings()), [bad])
    (tmp_path / "merged").unlink()
    bad = group(0, [0, 1])
    bad[1]["logprobs"] = bad[1]["logprobs"][:-1]
    with pytest.raises(UsageError, match=r"task t0, sample 1: .* different lengths"):
        prepared(Bench(tmp_path, settings()), [bad])


def test_each_epoch_and_each_iteration_has_an_order_of_its_own(tmp_path: Path) -> None:
    import torch

    work = Bench(tmp_path, settings(trainer__epochs=3, trainer__minibatch=64))
    write_groups(tmp_path / "merged", [group(0, [n % 2 for n in range(32)])])
    orders = []
    for iteration in (1, 2, 1):
        assert work.prepare(iteration=iteration)["steps"] == 3
        steps = torch.load(tmp_path / "batch", weights_only=True)["steps"]
        orders.append([tuple(step.tolist()) for step in steps])
    assert all(sorted(step) == [*range(32)] for step in orders[0]) and orders[0] == orders[2]
    assert len({*orders[0], *orders[1]}) == 6


def test_minibatches_cover_each_epoch_once_and_are_of_one_size(tmp_path: Path) -> None:
    work = Bench(tmp_path, settings(trainer__epochs=2, trainer__minibatch=10))
    _, batch = prepared(work, [group(0, [n % 2 for n in range(25)])])
    assert [len(step) for step in batch["steps"]] == [13, 12] * 2
    assert sorted(i for step in batch["steps"][:2] for i in step.tolist()) == list(range(25))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"reward": float("nan")}, r"its reward is no finite number \(nan\)"),
        ({"reward": float("inf")}, "its reward is no finite number"),
        ({"reward": "good"}, r"its reward is no finite number \('good'\)"),
        ({"valid": None}, "it has no valid"),
        ({"policy_version": None}, "it has no policy_version"),
        ({"logprobs": None}, "it has no logprobs"),
        (
            {"token_ids": ["a", "b", "c", "d"]},
            "token_ids, loss_mask, logprobs, teacher_logprobs and segments must be numbers",
        ),
        ({"policy_version": "0"}, "its policy_version is no whole number"),
        ({"policy_versions": [None]}, "policy_versions must be numbers"),
        ({"token_ids": [2, 3, 99, 4]}, "token 99 is not one of the model's 64"),
        (
            {"segments": ["x"]},
            "token_ids, loss_mask, logprobs, teacher_logprobs and segments must be numbers",
        ),
    ],
)
def test_a_file_that_cannot_be_trained_on_is_one_line_with_the_task(
    tmp_path: Path, wrong: dict[str, Any], said: str
) -> None:
    """By the program, as phase 8 starts it."""
    import torch

    two = group(0, [0, 1])
    two[1] = {name: value for name, value in {**two[1], **wrong}.items() if value is not None}
    plain = [{n: v.tolist() if hasattr(v, "tolist") else v for n, v in one.items()} for one in two]
    torch.save({"trajectories": plain, "metadata": {}}, tmp_path / "merged")
    for truncated in ("keep", "shape"):
        with pytest.raises(UsageError, match=rf"^{tmp_path}/merged: task t0, sample 1: .*{said}"):
            Bench(tmp_path, settings(algorithm__truncated=truncated)).prepare()


def test_segments_are_sequences_of_their_own(tmp_path: Path) -> None:
    """An agent's history that was changed: what followed was sampled without the tokens before."""
    two = group(0, [0, 1])
    two[1] |= {"segments": [0, 2], "loss_mask": two[1]["loss_mask"][:1] + two[1]["loss_mask"][3:] * 3}
    two[1]["logprobs"] = two[0]["logprobs"][:1] + two[0]["logprobs"][2:] + two[0]["logprobs"][3:]
    _, batch = prepared(Bench(tmp_path, settings()), [two])
    assert batch["offsets"].tolist() == [0, 4, 6, 8]
    assert batch["weights"].tolist() == pytest.approx([-0.7071, 0.7071, 0.7071], abs=1e-4)
    assert batch["loss_mask"].tolist() == [0, 0, 1, 1, 0, 1, 0, 1]
    (tmp_path / "merged").unlink()
    two[1]["segments"] = [0, 9]
    with pytest.raises(UsageError, match=r"task t0, sample 1: its segments .* \(\[0, 9\]\)"):
        prepared(Bench(tmp_path, settings()), [two])


def test_what_nobody_could_judge_is_left_out(tmp_path: Path) -> None:
    four = group(0, [1, 0, 0, 0])
    four[2] |= {"valid": False, "metadata": {"agent_error": "KeyError"}}
    four[3] |= {"valid": False, "metadata": {"reward_error": "late"}}
    result, batch = prepared(Bench(tmp_path, settings()), [four])
    assert result["trajectories"] == 2 and batch["weights"].tolist() == pytest.approx(
        [0.7071, -0.7071], abs=1e-4
    )


def test_a_task_that_failed_needs_no_teacher(tmp_path: Path) -> None:
    """One that the engine rejected has no tokens; one whose tokens nobody marked is refused."""
    work = Bench(tmp_path, settings(algorithm__loss="distil"))
    groups = [group(0, [0, 1]), group(1, [0, 0])]
    for one in groups[0]:
        one["teacher_logprobs"] = one["logprobs"]
    for one in groups[1]:
        one |= {name: one[name][:0] for name in ("token_ids", "loss_mask", "logprobs")} | {"valid": False}
    result, batch = prepared(work, groups)
    assert result["trajectories"] == 2 and batch["teacher"].tolist() == batch["logprobs"].tolist()
    (tmp_path / "merged").unlink()
    with pytest.raises(UsageError, match="task t2, sample 0: it has no teacher_logprobs"):
        prepared(work, [groups[0], group(2, [0, 1])])


def replayed(work: Bench, **changes: Any) -> tuple[dict[str, Any], list[int]]:
    """(result, first token of each trajectory) of a batch drawn from three iterations; the first token names the group."""
    import torch

    for iteration in (1, 2, 3):
        groups = [group(10 * iteration + task, [0, 1], policy_version=iteration - 1) for task in range(8)]
        for trajectories in groups:
            for one in trajectories:
                one["token_ids"][0] = one["task_index"]
        (work.folder / f"i{iteration}").unlink(missing_ok=True)
        write_groups(work.folder / f"i{iteration}", [*groups, group(99, [1, 1])])
    merged = [str(work.folder / f"i{iteration}") for iteration in (3, 2, 1)]
    result = work.prepare(**{"merged": merged, "iteration": 3, "policy_version": 2, **changes})
    batch = torch.load(work.folder / "batch", weights_only=True)
    first = [int(batch["token_ids"][start]) for start in batch["offsets"][:-1]]
    assert batch["current"].tolist() == [int(task >= 30) for task in first]
    return result, first


def test_a_batch_is_drawn_from_the_last_iterations_the_later_the_likelier(tmp_path: Path) -> None:
    counts = {1: 0, 2: 0, 3: 0}
    for seed in range(30):
        work = Bench(tmp_path, settings(update__recency=3, rollout__seed=seed))
        result, first = replayed(work)
        assert len(first) == len(set(first)) * 2 == 16 and first == sorted(first, key=lambda t: -(t // 10))
        assert result["replayed"] == sum(task < 30 for task in first) and result["groups"] == 27
        for task in set(first):
            counts[task // 10] += 1
    assert counts[3] > 1.3 * counts[2] > 2.6 * counts[1] > 0  # weights 1, 4/9 and 1/9
    again = replayed(Bench(tmp_path, settings(update__recency=3, rollout__seed=29)))
    assert again[1] == first


def test_an_iteration_whose_rollouts_are_gone_is_left_out_unless_it_is_the_newest(tmp_path: Path) -> None:
    work = Bench(tmp_path, settings(update__recency=3))
    merged = [str(tmp_path / name) for name in ("i3", "gone", "i1")]
    assert len(replayed(work, merged=merged)[1]) == 16
    with pytest.raises(
        UsageError, match=r"gone: no such file, so iteration 3 has nothing .* \(--rl-phase rollout\)"
    ):
        replayed(work, merged=[str(tmp_path / "gone")])


def test_another_runs_rollouts_are_not_taken_for_ones_own(tmp_path: Path) -> None:
    import torch

    from fsbarrier.aggregate import Part, aggregate

    write_groups(tmp_path / "part", [group(0, [0, 1])])
    for name, run_id in (("own", f"test-{tmp_path.name}"), ("other", "another")):
        aggregate(
            [Part(tmp_path / "part", None)], tmp_path / name, metadata={"run_id": run_id}, expected=None
        )
        Bench(tmp_path, settings()).prepare(merged=[str(tmp_path / name)])
        batch = torch.load(tmp_path / "batch", weights_only=True)
        assert batch["current"].tolist() == [name == "own"] * 2
