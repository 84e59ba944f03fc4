"""Phase 8: merged trajectories to one training batch, with advantages and the order of the minibatches fixed.

`python -m fsbarrier.workers.prepare --spec SPEC.json`. fsbarrier/training/batch.py says what the batch is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypedDict

import torch

from fsbarrier.errors import UsageError
from fsbarrier.settings.sections import AlgorithmSettings, Settings
from fsbarrier.supervision.worker_contract import ProgressWriter, run_worker
from fsbarrier.training import replay
from fsbarrier.training.advantages import batch_advantages, counted_reward, weigh_group
from fsbarrier.training.batch import TrainingSequence, engine_of, minibatches, sequences_of, write_batch
from fsbarrier.training.trajectory_source import merged_files, read_groups, run_of


@dataclass
class LearnedFrom:
    """What was there to learn from, added up while it is read."""

    groups: int = 0
    # How many of the groups were left out, because their engine samples otherwise than the trainer computes.
    left_out: int = 0
    trajectories: int = 0
    reward: float = 0.0


class PrepareSpec(TypedDict):
    """What this program reads of its spec."""

    run_id: str
    iteration: int
    generation: int
    policy_version: int
    #: what the batch is drawn from, this iteration's merged file first
    merged: list[str]
    #: node rank and replica of engines that sampled otherwise than the trainer computes: what they sampled now is left out
    without_engines: list[list[int]]
    #: the file to write
    batch: str


def main(spec: PrepareSpec, settings: Settings, progress: ProgressWriter) -> dict[str, object]:
    named = [Path(path) for path in spec["merged"]]
    seed = f"{settings.rollout.seed}:{spec['iteration']}"
    drawing = replay.draws(settings.update)
    draw: replay.Draw[list[TrainingSequence]] = replay.Draw(settings.update, seed=f"{seed}:recency")
    seen = LearnedFrom()
    chosen: list[list[TrainingSequence]] = []
    for age, merged in enumerate(merged_files(named, spec["iteration"], settings.update.recency)):
        if age and drawing and not merged.exists():
            # Its iteration was not rolled out, or is no longer kept.
            continue
        groups = teaching_groups(merged, spec, settings, seen, progress)
        if drawing:
            draw.offer(age, groups)
        else:
            chosen.extend(groups)
    chosen.extend(draw.chosen())
    sequences = weighed_as_batch([sequence for group in chosen for sequence in group], settings.algorithm)
    steps = minibatches(len(sequences), settings.trainer.minibatch, settings.trainer.epochs, seed=seed)
    out = Path(spec["batch"])
    metadata = {
        "run_id": spec["run_id"],
        "iteration": spec["iteration"],
        "generation": spec["generation"],
        "policy_version": spec["policy_version"],
    }
    write_batch(out, sequences, steps, metadata)
    return {
        "batch": str(out),
        "trajectories": len(sequences),
        "groups": seen.groups,
        "left_out_groups": seen.left_out,
        "dropped_groups": seen.groups - len(chosen),
        "replayed": sum(not sequence.current for sequence in sequences),
        "tokens": sum(int(sequence.loss_mask.sum()) for sequence in sequences),
        "steps": len(steps),
        "reward_mean": seen.reward / seen.trajectories if seen.trajectories else None,
    }


def teaching_groups(
    merged: Path, spec: PrepareSpec, settings: Settings, seen: LearnedFrom, progress: ProgressWriter
) -> Iterator[list[TrainingSequence]]:
    """The sequences of each group of a file from which there is something to learn."""
    if not merged.exists():
        raise UsageError(
            f"{merged}: not there, so iteration {spec['iteration']} has nothing to learn from; roll out first "
            "(--rl-phase rollout), or name what to learn from (update.trajectories)"
        )
    run_id = run_of(merged)
    without = {(node, replica) for node, replica in spec["without_engines"]}
    for group in read_groups(merged):
        seen.groups += 1
        seen.trajectories += len(group)
        seen.reward += sum(counted_reward(trajectory) for trajectory in group)
        progress.show(seen.trajectories, 0, "trajectories")
        # Whether the policy to be trained has sampled it, in this run.
        current = run_id in (None, spec["run_id"]) and group[0]["policy_version"] == spec["policy_version"]
        if current and engine_of(group[0]) in without:
            seen.left_out += 1
            continue
        weighed = weigh_group(group, settings.algorithm, settings.rollout.max_tokens)
        sequences = [
            one for trajectory, weight in weighed for one in sequences_of(trajectory, weight, current)
        ]
        if sequences:
            yield sequences


def weighed_as_batch(
    sequences: Sequence[TrainingSequence], algorithm: AlgorithmSettings
) -> list[TrainingSequence]:
    """The same sequences with what the whole batch decides about their weights."""
    weights = torch.tensor([one.weight for one in sequences], dtype=torch.float64)
    tokens = torch.tensor([int(one.loss_mask.sum()) for one in sequences])
    weights = batch_advantages(weights, tokens, algorithm)
    return [replace(one, weight=weight) for one, weight in zip(sequences, weights.tolist(), strict=True)]


if __name__ == "__main__":
    sys.exit(run_worker(main))
