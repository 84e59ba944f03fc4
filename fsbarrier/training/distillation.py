"""On-policy distillation (`algorithm.loss=distil`): the advantage of a sampled token is by how much the teacher finds it likelier than the
policy did before the first step, log(teacher / policy).

Its policy gradient is that of the reverse KL divergence KL(policy || teacher) token by token, without later tokens (Agarwal et al. 2024,
arXiv 2306.13649; thinkingmachines.ai/blog/on-policy-distillation). The clipped loss of `grpo` applies. `algorithm.distil_reward` adds the
advantages of the run's reward.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fsbarrier.settings.sections import AlgorithmSettings
from fsbarrier.training.batch import TrainingBatch


def with_distillation(batch: TrainingBatch, algorithm: AlgorithmSettings) -> TrainingBatch:
    """The batch with the teacher's advantages, if the settings ask for them; what it has by then are those of the reward."""
    if algorithm.loss != "distil" or batch.teacher is None:
        return batch
    by_token = batch.token_weights
    of_reward = batch.weights.repeat_interleave(batch.offsets.diff()) if by_token is None else by_token
    weights = algorithm.distil_reward * of_reward.double() + behind_teacher(batch, batch.teacher)
    return replace(batch, token_weights=torch.where(batch.loss_mask.bool(), weights, 0.0).float())


def behind_teacher(batch: TrainingBatch, teacher: Tensor) -> Tensor:
    """log(teacher / policy) of each token, float64."""
    policy = batch.logprobs if batch.old is None else batch.old
    return teacher.double() - policy.double()
