"""Phase 8: turns merged trajectories into one training batch, with advantages and a fixed order of minibatches.

`python -m fsbarrier.workers.prepare --spec SPEC.json`. fsbarrier/training/batch.py describes the batch.
"""

from __future__ import annotations

import heapq
import math
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, groupby
from pathlib import Path
from typing import TypeVar

import torch

from fsbarrier.data.trajectory import Trajectory
from fsbarrier.engine.model import number, text_config
from fsbarrier.errors import UsageError
from fsbarrier.processes.worker_contract import ProgressWriter, run_worker
from fsbarrier.rundir.names import IMAGES_FOLDER
from fsbarrier.settings.sections import AlgorithmSettings, Settings
from fsbarrier.specs import PrepareReport, PrepareSpec
from fsbarrier.store import reading
from fsbarrier.training.advantages import batch_advantages
from fsbarrier.training.batch import (
    TrainingSequence,
    batch_metadata,
    check,
    minibatches,
    sequences_of,
    write_batch,
)
from fsbarrier.training.group_weights import counted_reward, weigh_group
from fsbarrier.trajectories import load

T = TypeVar("T")


@dataclass
class LearnedFrom:
    """Totals of the groups read."""

    groups: int = 0
    trajectories: int = 0
    reward: float = 0.0
    #: the sum over trajectories of how many policy versions older than the policy to train they are
    versions: float = 0.0


@PrepareSpec.program
def work(spec: PrepareSpec, settings: Settings, progress: ProgressWriter) -> PrepareReport:
    identity = spec.identity
    seed = f"{settings.rollout.seed}:{identity.iteration}"
    recency, seen = settings.update.recency, LearnedFrom()
    by_age = (
        (age, teaching_groups(merged, spec, settings, seen, progress))
        for age, merged in enumerate(spec.merged[:recency])
        # An earlier iteration may not have been rolled out, or its file was removed.
        if not age or merged.exists()
    )
    chosen = drawn(by_age, recency, seed=f"{seed}:recency")
    numbered = [replace(sequence, group=number) for number, group in enumerate(chosen) for sequence in group]
    sequences = weighed_as_batch(numbered, settings.algorithm)
    steps = minibatches(len(sequences), settings.trainer.minibatch, settings.trainer.epochs, seed=seed)
    metadata = batch_metadata(identity, spec.policy_version)
    write_batch(spec.batch, sequences, steps, metadata)
    return PrepareReport(
        trajectories=len(sequences),
        groups=seen.groups,
        dropped_groups=seen.groups - len(chosen),
        # The difference is meaningless for another run's rollouts, so it is kept from falling below 0.
        staleness=max(0.0, seen.versions / seen.trajectories) if seen.trajectories else None,
        replayed=sum(not sequence.current for sequence in sequences),
        tokens=sum(int(sequence.loss_mask.sum()) for sequence in sequences),
        steps=len(steps),
        reward_mean=seen.reward / seen.trajectories if seen.trajectories else None,
    )


def teaching_groups(
    merged: Path, spec: PrepareSpec, settings: Settings, seen: LearnedFrom, progress: ProgressWriter
) -> Iterator[list[TrainingSequence]]:
    """Yield the sequences of each group in a file that has a training signal."""
    if not merged.exists():
        raise UsageError(
            f"{merged}: no such file, so iteration {spec.identity.iteration} has nothing to train on; roll out first "
            "(--rl-phase rollout)"
        )
    run_id, groups = read_merged(merged)
    vocabulary = vocabulary_of(spec.model)
    for group in groups:
        for trajectory in group:
            with naming(trajectory, merged):
                check(trajectory)
                seen.versions += spec.policy_version - mean_version(trajectory)
        seen.groups += 1
        seen.trajectories += len(group)
        seen.reward += sum(counted_reward(trajectory) for trajectory in group)
        progress.show(seen.trajectories, 0, "trajectories")
        # Whether it was sampled by the current policy, in this run.
        current = run_id in (None, spec.identity.run_id) and group[0]["policy_version"] == spec.policy_version
        weighed = weigh_group(group, settings.algorithm, settings.rollout.max_tokens)
        sequences: list[TrainingSequence] = []
        for trajectory, weight in weighed:
            with naming(trajectory, merged):
                made = sequences_of(trajectory, weight, current, vocabulary, images_of(trajectory, merged))
                # The teacher has marked all but failed tasks, which have no sampled tokens.
                if settings.algorithm.loss == "distil" and any(sequence.teacher is None for sequence in made):
                    raise ValueError(
                        "it has no teacher_logprobs, which rollouts have with algorithm.loss=distil"
                    )
                sequences += made
        if sequences:
            yield sequences


