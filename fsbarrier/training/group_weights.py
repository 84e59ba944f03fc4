"""The weight of each trajectory that its group alone decides: its advantage, or with rft the reward of a success. Without torch, so that
`fsbarrier view` can show what the batch has.

grpo                           Shao et al. 2024 (arXiv 2402.03300): the reward minus the group mean; without the division by the
                               standard deviation Liu et al. 2025 (Dr.GRPO, 2503.20783)
rloo                           Ahmadian et al. 2024 (2402.14740): the reward minus the mean of the other samples in the group
reinforce_plus_plus[_baseline] Hu et al. 2025 (2501.03262): normalised over the batch's tokens; with a baseline, after subtracting
                               the group mean
gae                            token by token, with a critic (advantages.py); here the reward itself
truncated=shape                Yu et al. 2025 (DAPO, 2503.14476), soft overlong punishment
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

from fsbarrier.data.trajectory import Trajectory, is_judged
from fsbarrier.settings.sections import AlgorithmSettings

# Avoids a division by zero if all rewards of a group are nearly equal.
STD_FLOOR = 1e-6


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
    rewards = [counted_reward(t) for t in judged]
    if algorithm.truncated == "shape":
        # The engine's own limit, engine.max_model_len, may cut an answer off earlier.
        lost = [
            1.0 if cut else overlong_penalty(longest_answer(t), max_tokens)
            for t, cut in zip(judged, cut_off, strict=True)
        ]
        rewards = [reward - penalty for reward, penalty in zip(rewards, lost, strict=True)]
    by_reward_alone = not (algorithm.self_certainty or algorithm.has_critic or algorithm.loss == "distil")
    if algorithm.drop_zero_signal and by_reward_alone and min(rewards) == max(rewards):
        return []
    # With self-certainty the update computes the advantages (advantages.py).
    weights = rewards if algorithm.self_certainty else group_advantages(rewards, algorithm)
    return [(t, weight) for t, weight in zip(judged, weights, strict=True) if id(t) not in masked]


def group_advantages(rewards: Sequence[float], algorithm: AlgorithmSettings) -> list[float]:
    """The group-level part of the advantages, from the rewards of one group."""
    samples = len(rewards)
    if algorithm.advantage in ("reinforce_plus_plus", "gae"):
        return [*rewards]
    mean = math.fsum(rewards) / samples
    centred = [reward - mean for reward in rewards]
    if algorithm.advantage == "reinforce_plus_plus_baseline" or samples < 2:
        return centred
    deviation = math.sqrt(math.fsum(difference * difference for difference in centred) / (samples - 1))
    scale = deviation + STD_FLOOR if algorithm.normalize_std else 1.0
    leave_one_out = samples / (samples - 1) if algorithm.advantage == "rloo" else 1.0
    return [difference * leave_one_out / scale for difference in centred]


def counted_reward(trajectory: Trajectory) -> float:
    """A trajectory's reward; a failed one never counts as a success, whatever its reward."""
    reward = float(trajectory["reward"])
    return reward if trajectory["valid"] else min(reward, 0.0)


def longest_answer(trajectory: Trajectory) -> int:
    """The length in tokens of the longest sampled turn, which `rollout.max_tokens` limits."""
    mask: object = trajectory.get("loss_mask", ())
    # The mask is an array, or a tensor if torch has read the merged file. In a file of a user's own program it may be anything.
    values = mask.tolist() if hasattr(mask, "tolist") else mask
    runs = groupby(values if isinstance(values, list | tuple) else ())
    return max((sum(1 for _ in run) for sampled, run in runs if sampled), default=0)


def overlong_penalty(length: int, max_tokens: int) -> float:
    """DAPO's penalty for an answer of this length: zero up to the last fifth before the limit, then linearly up to 1."""
    buffer = max(1, max_tokens // 5)
    return min(1.0, max(0.0, (length - (max_tokens - buffer)) / buffer))
