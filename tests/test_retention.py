"""Old trajectories and batches go when a setting says so, and never what may still be needed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster

from fsbarrier.loader import load_module
from fsbarrier.rundir import checkpoints, retention
from fsbarrier.rundir.paths import RunPaths


def make(paths: RunPaths, iteration: int) -> list[Path]:
    """All that one iteration leaves."""
    made = []
    for split in ("train", "test"):
        made += [paths.merged(split, iteration), paths.merged_by(split, iteration, 3)]
        made += [paths.rank_checkpoint(split, iteration, 12), paths.part(split, iteration, 12, 3, 1)]
    made.append(paths.batch(iteration, 3))
    for path in made:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    return made


def test_old_batches_and_trajectories_go_and_the_rest_stays(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    files = {iteration: make(paths, iteration) for iteration in (1, 2, 3, 10, 11)}
    other = paths.trajectories("train") / "train_trajectories.pt.iteration1.mine"
    other.write_text("x")
    for iteration in (2, 3):
        paths.images("train", iteration).mkdir()
        (paths.images("train", iteration) / "abc.png").write_text("x")
    assert retention.remove_old(tmp_path, 10, batches=0, trajectories=0) == []
    assert all(path.exists() for made in files.values() for path in made)
    assert retention.remove_old(tmp_path, 10, batches=1, trajectories=8) == [1, 2]
    left = {iteration for iteration, made in files.items() if any(path.exists() for path in made[:-1])}
    assert left == {3, 10, 11} and other.exists()
    assert not paths.images("train", 2).exists() and paths.images("train", 3).exists()
    assert [iteration for iteration, made in files.items() if made[-1].exists()] == [10, 11]
    assert retention.remove_old(tmp_path, 10, batches=1, trajectories=8) == []
    assert retention.remove_old(tmp_path / "none", 10, batches=1, trajectories=1) == []


def test_a_run_keeps_as_many_iterations_as_set(tmp_path: Path) -> None:
    flags = ("--iterations", "7", "checkpoint.keep_trajectories=1", "update.recency=2", "toy.phase_s=0.01")
    flags += ("--eval-interval", "1", "checkpoint.keep=1")
    with Cluster(tmp_path, 1, *flags) as cluster:
        cluster.start()
        assert cluster.wait() == {0: 0}, cluster.said(0)
        there = sorted(path.name for path in RunPaths(cluster.log_path).trajectories("train").iterdir())
        assert {name.partition("iteration")[2][0] for name in there} == {"6", "7"}  # the recency wins
        events = [event for event in cluster.events() if event["event"] == "trajectories_removed"]
        assert [(event["iteration"], event["iterations"]) for event in events] == [
            (iteration, [iteration - 2]) for iteration in range(3, 8)
        ]
        # Iteration n evaluates policy version n - 1.
        rewards = {
            event["policy_version"]: event["reward_mean"]
            for event in cluster.events()
            if event["event"] == "evaluated"
        }
        best = max(rewards, key=rewards.__getitem__)
        last = [event for event in cluster.events() if event["event"] == "weights_published"][-1]
        assert (last["best_policy_version"], last["best_reward"]) == (best, rewards[best])
        kept = {version for version, _ in checkpoints.versions(cluster.log_path)}
        assert kept == {6, 7, best} and 0 < best < 6, "choose another number of iterations"


def test_the_newest_every_so_many_and_the_best_stay(tmp_path: Path) -> None:
    def kept(keep: int, every: int = 0, best: str | None = None) -> list[int]:
        for version in range(1, 13):
            RunPaths(tmp_path).checkpoint(version, 1).mkdir(parents=True, exist_ok=True)
        retention.remove_old_versions(tmp_path, keep, RunPaths(tmp_path).checkpoint(11, 1), every, best)
        return [version for version, _ in checkpoints.versions(tmp_path)]

    assert kept(0) == list(range(1, 13))
    # The version before is always kept, and a later one is another node's business.
    assert kept(1) == [10, 11, 12]
    assert kept(3, every=4) == [4, 8, 9, 10, 11, 12]
    assert kept(2, best="policy-000003.g0001") == [3, 10, 11, 12]


def test_while_a_kept_version_does_not_say_which_state_it_needs_none_is_removed(tmp_path: Path) -> None:
    """Its manifest may name any of them: unreadable is never absent."""
    for version in range(1, 6):
        folder = RunPaths(tmp_path).checkpoint(version, 1)
        (folder / "model").mkdir(parents=True)
        (folder / "model" / "weights").write_bytes(b"w")
        state_in = "policy-000001.g0001" if version == 4 else ""
        checkpoints.commit(folder, replace(checkpoints.write_manifest(folder, version), state_in=state_in))
    current, manifest = (
        RunPaths(tmp_path).checkpoint(5, 1),
        RunPaths(tmp_path).checkpoint(4, 1) / "MANIFEST.json",
    )
    whole = manifest.read_bytes()
    manifest.write_bytes(whole[:-9])
    assert retention.remove_old_versions(tmp_path, 2, current) == []
    assert [version for version, _ in checkpoints.versions(tmp_path)] == [1, 2, 3, 4, 5]
    manifest.write_bytes(whole)
    retention.remove_old_versions(tmp_path, 2, current)
    assert [version for version, _ in checkpoints.versions(tmp_path)] == [1, 4, 5]


def test_the_best_evaluated_is_handed_on(tmp_path: Path) -> None:
    from fsbarrier.decisions import PublishDecision
    from fsbarrier.program import Context, Phase
    from fsbarrier.settings.sections import Settings

    rl = load_module("rl")

    def publication(iteration: int, reward: float | None, last: dict[str, Any] | None) -> dict[str, Any]:
        """What the publication of this iteration says, after an evaluation with this reward and the publication before."""
        evaluated = {} if reward is None else {"reward_mean": reward}
        decisions: dict[str, Any] = {"eval_rollout": {"iteration": iteration, "value": evaluated}}
        if last is not None:
            decisions["weights_publish"] = {"iteration": iteration - 1, "value": last}
        context = Context(
            *("run", RunPaths(tmp_path), Settings(), {}, None, 0, 1, (), 0, 2, iteration, 0),
            phase=Phase(11, "weights_publish"),
            decisions=decisions,
            python="python",
        )
        folder = RunPaths(tmp_path).checkpoint(iteration, 2)
        best = rl.publish(context, folder, iteration).best
        return PublishDecision(iteration, folder.name, best=best).as_json()

    one = publication(1, 0.5, None)
    assert (one["best"]["version"], one["best"]["folder"]) == (0, None)
    two = publication(2, 0.7, one)
    assert (two["best"]["version"], two["best"]["folder"]) == (1, "policy-000001.g0002")
    three = publication(3, None, two)
    four = publication(4, 0.6, three)
    assert (four["best"]["version"], four["best"]["reward"]) == (1, 0.7)
    assert publication(1, None, None)["best"] is None


def test_an_update_draws_from_the_iterations_that_are_set(tmp_path: Path) -> None:
    from fsbarrier.program import Context, Phase
    from fsbarrier.settings.sections import Settings, UpdateSettings

    rl = load_module("rl")
    paths = RunPaths(tmp_path)
    settings = Settings(update=UpdateSettings(recency=3))
    context = Context(
        *("run", paths, settings, {}, None, 0, 1, (), 0, 2, 2, 0),
        phase=Phase(8, "batch_prepare"),
        decisions={"train_aggregate": {"iteration": 2, "value": {"merged": "2.g02", "earlier": ["1.g01"]}}},
        python="python",
    )
    # Not what lies under the public name.
    assert rl.learned_from(context) == [
        str(paths.trajectories("train") / name) for name in ("2.g02", "1.g01")
    ]
    assert rl.earlier_merges(context) == ["2.g02", "1.g01"]
    assert rl.earlier_merges(replace(context, settings=Settings(update=UpdateSettings(recency=2)))) == [
        "2.g02"
    ]
    assert rl.earlier_merges(replace(context, decisions={})) == []
    alone = replace(context, iteration=9)
    assert rl.learned_from(alone) == [str(paths.merged("train", n)) for n in (9, 8, 7)]


def test_whoever_must_stop_removes_no_further_version(tmp_path: Path) -> None:
    """Between two removals the leader is asked whether it was cancelled meanwhile."""
    folders = [RunPaths(tmp_path).checkpoint(version, 1) for version in range(1, 6)]
    for folder in folders:
        folder.mkdir(parents=True)
    asked: list[int] = []

    def between() -> None:
        asked.append(sum(folder.is_dir() for folder in folders))
        if len(asked) == 2:
            raise RuntimeError("cancelled")

    with pytest.raises(RuntimeError, match="cancelled"):
        retention.remove_old_versions(tmp_path, 2, folders[-1], between=between)
    assert asked == [5, 4] and [folder.is_dir() for folder in folders] == [False, True, True, True, True]