def drawn(by_age: Iterable[tuple[int, Iterable[T]]], iterations: int, *, seed: str) -> Sequence[T]:
    """Draw as many groups as the newest iteration (age 0) has from the last `iterations` ones, newest first; they keep their order.

    Weighted sampling without replacement in one pass: each group gets the key u ** (1 / weight), u uniform, and the largest keys win
    (Efraimidis and Spirakis 2006). Other groups are discarded immediately, so memory holds only one batch.
    """
    generator = random.Random(seed)

    def keyed(age: int, groups: Iterable[T]) -> Iterable[tuple[float, int, int, T]]:
        # A group's weight falls from 1 in the newest iteration to nearly 0. Keys are logarithms, because they could underflow.
        weight = ((iterations - age) / iterations) ** 2
        return (
            (math.log(1.0 - generator.random()) / weight, age, place, group)
            for place, group in enumerate(groups)
        )

    first, *others = (keyed(age, groups) for age, groups in by_age)
    newest = list(first)
    best = heapq.nlargest(len(newest), chain(newest, *others), key=lambda candidate: candidate[0])
    return [group for _, _, _, group in sorted(best, key=lambda candidate: candidate[1:3])]


def read_merged(path: Path) -> tuple[str | None, Iterator[list[Trajectory]]]:
    """Return the run that made a merged file (None: unknown), and its groups. Users may also make the file with torch.save.

    Raises UsageError for other files, StoreError.
    """
    content = load(path)
    run_id, metadata = None, content["metadata"]
    if metadata.get("finished") is False:
        # A growing file of a rank contains only a part of the rollouts.
        raise UsageError(f"{path} is a rank's unfinished file; merge it first (fsbarrier aggregate)")
    if metadata.get("run_id") is not None:
        run_id = str(metadata["run_id"])
    if not all(isinstance(trajectory, dict) for trajectory in content["trajectories"]):
        raise UsageError(f"{path}: a trajectory is no dictionary")
    # In a merged file groups are contiguous.
    return run_id, (list(group) for _, group in groupby(content["trajectories"], key=_origin))


def _origin(trajectory: Trajectory) -> tuple[object, object]:
    return trajectory.get("task_index", trajectory.get("task_id")), trajectory.get("policy_version")


def mean_version(trajectory: Trajectory) -> float:
    """The policy version that sampled a trajectory; the mean over its tokens if several have. Raises ValueError."""
    try:
        of_tokens = [int(version) for version in trajectory.get("policy_versions", ()) if version >= 0]
    except TypeError:
        raise ValueError("policy_versions must be numbers") from None
    return sum(of_tokens) / len(of_tokens) if of_tokens else trajectory["policy_version"]


def images_of(trajectory: Trajectory, merged: Path) -> Path:
    """The folder of a trajectory's images, which lies beside the merged file."""
    return merged.with_name(
        IMAGES_FOLDER.build(trajectory.get("split", "train"), trajectory.get("iteration", 0))
    ).absolute()


@contextmanager
def naming(trajectory: Trajectory, merged: Path) -> Iterator[None]:
    """Turn a ValueError into a UsageError that names the trajectory."""
    try:
        yield
    except ValueError as error:
        where = f"task {trajectory.get('task_id')}, sample {trajectory.get('sample')}"
        raise UsageError(f"{merged}: {where}: {error}") from None


def vocabulary_of(model: Path) -> int:
    """The size of a model's vocabulary."""
    config = text_config(reading.json_object(model / "config.json", UsageError))
    return number(config, "vocab_size", sys.maxsize)


def weighed_as_batch(
    sequences: Sequence[TrainingSequence], algorithm: AlgorithmSettings
) -> list[TrainingSequence]:
    """Apply the batch-level part to the sequences' weights. If this needs a model's numbers, the update does it instead."""
    if algorithm.kl_in_reward or algorithm.self_certainty or algorithm.has_critic:
        return list(sequences)
    weights = torch.tensor([sequence.weight for sequence in sequences], dtype=torch.float64)
    tokens = torch.tensor([int(sequence.loss_mask.sum()) for sequence in sequences])
    weights = batch_advantages(weights, tokens, algorithm)
    return [
        replace(sequence, weight=weight) for sequence, weight in zip(sequences, weights.tolist(), strict=True)
    ]


if __name__ == "__main__":
    sys.exit(run_worker(work))
