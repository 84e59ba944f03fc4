"""The losses of the update, and the advantages they rest on. Tensors in, tensors out; no model, no files.

GRPO: Shao et al. 2024 (DeepSeekMath), group-normalised rewards as advantages; the clipped surrogate of PPO (Schulman et al. 2017)
with separate bounds and a mean over tokens as in DAPO (Yu et al. 2025). RFT: maximum likelihood of the successful trajectories
(rejection-sampling fine-tuning, Yuan et al. 2023).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

STD_FLOOR = 1e-6
MAX_RATIO = 10.0  # of the policy to the one that sampled; what an old trajectory may weigh at most (truncated importance weight)


@dataclass(frozen=True)
class LossSums:
    """Sums over the tokens of one micro-batch, so that any split of a minibatch adds up to the same. All scalars but `loss` detached."""

    loss: Tensor
    clipped: Tensor  # tokens whose ratio was clipped
    surprise: Tensor  # -log p of the sampled tokens: an estimate of the entropy


def group_advantages(rewards: Tensor, *, normalize_std: bool) -> Tensor:
    """Rewards of one group, shape [samples], to advantages of the same shape: centred, and scaled by the standard deviation."""
    centred = rewards - rewards.mean()
    if not normalize_std or len(rewards) < 2:
        return centred
    return centred / (rewards.std() + STD_FLOOR)


def token_log_probs(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """Log-probability of each token given those before it, at the sampling temperature.

    logits [batch, length, vocabulary], tokens [batch, length] -> [batch, length]; position 0, which nothing predicts, is 0.
    """
    scaled = logits[:, :-1].float() / (temperature if temperature > 0 else 1.0)
    chosen = scaled.gather(2, tokens[:, 1:, None]).squeeze(2)
    return torch.nn.functional.pad(chosen - scaled.logsumexp(2), (1, 0))


def grpo_loss(
    new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, *, clip_low: float, clip_high: float
) -> LossSums:
    """The clipped surrogate, summed over tokens. new, old, mask: [batch, length]; advantages: [batch].

    `old` are the log-probabilities under the policy that sampled, whichever that was: the ratio is the importance weight.
    """
    ratio = torch.exp(torch.where(mask, new - old, 0.0).clamp(max=math.log(MAX_RATIO)))
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    weight = advantages[:, None]
    objective = torch.minimum(ratio * weight, bounded * weight)
    clipped = (ratio * weight > bounded * weight) & mask
    return LossSums(-(objective * mask).sum(), clipped.sum().detach(), -(new * mask).sum().detach())


def rft_loss(new: Tensor, weights: Tensor, mask: Tensor) -> LossSums:
    """Negative log-likelihood of the sampled tokens, summed. new, mask: [batch, length]; weights: [batch], 0 leaves one out."""
    likelihood = -(new * mask * weights[:, None]).sum()
    return LossSums(likelihood, torch.zeros((), device=new.device), -(new * mask).sum().detach())
