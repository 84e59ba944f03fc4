"""The training batch as the update reads it (written by prepare.py), and micro-batches padded for the model."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from fsbarrier.errors import ProgramFailed


@dataclass(frozen=True)
class MicroBatch:
    """Padded on the right. tokens, attention, mask (bool), old: [batch, length]; weights, current (bool): [batch]."""

    tokens: Tensor
    attention: Tensor
    mask: Tensor
    old: Tensor
    weights: Tensor
    current: Tensor

    def tail(self) -> Self:
        """Without the columns that no loss needs: the first column left predicts the first sampled token of any row."""
        sampled = self.mask.any(dim=0).nonzero()
        first = int(sampled[0]) if len(sampled) else self.tokens.shape[1] - 1
        cut = slice(first - 1, None)
        parts = (self.tokens, self.attention, self.mask, self.old)
        tokens, attention, mask, old = (part[:, cut] for part in parts)
        return type(self)(tokens, attention, mask, old, self.weights, self.current)


@dataclass(frozen=True)
class TrainingBatch:
    """Trajectories end to end: trajectory i is [offsets[i], offsets[i + 1]). `steps`: indices of each optimizer step.

    `current`: whether the policy to be trained has sampled it.
    """

    token_ids: Tensor
    loss_mask: Tensor
    logprobs: Tensor
    offsets: Tensor
    weights: Tensor
    current: Tensor
    steps: tuple[Tensor, ...]

    @classmethod
    def load(cls, path: Path) -> Self:
        """Raises ProgramFailed for a file that is no batch."""
        content = load_tensors(path, "training batch")
        names = ("token_ids", "loss_mask", "logprobs", "offsets", "weights", "current", "steps")
        missing = [name for name in names if name not in content]
        if missing:
            raise ProgramFailed(f"{path} is no training batch: it has no {missing[0]}")
        tensors = {name: content[name] for name in names[:-1]}
        return cls(**tensors, steps=tuple(content["steps"]))

    def lengths(self) -> list[int]:
        """How many tokens each trajectory has."""
        return [int(length) for length in self.offsets.diff()]

    def sampled_tokens(self, indices: Tensor) -> int:
        """How many tokens of these trajectories the model sampled."""
        return sum(int(self.loss_mask[self.offsets[i] : self.offsets[i + 1]].sum()) for i in indices.tolist())

    def micro_batch(self, indices: list[int], device: torch.device) -> MicroBatch:
        """These trajectories, padded to the longest of them."""
        spans = [slice(int(self.offsets[i]), int(self.offsets[i + 1])) for i in indices]
        length = max(span.stop - span.start for span in spans)
        shape = (len(spans), length)
        tokens = torch.zeros(shape, dtype=torch.int64)
        attention = torch.zeros(shape, dtype=torch.int64)
        mask = torch.zeros(shape, dtype=torch.bool)
        old = torch.zeros(shape, dtype=torch.float32)
        for row, span in enumerate(spans):
            end = span.stop - span.start
            tokens[row, :end] = self.token_ids[span]
            attention[row, :end] = 1
            mask[row, :end] = self.loss_mask[span].bool()
            old[row, :end] = self.logprobs[span]
        mask[:, 0] = False  # nothing predicts the first token
        chosen = torch.tensor(indices)
        parts = (tokens, attention, mask, old, self.weights[chosen], self.current[chosen].bool())
        return MicroBatch(*(part.to(device) for part in parts))


def load_tensors(path: Path, what: str) -> dict[str, Any]:
    """The dict in a torch file, never unpickled without restraint. Raises ProgramFailed naming `what` it should have been."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ProgramFailed(f"{path} is no {what}: {error.strerror or error}") from None
    except Exception as error:  # on damaged bytes the unpickler fails in every way there is
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise ProgramFailed(f"{path} is no {what}: {first}") from None
    if not isinstance(content, dict):
        raise ProgramFailed(f"{path} is no {what}: it holds a {type(content).__name__}")
    return content


def plan(
    indices: list[int], lengths: list[int], world: int, *, most: int, most_tokens: int
) -> list[list[list[int]]]:
    """One minibatch's micro-batches: [rank][round] -> indices of trajectories, in the same number of rounds for every rank.

    Dealt out by length, so that ranks get equal work and a micro-batch little padding. A micro-batch has at most `most`
    trajectories and, padding included, `most_tokens` tokens (always at least one trajectory). A rank with nothing left has an
    empty one. Every process computes the whole plan, so that nothing needs to be agreed on.
    """
    dealt = sorted(indices, key=lambda index: (-lengths[index], index))
    ranks = [_micro_batches(dealt[rank::world], lengths, most, most_tokens) for rank in range(world)]
    rounds = list(zip_longest(*ranks, fillvalue=[]))
    return [[list(one[rank]) for one in rounds] for rank in range(world)]


def _micro_batches(
    longest_first: list[int], lengths: list[int], most: int, most_tokens: int
) -> list[list[int]]:
    found: list[list[int]] = []
    for index in longest_first:
        current = found[-1] if found else []
        # the first of a micro-batch is its longest, to which the others are padded
        if current and len(current) < most and (len(current) + 1) * lengths[current[0]] <= most_tokens:
            current.append(index)
        else:
            found.append([index])
    return found
