"""The losses of the update. Tensors in, tensors out; no model, no files.

GRPO: the clipped surrogate of PPO (Schulman et al. 2017) with separate bounds and a mean over tokens as in DAPO (Yu et al. 2025); its
advantages are in advantages.py. RFT: maximum likelihood of the successful trajectories (rejection-sampling fine-tuning, Yuan et al.
2023).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fsbarrier.settings.sections import AlgorithmSettings

# Of the trained policy to the one that sampled: what an old trajectory may weigh at most (truncated importance weight).
MAX_RATIO = 10.0


@dataclass(frozen=True, slots=True)
class LossSums:
    """Sums over the tokens of one micro-batch, so that any split of a minibatch adds up to the same. All scalars but `loss` detached."""

    loss: Tensor
    # How many tokens' ratios were clipped.
    clipped: Tensor
    # Minus the log-probability of the sampled tokens: an estimate of the entropy.
    surprise: Tensor


def policy_loss(
    algorithm: AlgorithmSettings, new: Tensor, old: Tensor, weights: Tensor, mask: Tensor
) -> LossSums:
    """The loss that the settings name. new, old, mask: [batch, length]; weights: [batch], of the kind that the loss takes."""
    if algorithm.loss == "rft":
        return rft_loss(new, weights, mask)
    return grpo_loss(new, old, weights, mask, clip_low=algorithm.clip_low, clip_high=algorithm.clip_high)


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
