"""The training batch: a torch file of plain tensors that phase 8 writes and every process of the update reads.

The tokens of all sequences are concatenated; sequence i is [offsets[i], offsets[i + 1]).

    token_ids  int32, of all sequences          weights  float32, one a sequence: advantages (grpo), rewards (rft)
    loss_mask  uint8: sampled by the policy     rewards  float32, one a sequence; for users' own trainers
    logprobs   float32, when it was sampled     current  uint8, one a sequence: sampled by the policy to be trained
    offsets    int64                            steps    for each optimizer step the indices of its sequences, int64
    engines    int32, two a sequence: the node and its replica that sampled it; -1 where that is not known
    teacher    float32, like logprobs, of a teacher; only with `algorithm.loss=distil`
    continues  uint8, one a sequence: a further segment of the trajectory of the sequence before it
    groups     int32, one a sequence: the number of its trajectory's group

A sequence that is not `current` was sampled by an older policy or in another run, so its log-probabilities are not this policy's. Those of
examples, which nobody sampled, are NaN. A sequence that is in no step is held out: the new policy is tried on it.
"""

from __future__ import annotations

import io
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from fsbarrier.data.trajectory import Trajectory
from fsbarrier.errors import ProgramFailed, first_line
from fsbarrier.specs import Identity
from fsbarrier.store import files
from fsbarrier.training.vision_inputs import VisionInputs


@dataclass(frozen=True, slots=True)
class TrainingSequence:
    """One input sequence of the model: a trajectory, or one segment of it. `images`: the files of those in it, in order."""

    token_ids: Tensor
    loss_mask: Tensor
    logprobs: Tensor
    weight: float
    reward: float
    current: bool
    engine: tuple[int, int] = (-1, -1)
    continues: bool = False
    group: int = 0
    teacher: Tensor | None = None
    images: Sequence[str] = ()


def engine_of(trajectory: Trajectory) -> tuple[int, int]:
    """The node rank and replica that sampled it; -1: unknown."""
    return int(trajectory.get("node_rank", -1)), int(trajectory.get("replica", -1))


def check(trajectory: Trajectory) -> None:
    """Check what every trajectory of a group needs. Raises ValueError."""
    if lacking := [name for name in ("policy_version", "reward", "valid") if name not in trajectory]:
        raise ValueError(f"it has no {lacking[0]}")
    if not isinstance(trajectory["policy_version"], int):
        raise ValueError(f"its policy_version is no whole number ({trajectory['policy_version']!r})")
    reward: object = trajectory["reward"]
    if not isinstance(reward, int | float) or not math.isfinite(reward):
        raise ValueError(f"its reward is no finite number ({reward!r})")


def sequences_of(
    trajectory: Trajectory, weight: float, current: bool, vocabulary: int, folder: Path = Path()
) -> list[TrainingSequence]:
    """Return a trajectory's sequences that contain sampled tokens. `folder` holds its images.

    Raises ValueError for one that cannot be trained on.
    """
    if lacking := [name for name in ("token_ids", "loss_mask", "logprobs") if name not in trajectory]:
        raise ValueError(f"it has no {lacking[0]}")
    try:
        tokens = torch.as_tensor(trajectory["token_ids"], dtype=torch.int32)
        mask = torch.as_tensor(trajectory["loss_mask"], dtype=torch.uint8)
        logprobs = torch.as_tensor(trajectory["logprobs"], dtype=torch.float32)
        of_teacher = trajectory.get("teacher_logprobs", ())
        teacher = torch.as_tensor(of_teacher, dtype=torch.float32) if len(of_teacher) else None
        starts = [int(start) for start in trajectory.get("segments", (0,))]
        images = [
            [str(folder / name) for name in paths] for paths in trajectory.get("images", [[]] * len(starts))
        ]
    except (TypeError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"token_ids, loss_mask, logprobs, teacher_logprobs and segments must be numbers: {first_line(error)}"
        ) from None
    given = [logprobs] if teacher is None else [logprobs, teacher]
    if {len(tokens)} != {len(mask), *map(len, given)}:
        raise ValueError("token_ids, loss_mask and logprobs have different lengths")
    if not all(bool(torch.isfinite(values[mask.bool()]).all()) for values in given):
        raise ValueError("a log-probability is not a finite number")
    if beyond := tokens[(tokens < 0) | (tokens >= vocabulary)].tolist():
        raise ValueError(f"token {beyond[0]} is not one of the model's {vocabulary}")
    reward = float(trajectory["reward"])
    sequences: list[TrainingSequence] = []
    if len(images) != len(starts):
        raise ValueError(f"it has {len(starts)} segments, and images of {len(images)}")
    for begin, end, paths in zip(starts, [*starts[1:], len(tokens)], images, strict=True):
        if not 0 <= begin <= end:
            raise ValueError(f"its segments do not begin one after the other ({starts})")
        sampled = mask[begin:end].clone()
        # The first token has no prediction.
        sampled[:1] = 0
        if int(sampled.sum()):
            parts = (tokens[begin:end], sampled, logprobs[begin:end])
            from_engine = engine_of(trajectory)
            sequence = TrainingSequence(
                *parts, weight, reward, current, from_engine, bool(sequences), images=paths
            )
            sequences.append(sequence if teacher is None else replace(sequence, teacher=teacher[begin:end]))
    return sequences


