"""What each trajectory of a group weighs in the loss: its advantage (GRPO), or its reward if it was a success (RFT).

GRPO: Shao et al. 2024 (DeepSeekMath), rewards normalised within the group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fsbarrier.data.trajectory import Trajectory, is_judged
from fsbarrier.settings.sections import AlgorithmSettings

# Keeps the division defined where all rewards are nearly the same.
STD_FLOOR = 1e-6


def weigh_group(group: Sequence[Trajectory], algorithm: AlgorithmSettings) -> list[tuple[Trajectory, float]]:
    """The trajectories to learn from, each with its weight; [] where the group teaches nothing.

    A trajectory that nobody could judge is left out, and nothing is compared with it.
    """
    judged = [trajectory for trajectory in group if is_judged(trajectory)]
    if algorithm.loss == "rft":
        return [(t, float(t["reward"])) for t in judged if t["valid"] and t["reward"] > 0]
    if not judged:
        return []
    rewards = torch.tensor([counted_reward(t) for t in judged], dtype=torch.float64)
    if algorithm.drop_zero_signal and bool((rewards == rewards[0]).all()):
        return []
    advantages = group_advantages(rewards, normalize_std=algorithm.normalize_std)
    return list(zip(judged, advantages.tolist(), strict=True))


def group_advantages(rewards: Tensor, *, normalize_std: bool) -> Tensor:
    """Rewards of one group, shape [samples], to advantages of the same shape: centred, and scaled by the standard deviation."""
    centred = rewards - rewards.mean()
    if not normalize_std or len(rewards) < 2:
        return centred
    return centred / (rewards.std() + STD_FLOOR)


def counted_reward(trajectory: Trajectory) -> float:
    """A trajectory's reward; one that failed or was cut off never counts as a success, whatever its reward says."""
    reward = float(trajectory["reward"])
    return reward if trajectory["valid"] else min(reward, 0.0)
