"""The optimizer steps of one update: gradients of each minibatch's token mean, clipped and applied."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from fsbarrier.errors import ProgramFailed
from fsbarrier.settings.sections import OptimizerSettings, Settings
from fsbarrier.training import logprob_gap
from fsbarrier.training.batch import TrainingBatch
from fsbarrier.training.logprob_gap import GapSums, LogprobGap
from fsbarrier.training.losses import policy_loss
from fsbarrier.training.micro_batch import MicroBatch, plan
from fsbarrier.training.trainer import Trainer


@dataclass
class Sums:
    """Sums over the tokens of some steps, the same on every process. `clipped`, `surprise`: see losses.LossSums."""

    loss: float = 0.0
    clipped: float = 0.0
    surprise: float = 0.0
    tokens: int = 0
    # The norms of the steps' gradients before they were clipped.
    grad_norm: float = 0.0
    # Of the first step alone.
    gap: LogprobGap = field(default_factory=LogprobGap)


def train(
    trainer: Trainer,
    batch: TrainingBatch,
    settings: Settings,
    model_folder: Path,
    show: Callable[[int], None] = lambda done: None,
) -> Sums:
    """All optimizer steps of a batch; `show` is called with how many are done. Raises ProgramFailed, and nothing is saved then."""
    totals = Sums()
    for number, indices in enumerate(batch.steps, start=1):
        # The gap is the engine's as long as the weights are: before the first step.
        gap_sums = GapSums(trainer.processes.device) if number == 1 else None
        step = accumulate(trainer, batch, indices, settings, gap_sums)
        if gap_sums is not None:
            totals.gap = gap_sums.over_all(trainer.processes)
            logprob_gap.check(totals.gap, settings, trainer.processes, model_folder)
        learning_rate = learning_rate_of(settings.optimizer, trainer.optimizer_steps + 1)
        grad_norm = trainer.backend.step(learning_rate, settings.optimizer.grad_clip)
        if not math.isfinite(step.loss) or not math.isfinite(grad_norm):
            raise ProgramFailed(
                f"optimizer step {number}: loss {step.loss}, gradient norm {grad_norm}; "
                f"nothing was saved (a smaller optimizer.lr may help)"
            )
        trainer.optimizer_steps += 1
        totals.loss += step.loss
        totals.clipped += step.clipped
        totals.surprise += step.surprise
        totals.tokens += step.tokens
        totals.grad_norm += grad_norm
        show(number)
    return totals


def learning_rate_of(settings: OptimizerSettings, step: int) -> float:
    """Of the run's `step`-th optimizer step: rising evenly through the first `warmup_steps`."""
    return settings.lr * (min(1.0, step / settings.warmup_steps) if settings.warmup_steps else 1.0)


def accumulate(
    trainer: Trainer, batch: TrainingBatch, indices: Tensor, settings: Settings, gap_sums: GapSums | None
) -> Sums:
    """The gradient of one minibatch's token mean; gives the sums over all processes.

    Every process runs the same number of micro-batches, for all of them take part in gathering a sharded policy; one without a
    sequence left runs the minibatch's first one with weight zero. `gap_sums`: where to add up the log-probability gap, if at all.
    """
    processes = trainer.processes
    mine = plan(
        indices.tolist(),
        batch.lengths(),
        processes.world,
        most=settings.trainer.micro_batch,
        most_tokens=settings.trainer.max_tokens_per_micro_batch,
        packed=trainer.packs,
    )[processes.rank]
    tokens = batch.sampled_tokens(indices)
    sums = torch.zeros(3, dtype=torch.float64, device=processes.device)
    for number, chosen in enumerate(mine, start=1):
        micro = MicroBatch.of(batch, chosen or indices[:1].tolist(), processes.device, packed=trainer.packs)
        mask = micro.mask if chosen else torch.zeros_like(micro.mask)
        found = trainer.model(micro.inputs, micro.wanted, settings.rollout.temperature)
        new = micro.placed(found)
        part = policy_loss(settings.algorithm, new, micro.old, micro.weights, mask)
        # Gradients are added up over micro-batches and processes, to that of the mean over all their tokens.
        trainer.backend.backward(part.loss / tokens, last=number == len(mine))
        sums += torch.stack([part.loss.detach(), part.clipped, part.surprise]).double()
        if gap_sums is not None:
            gap_sums.add(new, micro, mask)
    loss, clipped, surprise = processes.sum(sums).tolist()
    return Sums(loss, clipped, surprise, tokens)
