"""The advantages that need more than the rewards of a group (group_weights.py): those of a batch, and those that the update computes from a
model's numbers: token by token with a critic or a KL divergence in the reward, from self-certainty, and from a teacher.

Each token has a reward: minus the coefficient times its log-ratio policy / reference (`algorithm.kl_in_reward`); the last token of a
trajectory also gets the trajectory's reward. With a critic its advantage is generalised advantage estimation's (Schulman et al. 2016,
arXiv 1506.02438). Without one it is the sum of the rewards from the token on, which it can still change (Ouyang et al. 2022, 2203.02155;
Hu et al. 2025, 2501.03262); that is the same formula with values of 0. The sampled tokens of a trajectory count as consecutive: anything
between two of them, like an answer of a tool or the border of two segments, has no reward and no value.

An answer's self-certainty (`algorithm.self_certainty`: Zhao et al. 2025, Intuitor, arXiv 2505.19590, computed as its verl variant) is the
mean over its tokens of the KL divergence of the uniform distribution over the vocabulary from the one that the token was drawn from, at the
sampling temperature. For this, phase 8 stores rewards in place of weights.

On-policy distillation (`algorithm.loss=distil`): the advantage of a sampled token is log(teacher / policy): how much likelier it is for
the teacher than for the policy before the first step. Its policy gradient is that of the reverse KL divergence KL(policy || teacher)
token by token, without later tokens (Agarwal et al. 2024, arXiv 2306.13649; thinkingmachines.ai/blog/on-policy-distillation). The
clipped loss of `grpo` applies. `algorithm.distil_reward` adds the advantages of the run's reward.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fsbarrier.settings.sections import AlgorithmSettings
from fsbarrier.training.batch import TrainingBatch
from fsbarrier.training.group_weights import group_advantages

# Avoids a division by zero if all advantages of a batch are nearly equal; it is verl's and TRL's.
VARIANCE_FLOOR = 1e-8
# One update adapts the coefficient to at most this relative error of the KL divergence, scaled down by the horizon.
MOST_ERROR = 0.2
#: how slowly the coefficient adapts, in trajectories; verl's default
HORIZON = 10_000


def batch_advantages(advantages: Tensor, tokens: Tensor, algorithm: AlgorithmSettings) -> Tensor:
    """Apply the batch-level part to the advantages; `advantages` and `tokens` have shape [sequences]."""
    if algorithm.loss == "rft" or algorithm.advantage in ("grpo", "rloo") or not len(advantages):
        return advantages
    mean = (advantages * tokens).sum() / tokens.sum()
    centred = advantages - mean
    variance = (centred.square() * tokens).sum() / (tokens.sum() - 1).clamp(min=1)
    return centred * (variance + VARIANCE_FLOOR).rsqrt() if algorithm.normalize_std else centred


def with_token_weights(
    batch: TrainingBatch, algorithm: AlgorithmSettings, kl_coef: float
) -> tuple[TrainingBatch, float | None]:
    """Add a weight for each token, if the settings ask for it. Also returns the KL divergence in the rewards, a mean over trajectories of
    their means over tokens. Every process needs all log-probabilities and values. `kl_coef`: the current coefficient."""
    reference = batch.reference if algorithm.kl_in_reward else None
    if (reference is None and batch.values is None) or not len(batch.weights):
        return batch, None
    sampled, counts = batch.loss_mask.bool(), batch.tokens_of_trajectories()
    rewards, mean_kl = torch.zeros(int(counts.sum()), dtype=torch.float64), None
    if reference is not None:
        policy = batch.logprobs if batch.old is None else batch.old
        kl = policy[sampled].double() - reference[sampled].double()
        rewards -= kl_coef * kl
        mean_kl = float(torch.stack([trajectory.mean() for trajectory in kl.split(counts.tolist())]).mean())
    rewards[counts.cumsum(0) - 1] += batch.weights[~batch.continues.bool()].double()

    def placed(values: Tensor) -> Tensor:
        return torch.zeros(len(sampled)).masked_scatter(sampled, values.float())

    if batch.values is None:
        own = gae(rewards, torch.zeros_like(rewards), counts, 1.0, 1.0)
    else:
        values = batch.values[sampled].double()
        own = gae(rewards, values, counts, algorithm.gamma, algorithm.lam)
        batch = replace(batch, returns=placed(own + values))
    # The normalisation over the batch's tokens is done here and not in phase 8, because it includes the KL and the values.
    weights = placed(batch_advantages(own, torch.ones_like(own), algorithm))
    return replace(batch, token_weights=weights), mean_kl


def adapted(kl_coef: float, kl: float, trajectories: int, algorithm: AlgorithmSettings) -> float:
    """The coefficient after an update. It grows while the KL divergence is above `algorithm.kl_target` (Ziegler et al. 2019, arXiv
    1909.08593); fixed without a target."""
    if algorithm.kl_target is None:
        return kl_coef
    error = min(max(kl / algorithm.kl_target - 1, -MOST_ERROR), MOST_ERROR)
    return kl_coef * (1 + error * min(1.0, trajectories / HORIZON))


def gae(rewards: Tensor, values: Tensor, counts: Tensor, gamma: float, lam: float) -> Tensor:
    """[tokens]: generalised advantage estimation. `counts`: the tokens of each trajectory; the value after its last one is 0."""
    advantages = torch.zeros_like(rewards)
    # Sort the longest first, so that the trajectories with tokens left are the first ones.
    lengths, order = counts.sort(descending=True)
    ends = counts.cumsum(0)[order]
    advantage = next_value = rewards.new_zeros(len(counts))
    for back in range(1, int(lengths[0]) + 1):
        running = int((lengths >= back).sum())
        at = ends[:running] - back
        error = rewards[at] + gamma * next_value[:running] - values[at]
        advantage, next_value = error + gamma * lam * advantage[:running], values[at]
        advantages[at] = advantage
    return advantages


def with_self_certainty(batch: TrainingBatch, algorithm: AlgorithmSettings) -> TrainingBatch:
    """Compute advantages from rewards and self-certainties, if the settings ask for it. Every process needs all of both."""
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
    groups = rewards.split(sizes.tolist())
    of_groups = [weight for group in groups for weight in group_advantages(group.tolist(), algorithm)]
    advantages = torch.tensor(of_groups, dtype=rewards.dtype)
    weights = advantages[trajectory]
    if not algorithm.kl_in_reward and not algorithm.has_critic:
        tokens = batch.sampled_tokens(torch.arange(len(weights)))
        weights = batch_advantages(weights, tokens, algorithm)
    return replace(batch, weights=weights.float())


def with_distillation(batch: TrainingBatch, algorithm: AlgorithmSettings) -> TrainingBatch:
    """Add the teacher's advantages to those of the reward, which the batch already has, if the settings ask for them."""
    if algorithm.loss != "distil" or batch.teacher is None:
        return batch
    by_token = batch.token_weights
    of_reward = batch.weights.repeat_interleave(batch.offsets.diff()) if by_token is None else by_token
    weights = algorithm.distil_reward * of_reward.double() + teacher_log_ratio(batch, batch.teacher)
    return replace(batch, token_weights=torch.where(batch.loss_mask.bool(), weights, 0.0).float())


def teacher_log_ratio(batch: TrainingBatch, teacher: Tensor) -> Tensor:
    """log(teacher / policy) of each token, float64."""
    policy = batch.logprobs if batch.old is None else batch.old
    return teacher.double() - policy.double()
