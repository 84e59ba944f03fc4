"""The weight of each trajectory in the loss: its advantage, or with rft the reward of a success.

grpo                           Shao et al. 2024 (arXiv 2402.03300): the reward minus the group mean; without the division by the
                               standard deviation Liu et al. 2025 (Dr.GRPO, 2503.20783)
rloo                           Ahmadian et al. 2024 (2402.14740): the reward minus the mean of the other samples in the group
reinforce_plus_plus[_baseline] Hu et al. 2025 (2501.03262): normalised over the batch's tokens; with a baseline, after subtracting
                               the group mean
gae                            token by token, with a critic (token_advantages.py); here the reward itself
truncated=shape                Yu et al. 2025 (DAPO, 2503.14476), soft overlong punishment
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from fsbarrier.data.trajectory import Trajectory, is_judged
from fsbarrier.settings.sections import AlgorithmSettings

# Avoid a division by zero if all rewards of a group, or advantages of a batch, are nearly equal. The second is verl's and TRL's.
STD_FLOOR, VARIANCE_FLOOR = 1e-6, 1e-8


def weigh_group(
    group: Sequence[Trajectory], algorithm: AlgorithmSettings, max_tokens: int
) -> list[tuple[Trajectory, float]]:
    """The trajectories to train on with their weights; [] if the group has no training signal.

    Unscored trajectories are dropped, also from the baseline. `max_tokens`: the limit at which answers are truncated.
    """
    judged = [trajectory for trajectory in group if is_judged(trajectory)]
    cut_off = [t.get("finish_reason") == "length" for t in judged]
    masks = algorithm.truncated == "mask"
    masked = {id(t) for t, cut in zip(judged, cut_off, strict=True) if cut and masks}
    if algorithm.loss == "rft":
        successes = [t for t in judged if t["valid"] and t["reward"] > 0]
        return [(t, float(t["reward"])) for t in successes if id(t) not in masked]
    if not judged:
        return []
    rewards = torch.tensor([counted_reward(t) for t in judged], dtype=torch.float64)
    if algorithm.truncated == "shape":
        lengths = torch.tensor([longest_answer(t) for t in judged], dtype=torch.float64)
        # The engine's own limit, engine.max_model_len, may cut an answer off earlier.
        rewards -= torch.where(torch.tensor(cut_off), 1.0, overlong_penalty(lengths, max_tokens))
    by_reward_alone = not (algorithm.self_certainty or algorithm.has_critic or algorithm.loss == "distil")
    if algorithm.drop_zero_signal and by_reward_alone and bool((rewards == rewards[0]).all()):
        return []
    # With self-certainty the update computes the advantages (token_advantages.py).
    weights = rewards if algorithm.self_certainty else group_advantages(rewards, algorithm)
    weighed = zip(judged, weights.tolist(), strict=True)
    return [(t, weight) for t, weight in weighed if id(t) not in masked]


def group_advantages(rewards: Tensor, algorithm: AlgorithmSettings) -> Tensor:
    """The group-level part of the advantages, from the rewards of one group; both have shape [samples]."""
    samples = len(rewards)
    if algorithm.advantage in ("reinforce_plus_plus", "gae"):
        return rewards
    centred = rewards - rewards.mean()
    if algorithm.advantage == "reinforce_plus_plus_baseline" or samples < 2:
        return centred
    scale = rewards.std() + STD_FLOOR if algorithm.normalize_std else 1.0
    leave_one_out = samples / (samples - 1) if algorithm.advantage == "rloo" else 1.0
    return centred * leave_one_out / scale


def batch_advantages(advantages: Tensor, tokens: Tensor, algorithm: AlgorithmSettings) -> Tensor:
    """Apply the batch-level part to the advantages; `advantages` and `tokens` have shape [sequences]."""
    if algorithm.loss == "rft" or algorithm.advantage in ("grpo", "rloo") or not len(advantages):
        return advantages
    mean = (advantages * tokens).sum() / tokens.sum()
    centred = advantages - mean
    variance = (centred.square() * tokens).sum() / (tokens.sum() - 1).clamp(min=1)
    return centred * (variance + VARIANCE_FLOOR).rsqrt() if algorithm.normalize_std else centred


def counted_reward(trajectory: Trajectory) -> float:
    """A trajectory's reward; a failed one never counts as a success, whatever its reward."""
    reward = float(trajectory["reward"])
    return reward if trajectory["valid"] else min(reward, 0.0)


def longest_answer(trajectory: Trajectory) -> int:
    """The length in tokens of the longest sampled turn, which `rollout.max_tokens` limits."""
    runs = groupby(torch.as_tensor(trajectory.get("loss_mask", ())).tolist())
    return max((sum(1 for _ in run) for sampled, run in runs if sampled), default=0)


def overlong_penalty(lengths: Tensor, max_tokens: int) -> Tensor:
    """DAPO's penalty for answers of these lengths: zero up to the last fifth before the limit, then linearly up to 1."""
    buffer = max(1, max_tokens // 5)
    over = (lengths - (max_tokens - buffer)) / buffer
    return over.clamp(0, 1)
