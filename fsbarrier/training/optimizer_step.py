"""Does the optimizer steps of one update: gradients of each minibatch's loss, clipped and applied."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from fsbarrier.errors import ProgramFailed
from fsbarrier.settings.sections import OptimizerSettings, Settings
from fsbarrier.training import logprob_gap
from fsbarrier.training.batch import TrainingBatch
from fsbarrier.training.logprob_gap import GapSums, LogprobGap
from fsbarrier.training.losses import Divisor, LossSums, PolicySums, TokenValues, minibatch_loss
from fsbarrier.training.micro_batch import MicroBatch, plan
from fsbarrier.training.optimizer import learning_rate_of
from fsbarrier.training.trainer import Trained, Trainer


@dataclass
class Sums:
    """Sums over optimizer steps, the same on every process."""

    steps: int = 0
    # Losses, and gradient norms before clipping.
    loss: float = 0.0
    grad_norm: float = 0.0
    tokens: int = 0
    # Sums over tokens, by name; these are the policy's.
    of_tokens: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(PolicySums._fields, 0.0))
    # Measured only in the first step, before the weights change.
    gap: LogprobGap = field(default_factory=LogprobGap)
    # In the last step; None if there was no step.
    learning_rate: float | None = None
    # Further figures of the update, by name.
    more: dict[str, float] = field(default_factory=dict)


class Objective(Protocol):
    """What a model is trained for; the policy has PolicyObjective, and the critic has critic.ValueObjective."""

    #: the names of the sums over tokens
    sums: Sequence[str]
    optimizer: OptimizerSettings
    #: the setting with its learning rate, for an error
    lr: str

    def loss(
        self,
        outputs: tuple[Tensor, ...],
        micro: MicroBatch,
        mask: Tensor,
        chosen: list[int],
        divisor: Divisor,
    ) -> LossSums:
        """A micro-batch's contribution to the minibatch's loss. `outputs`: the model's, each [sequences, longest]; `chosen`: the
        micro-batch's sequences, empty if it has weight zero."""

    def before_step(self, totals: Sums) -> None:
        """Every process calls this between a minibatch's gradient and its step. Raises ProgramFailed."""


@dataclass
class PolicyObjective:
    """Trains the policy with losses.minibatch_loss. In the first step its log-probabilities are compared with the engine's."""

    settings: Settings
    trainer: Trainer
    batch: TrainingBatch
    model_folder: Path
    sums: Sequence[str] = PolicySums._fields
    lr: str = "optimizer.lr"

    def __post_init__(self) -> None:
        self.optimizer = self.settings.optimizer
        # The log-probability gap is only meaningful before the first step changes the weights.
        self._gap: GapSums | None = GapSums(self.batch, self.trainer.processes.device)

    def loss(
        self,
        outputs: tuple[Tensor, ...],
        micro: MicroBatch,
        mask: Tensor,
        chosen: list[int],
        divisor: Divisor,
    ) -> LossSums:
        """See Objective."""
        new, entropy, _ = outputs
        if self._gap is not None:
            self._gap.add(new, micro, mask, chosen)
        # Tokens of examples (SFT) were not sampled, and are NaN; they get the ratio 1.
        old, engine = (
            torch.where(log_probs.isnan(), new.detach(), log_probs) for log_probs in (micro.old, micro.engine)
        )
        values = TokenValues(new, old, engine, entropy, micro.reference)
        return minibatch_loss(self.settings.algorithm, values, micro.weights, mask, divisor)

    def before_step(self, totals: Sums) -> None:
        """See Objective."""
        if self._gap is not None:
            totals.gap = self._gap.over_all(self.trainer.processes)
            logprob_gap.check(totals.gap, self.settings, self.trainer.processes, self.model_folder)
            self._gap = None


def train(
    trainer: Trainer,
    batch: TrainingBatch,
    settings: Settings,
    model_folder: Path,
    show: Callable[[int], None] = lambda done: None,
) -> Sums:
    """Do all optimizer steps of a batch with the policy; `show` receives the number of finished ones.

    Raises ProgramFailed; then nothing is saved.
    """
    return take_steps(trainer, batch, settings, PolicyObjective(settings, trainer, batch, model_folder), show)


def take_steps(
    trained: Trained,
    batch: TrainingBatch,
    settings: Settings,
    objective: Objective,
    show: Callable[[int], None],
) -> Sums:
    """Do all optimizer steps of a batch with one model. Raises ProgramFailed."""
    totals = Sums(of_tokens=dict.fromkeys(objective.sums, 0.0))
    for indices in batch.steps:
        step = accumulate(trained, batch, indices, settings, objective)
        objective.before_step(totals)
        totals.learning_rate = learning_rate_of(objective.optimizer, trained.optimizer_steps + 1)
        grad_norm = trained.backend.step(totals.learning_rate, objective.optimizer.grad_clip)
        totals.steps += 1
        if not math.isfinite(step.loss) or not math.isfinite(grad_norm):
            raise ProgramFailed(
                f"optimizer step {totals.steps}: loss {step.loss}, gradient norm {grad_norm}; "
                f"nothing was saved; try a smaller {objective.lr}"
            )
        trained.optimizer_steps += 1
        totals.loss += step.loss
        totals.grad_norm += grad_norm
        totals.tokens += step.tokens
        totals.of_tokens = {name: metric + step.of_tokens[name] for name, metric in totals.of_tokens.items()}
        show(totals.steps)
    return totals


def accumulate(
    trained: Trained, batch: TrainingBatch, indices: Tensor, settings: Settings, objective: Objective
) -> Sums:
    """Compute the gradient of one minibatch's loss; returns the sums over all processes.

    Every process runs the same number of micro-batches, because all must take part in the all-gathers of a sharded model; a process
    without sequences runs the minibatch's first one with weight zero.
    """
    processes = trained.processes
    mine = plan(
        indices.tolist(),
        batch.lengths(),
        processes.world,
        most_tokens=settings.trainer.max_tokens_per_micro_batch,
        packed=trained.packs,
    )[processes.rank]
    sampled = batch.sampled_tokens(indices)
    divisor = Divisor(int(sampled.sum()), int(sampled.count_nonzero()), settings.rollout.max_tokens)
    sums = torch.zeros(1 + len(objective.sums), dtype=torch.float64, device=processes.device)
    for number, chosen in enumerate(mine, start=1):
        micro = MicroBatch.of(batch, chosen or indices[:1].tolist(), processes.device, packed=trained.packs)
        mask = micro.mask if chosen else torch.zeros_like(micro.mask)
        outputs = trained.backend.model(micro.inputs, micro.wanted, settings.rollout.temperature)
        part = objective.loss(tuple(micro.placed(output) for output in outputs), micro, mask, chosen, divisor)
        # Gradients are summed over micro-batches and processes, which gives the gradient of the whole minibatch's loss.
        trained.backend.backward(part.loss, last=number == len(mine))
        sums += torch.stack([part.loss.detach().double(), *part.sums])
    loss, *of_tokens = processes.sum(sums).tolist()
    return Sums(1, loss, tokens=divisor.tokens, of_tokens=dict(zip(objective.sums, of_tokens, strict=True)))
