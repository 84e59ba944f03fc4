"""Splits a minibatch into micro-batches: which sequences run through the model at once, on which process, padded or packed."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from typing import Self

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fsbarrier.training.batch import TrainingBatch


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The inputs of a forward pass, and the values that the loss needs.

    `inputs` are the model's arguments. Their input_ids hold the sequences below each other, padded on the right, or *packed*: one after
    the other in a single row, which only suits an attention that keeps them apart. `wanted` (bool, like input_ids) are the tokens that
    the policy sampled. For the loss: mask (bool), engine, old, reference (or None) [sequences, longest], padded in either case; weights
    [sequences], or [sequences, longest] where each token has its own; current (bool) [sequences]; for a critic values and returns.
    """

    inputs: dict[str, Tensor]
    wanted: Tensor
    mask: Tensor
    engine: Tensor
    old: Tensor
    weights: Tensor
    current: Tensor
    reference: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None

    @classmethod
    def of(cls, batch: TrainingBatch, indices: list[int], device: torch.device, *, packed: bool) -> Self:
        """Make a micro-batch of these sequences of a batch."""
        spans = [slice(int(batch.offsets[i]), int(batch.offsets[i + 1])) for i in indices]
        tokens = [batch.token_ids[span].long() for span in spans]
        sampled = [batch.loss_mask[span].bool() for span in spans]
        mask = pad_sequence(sampled, batch_first=True)
        # The first token has no prediction.
        mask[:, 0] = False

        def padded(values: Tensor) -> Tensor:
            return pad_sequence([values[span] for span in spans], batch_first=True)

        if packed:
            # Restarting positions mark the sequence boundaries for the attention.
            positions = torch.cat([torch.arange(len(sequence)) for sequence in tokens])
            inputs = {"input_ids": torch.cat(tokens)[None], "position_ids": positions[None]}
            wanted = torch.cat([row[: len(sequence)] for row, sequence in zip(mask, tokens, strict=True)])[
                None
            ]
        else:
            attention = pad_sequence([torch.ones_like(sequence) for sequence in tokens], batch_first=True)
            inputs = {"input_ids": pad_sequence(tokens, batch_first=True), "attention_mask": attention}
            wanted = mask
        if batch.vision is not None:
            files = [batch.images[index] if batch.images else () for index in indices]
            inputs, wanted = batch.vision.added(inputs, wanted, files)
        chosen = torch.tensor(indices)
        engine, old = padded(batch.logprobs), padded(batch.logprobs if batch.old is None else batch.old)
        by_token = batch.token_weights
        weights = batch.weights[chosen] if by_token is None else padded(by_token)
        parts = [wanted, mask, engine, old, weights, batch.current[chosen].bool()]
        further = (batch.reference, batch.values, batch.returns)
        on_device = {name: value.to(device) for name, value in inputs.items()}
        return cls(
            on_device,
            *(part.to(device) for part in parts),
            *(None if tensor is None else padded(tensor).to(device) for tensor in further),
        )

    def placed(self, output: Tensor) -> Tensor:
        """Place the model's outputs for the wanted tokens in a [sequences, longest] tensor for the loss; 0 elsewhere."""
        return torch.zeros_like(self.engine).masked_scatter(self.mask, output)


def plan(
    indices: list[int], lengths: list[int], world: int, *, most_tokens: int, packed: bool
) -> list[list[list[int]]]:
    """Return a minibatch's micro-batches: [rank][round] -> indices of sequences, in the same number of rounds for every rank.

    Sequences are dealt out by length, so that ranks get equal work and micro-batches little padding. A micro-batch has at most
    `most_tokens` tokens, padding included unless it is packed, but always at least one sequence. A rank with nothing left
    gets empty ones. Every process computes the whole plan, so nothing needs to be agreed on.
    """
    dealt = sorted(indices, key=lambda index: (-lengths[index], index))
    ranks = [_micro_batches(dealt[rank::world], lengths, most_tokens, packed) for rank in range(world)]
    rounds = list(zip_longest(*ranks, fillvalue=[]))
    return [[list(round_sizes[rank]) for round_sizes in rounds] for rank in range(world)]


def _micro_batches(
    longest_first: list[int], lengths: list[int], most_tokens: int, packed: bool
) -> list[list[int]]:
    batches: list[list[int]] = []
    tokens = 0
    for index in longest_first:
        last = batches[-1] if batches else []
        # The first sequence of a micro-batch is its longest; the others are padded to its length.
        more = lengths[index] if packed or not last else lengths[last[0]]
        if last and tokens + more <= most_tokens:
            last.append(index)
            tokens += more
        else:
            batches.append([index])
            tokens = lengths[index]
    return batches
