"""Computes the values of a batch with the critic of `algorithm.advantage=gae`, and trains it.

It is a model with an optimizer like the policy (trainer.Trained), trained on the same minibatches with another loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from fsbarrier.settings.sections import Settings
from fsbarrier.training.batch import TrainingBatch
from fsbarrier.training.log_prob_pass import numbers_of_tokens
from fsbarrier.training.losses import Divisor, LossSums, ValueSums, value_loss
from fsbarrier.training.micro_batch import MicroBatch
from fsbarrier.training.optimizer_step import Sums, take_steps
from fsbarrier.training.trainer import Trained, critics_optimizer


@dataclass
class ValueObjective:
    """Trains the critic with losses.value_loss."""

    settings: Settings
    sums: Sequence[str] = ValueSums._fields
    lr: str = "critic.lr"

    def __post_init__(self) -> None:
        self.optimizer = critics_optimizer(self.settings)

    def loss(
        self,
        outputs: tuple[Tensor, ...],
        micro: MicroBatch,
        mask: Tensor,
        chosen: list[int],
        divisor: Divisor,
    ) -> LossSums:
        """See Objective."""
        assert micro.values is not None and micro.returns is not None
        clip, aggregation = self.settings.critic.clip, self.settings.algorithm.aggregation
        return value_loss(clip, aggregation, outputs[0], micro.values, micro.returns, mask, divisor)

    def before_step(self, totals: Sums) -> None:
        """See Objective."""


def with_values(critic: Trained, batch: TrainingBatch, settings: Settings) -> TrainingBatch:
    """Add the critic's values to the batch. Every process must call this."""
    if not batch.steps:
        return batch
    return replace(
        batch, values=numbers_of_tokens(critic.backend.model, batch, settings, critic.processes)[0]
    )


def train_critic(
    critic: Trained, batch: TrainingBatch, settings: Settings, show: Callable[[int], None]
) -> dict[str, float]:
    """Do all optimizer steps of a batch with the critic; returns its figures. Raises ProgramFailed."""
    if batch.values is None or batch.returns is None:
        return {}
    sampled = batch.loss_mask.bool()
    returns, values = batch.returns[sampled].double(), batch.values[sampled].double()
    spread, unexplained = (float(numbers.var(correction=0)) for numbers in (returns, returns - values))
    totals = take_steps(critic, batch, settings, ValueObjective(settings), show)
    figures = {
        "value_loss": totals.loss / totals.steps,
        "value_clip_fraction": totals.of_tokens["value_clipped"] / totals.tokens,
        "critic_grad_norm": totals.grad_norm / totals.steps,
        "critic_lr": totals.learning_rate or 0.0,
    }
    # Measured before these steps: 1 for a critic that predicts every return. Equal returns have no variance to explain.
    return {**figures, "explained_variance": 1 - unexplained / spread} if spread else figures