def minibatches(count: int, size: int, epochs: int, *, seed: str) -> list[Tensor]:
    """Return the indices of each optimizer step: each epoch is a shuffled pass, cut into pieces of about `size`, whose sizes differ by
    at most one."""
    steps: list[Tensor] = []
    for epoch in range(epochs if count else 0):
        order = list(range(count))
        random.Random(f"{seed}:{epoch}").shuffle(order)
        steps += torch.tensor(order, dtype=torch.int64).tensor_split(max(1, round(count / size)))
    return steps


def batch_metadata(identity: Identity, policy_version: int) -> dict[str, object]:
    """Where a batch comes from, and which policy it is to train."""
    return {
        "run_id": identity.run_id,
        "iteration": identity.iteration,
        "generation": identity.generation,
        "policy_version": policy_version,
    }


def write_batch(
    path: Path, sequences: Sequence[TrainingSequence], steps: list[Tensor], metadata: Mapping[str, object]
) -> None:
    """Write a batch file. Raises OSError."""
    lengths = torch.tensor([0, *(len(sequence.token_ids) for sequence in sequences)], dtype=torch.int64)

    def flat(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
        return torch.cat(parts) if parts else torch.zeros(0, dtype=dtype)

    content = {
        "token_ids": flat([sequence.token_ids for sequence in sequences], torch.int32),
        "loss_mask": flat([sequence.loss_mask for sequence in sequences], torch.uint8),
        "logprobs": flat([sequence.logprobs for sequence in sequences], torch.float32),
        "offsets": lengths.cumsum(0),
        "weights": torch.tensor([sequence.weight for sequence in sequences], dtype=torch.float32),
        "rewards": torch.tensor([sequence.reward for sequence in sequences], dtype=torch.float32),
        "current": torch.tensor([sequence.current for sequence in sequences], dtype=torch.uint8),
        "engines": torch.tensor([sequence.engine for sequence in sequences], dtype=torch.int32).reshape(
            -1, 2
        ),
        "continues": torch.tensor([sequence.continues for sequence in sequences], dtype=torch.uint8),
        "groups": torch.tensor([sequence.group for sequence in sequences], dtype=torch.int32),
        "steps": steps,
        "images": [list(sequence.images) for sequence in sequences],
        "metadata": dict(metadata),
    }
    teachers = [sequence.teacher for sequence in sequences if sequence.teacher is not None]
    if sequences and len(teachers) == len(sequences):
        content["teacher"] = torch.cat(teachers)
    buffer = io.BytesIO()
    torch.save(content, buffer)
    files.make_dirs(path.parent)
    files.write_atomic(path, buffer.getvalue(), durable=True)


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """A batch as the update reads it; the fields are the file's, and both are described above.

    `old`, `reference`: like `logprobs`, but the trainer's own before the first step, and the reference policy's; `certainty`: the
    self-certainty of each token; `token_weights`: a weight for each token in place of its sequence's (advantages.py); `values`,
    `returns`: the critic's values before the first step, and its targets. None: not computed. `vision`: makes the
    model's image inputs; None if it takes no images.
    """

    token_ids: Tensor
    loss_mask: Tensor
    logprobs: Tensor
    offsets: Tensor
    weights: Tensor
    current: Tensor
    engines: Tensor
    continues: Tensor
    groups: Tensor
    steps: tuple[Tensor, ...]
    teacher: Tensor | None = None
    old: Tensor | None = None
    reference: Tensor | None = None
    certainty: Tensor | None = None
    token_weights: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None
    images: Sequence[Sequence[str]] = ()
    vision: VisionInputs | None = None

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a batch file. Raises ProgramFailed if the file is not a batch."""
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:
            # On damaged data the unpickler may raise anything.
            raise ProgramFailed(f"{path} is not a training batch: {first_line(error)}") from None
        of_sequences = ("weights", "current", "engines", "continues", "groups")
        names = ("token_ids", "loss_mask", "logprobs", "offsets", *of_sequences, "steps")
        if not isinstance(content, dict) or not content.keys() >= {*names}:
            raise ProgramFailed(f"{path} is not a training batch: it lacks some of {', '.join(names)}")
        tensors = {name: content[name] for name in names[:-1]}
        return cls(
            **tensors,
            steps=tuple(content["steps"]),
            teacher=content.get("teacher"),
            images=content.get("images", ()),
        )

    def with_vision(self, vision: VisionInputs | None) -> Self:
        """Add the maker of the model's image inputs. Raises ProgramFailed if the batch has images and the model takes none."""
        if vision is None and any(self.images):
            raise ProgramFailed("the batch has images, and the model takes none")
        return replace(self, vision=vision)

    def lengths(self) -> list[int]:
        """The number of tokens of each sequence."""
        lengths: list[int] = self.offsets.diff().tolist()
        return lengths

    def held_out(self) -> list[int]:
        """The sequences that no step trains on."""
        trained = {index for step in self.steps for index in step.tolist()}
        return [index for index in range(len(self.weights)) if index not in trained]

    def sampled_tokens(self, indices: Tensor) -> Tensor:
        """The number of sampled tokens of each of these sequences."""
        before = torch.nn.functional.pad(self.loss_mask.cumsum(0), (1, 0))
        return before[self.offsets[indices + 1]] - before[self.offsets[indices]]

    def tokens_of_trajectories(self) -> Tensor:
        """The number of sampled tokens of each trajectory, with all its segments."""
        trajectory = (self.continues == 0).cumsum(0) - 1
        counts = torch.zeros(int(trajectory[-1]) + 1, dtype=torch.int64)
        return counts.index_add(0, trajectory, self.sampled_tokens(torch.arange(len(trajectory))))
