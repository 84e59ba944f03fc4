"""The training batch as the update reads it (written by prepare.py), and micro-batches padded for the model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from fsbarrier.errors import ProgramFailed


@dataclass(frozen=True)
class MicroBatch:
    """Padded on the right. tokens, attention, mask (bool), old: [batch, length]; weights: [batch]."""

    tokens: Tensor
    attention: Tensor
    mask: Tensor
    old: Tensor
    weights: Tensor


@dataclass(frozen=True)
class TrainingBatch:
    """Trajectories end to end: trajectory i is [offsets[i], offsets[i + 1]). `steps`: indices of each optimizer step."""

    token_ids: Tensor
    loss_mask: Tensor
    logprobs: Tensor
    offsets: Tensor
    weights: Tensor
    steps: tuple[Tensor, ...]

    @classmethod
    def load(cls, path: Path) -> Self:
        """Raises ProgramFailed for a file that is no batch."""
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
            names = ("token_ids", "loss_mask", "logprobs", "offsets", "weights")
            return cls(**{name: content[name] for name in names}, steps=tuple(content["steps"]))
        except (OSError, RuntimeError, KeyError, TypeError, ValueError) as error:
            raise ProgramFailed(f"{path} is no training batch: {str(error).splitlines()[0]}") from None

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
        parts = (tokens, attention, mask, old, self.weights[torch.tensor(indices)])
        return MicroBatch(*(part.to(device) for part in parts))
