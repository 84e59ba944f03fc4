"""Self-certainty in the reward (`algorithm.self_certainty`): Zhao et al. 2025 (Intuitor, arXiv 2505.19590), computed as its verl variant.

An answer's self-certainty is the mean over its tokens of the KL divergence of the uniform distribution over the vocabulary from the one
that the token was drawn from, at the sampling temperature. It needs all logits, so phase 8, which has no model, leaves the rewards in the
place of the weights, and the advantages are made here.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from fsbarrier.settings.sections import AlgorithmSettings
from fsbarrier.training.advantages import batch_advantages, group_advantages
from fsbarrier.training.batch import TrainingBatch


def with_self_certainty(batch: TrainingBatch, algorithm: AlgorithmSettings) -> TrainingBatch:
    """The batch with advantages of rewards and self-certainties, if the settings ask for it; every process has all of both."""
    if not algorithm.self_certainty or batch.certainty is None:
        return batch
    begins = batch.continues == 0
    trajectory = begins.cumsum(0) - 1
    sampled = batch.loss_mask.double()
    of_token = trajectory.repeat_interleave(batch.offsets.diff())
    sums, counts = (
        torch.zeros(int(begins.sum()), dtype=torch.float64).index_add(0, of_token, values)
        for values in (sampled * batch.certainty, sampled)
    )
    share = algorithm.self_certainty
    rewards = (1 - share) * batch.weights[begins].double() + share * sums / counts
    _, sizes = batch.groups[begins].unique_consecutive(return_counts=True)
    advantages = torch.cat([group_advantages(one, algorithm) for one in rewards.split(sizes.tolist())])
    weights = advantages[trajectory]
    if not algorithm.kl_in_reward and not algorithm.has_critic:
        tokens = batch.sampled_tokens(torch.arange(len(weights)))
        weights = batch_advantages(weights, tokens, algorithm)
    return replace(batch, weights=weights.float())
