"""Micro-batches: which sequences of a minibatch run through the model at once, on which process, and padded how."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from typing import Self

import torch
from torch import Tensor

from fsbarrier.training.batch import TrainingBatch


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Padded on the right. tokens, attention, mask (bool), old: [batch, length]; weights, current (bool): [batch]."""

    tokens: Tensor
    attention: Tensor
    mask: Tensor
    old: Tensor
    weights: Tensor
    current: Tensor

    @classmethod
    def of(cls, batch: TrainingBatch, indices: list[int], device: torch.device) -> Self:
        """These sequences of a batch, padded to the longest of them."""
        spans = [slice(int(batch.offsets[i]), int(batch.offsets[i + 1])) for i in indices]
        length = max(span.stop - span.start for span in spans)
        shape = (len(spans), length)
        tokens = torch.zeros(shape, dtype=torch.int64)
        attention = torch.zeros(shape, dtype=torch.int64)
        mask = torch.zeros(shape, dtype=torch.bool)
        old = torch.zeros(shape, dtype=torch.float32)
        for row, span in enumerate(spans):
            end = span.stop - span.start
            tokens[row, :end] = batch.token_ids[span]
            attention[row, :end] = 1
            mask[row, :end] = batch.loss_mask[span].bool()
            old[row, :end] = batch.logprobs[span]
        # Nothing predicts the first token.
        mask[:, 0] = False
        chosen = torch.tensor(indices)
        parts = (tokens, attention, mask, old, batch.weights[chosen], batch.current[chosen].bool())
        return cls(*(part.to(device) for part in parts))

    def from_first_sampled(self) -> Self:
        """Without the columns that no loss needs: the first column left predicts the first sampled token of any row."""
        sampled = self.mask.any(dim=0).nonzero()
        first = int(sampled[0]) if len(sampled) else self.tokens.shape[1] - 1
        kept = slice(first - 1, None)
        parts = (self.tokens, self.attention, self.mask, self.old)
        tokens, attention, mask, old = (part[:, kept] for part in parts)
        return type(self)(tokens, attention, mask, old, self.weights, self.current)


def plan(
    indices: list[int], lengths: list[int], world: int, *, most: int, most_tokens: int
) -> list[list[list[int]]]:
    """One minibatch's micro-batches: [rank][round] -> indices of sequences, in the same number of rounds for every rank.

    Dealt out by length, so that ranks get equal work and a micro-batch little padding. A micro-batch has at most `most`
    sequences and, padding included, `most_tokens` tokens (always at least one sequence). A rank with nothing left has an
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
        # The first of a micro-batch is its longest, to which the others are padded.
        if current and len(current) < most and (len(current) + 1) * lengths[current[0]] <= most_tokens:
            current.append(index)
        else:
            found.append([index])
    return found
