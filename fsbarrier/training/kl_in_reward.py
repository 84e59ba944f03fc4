"""The KL divergence from the reference policy in the reward (`algorithm.kl_in_reward`), token by token, into the returns to go.

The advantage of a token is that of its trajectory, less the coefficient times the sum of the log-ratios policy / reference over this token
and those after it: what the token can still change (Ouyang et al. 2022, arXiv 2203.02155; Hu et al. 2025, 2501.03262). The log-ratios of
earlier tokens would change its gradient by nothing on average. The sum ends with a segment of a trajectory.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from fsbarrier.settings.sections import AlgorithmSettings
from fsbarrier.training.advantages import batch_advantages
from fsbarrier.training.batch import TrainingBatch


def with_kl_in_reward(batch: TrainingBatch, algorithm: AlgorithmSettings) -> TrainingBatch:
    """The batch with a weight for each token, if the settings ask for it. Its log-probabilities must be there: every process has all."""
    if not algorithm.kl_in_reward or batch.reference is None:
        return batch
    sampled, lengths = batch.loss_mask.bool(), batch.offsets.diff()
    policy = batch.logprobs if batch.old is None else batch.old
    kl = torch.where(sampled, policy.double() - batch.reference.double(), 0.0)
    to_go = torch.cat([part.flip(0).cumsum(0).flip(0) for part in kl.split(lengths.tolist())])
    weights = batch.weights.double().repeat_interleave(lengths) - algorithm.kl_in_reward * to_go
    own = weights[sampled]
    # What is normalised over the batch's tokens includes the KL, so phase 8 has left it to be done here.
    normalised = batch_advantages(own, torch.ones_like(own), algorithm)
    return replace(batch, token_weights=torch.zeros_like(weights).masked_scatter(sampled, normalised).float())
