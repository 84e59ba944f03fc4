"""The optimizer steps of one update: gradients of each minibatch's loss, clipped and applied."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from fsbarrier.errors import ProgramFailed
from fsbarrier.settings.sections import Settings
from fsbarrier.training import logprob_gap
from fsbarrier.training.batch import TrainingBatch
from fsbarrier.training.logprob_gap import GapSums, LogprobGap
from fsbarrier.training.losses import TOKEN_SUMS, Divisor, TokenValues, minibatch_loss
from fsbarrier.training.micro_batch import MicroBatch, plan
from fsbarrier.training.optimizer import learning_rate_of
from fsbarrier.training.trainer import Trainer


@dataclass
class Sums:
    """Sums over optimizer steps, the same on every process."""

    # Losses, and gradient norms before clipping.
    loss: float = 0.0
    grad_norm: float = 0.0
    tokens: int = 0
    # Sums over tokens, by name (losses.TOKEN_SUMS).
    of_tokens: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(TOKEN_SUMS, 0.0))
    # Measured only in the first step, before the weights change.
    gap: LogprobGap = field(default_factory=LogprobGap)
    # In the last step; None if there was no step.
    learning_rate: float | None = None


def train(
    trainer: Trainer,
    batch: TrainingBatch,
    settings: Settings,
    model_folder: Path,
    show: Callable[[int], None] = lambda done: None,
) -> Sums:
    """Do all optimizer steps of a batch; `show` receives the number of finished ones. Raises ProgramFailed; then nothing is saved."""
    totals = Sums()
    for number, indices in enumerate(batch.steps, start=1):
        # The log-probability gap is only meaningful before the first step changes the weights.
        gap_sums = GapSums(batch, trainer.processes.device) if number == 1 else None
        step = accumulate(trainer, batch, indices, settings, gap_sums)
        if gap_sums is not None:
            totals.gap = gap_sums.over_all(trainer.processes)
            logprob_gap.check(totals.gap, settings, trainer.processes, model_folder)
        totals.learning_rate = learning_rate_of(settings.optimizer, trainer.optimizer_steps + 1)
        grad_norm = trainer.backend.step(totals.learning_rate, settings.optimizer.grad_clip)
        if not math.isfinite(step.loss) or not math.isfinite(grad_norm):
            raise ProgramFailed(
                f"optimizer step {number}: loss {step.loss}, gradient norm {grad_norm}; "
                f"nothing was saved; try a smaller optimizer.lr"
            )
        trainer.optimizer_steps += 1
        totals.loss += step.loss
        totals.grad_norm += grad_norm
        totals.tokens += step.tokens
        totals.of_tokens = {name: one + step.of_tokens[name] for name, one in totals.of_tokens.items()}
        show(number)
    return totals


def accumulate(
    trainer: Trainer, batch: TrainingBatch, indices: Tensor, settings: Settings, gap_sums: GapSums | None
) -> Sums:
    """Compute the gradient of one minibatch's loss; returns the sums over all processes.

    Every process runs the same number of micro-batches, because all must take part in the all-gathers of a sharded policy; a process
    without sequences runs the minibatch's first one with weight zero. `gap_sums`: accumulates the log-probability gap, if given.
    """
    processes = trainer.processes
    mine = plan(
        indices.tolist(),
        batch.lengths(),
        processes.world,
        most_tokens=settings.trainer.max_tokens_per_micro_batch,
        packed=trainer.packs,
    )[processes.rank]
    sampled = batch.sampled_tokens(indices)
    divisor = Divisor(int(sampled.sum()), int(sampled.count_nonzero()), settings.rollout.max_tokens)
    sums = torch.zeros(1 + len(TOKEN_SUMS), dtype=torch.float64, device=processes.device)
    for number, chosen in enumerate(mine, start=1):
        micro = MicroBatch.of(batch, chosen or indices[:1].tolist(), processes.device, packed=trainer.packs)
        mask = micro.mask if chosen else torch.zeros_like(micro.mask)
        found = trainer.backend.model(micro.inputs, micro.wanted, settings.rollout.temperature)
        new, entropy = (micro.placed(one) for one in found)
        values = TokenValues(new, micro.old, micro.engine, entropy, micro.reference)
        part = minibatch_loss(settings.algorithm, values, micro.weights, mask, divisor)
        # Gradients are summed over micro-batches and processes, which gives the gradient of the whole minibatch's loss.
        trainer.backend.backward(part.loss, last=number == len(mine))
        sums += torch.cat([part.loss.detach()[None], part.sums])
        if gap_sums is not None:
            gap_sums.add(new, micro, mask, chosen)
    loss, *of_tokens = processes.sum(sums).tolist()
    return Sums(loss, tokens=divisor.tokens, of_tokens=dict(zip(TOKEN_SUMS, of_tokens, strict=True)))
