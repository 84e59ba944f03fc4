"""The losses of the update, as functions of tensors. advantages.py computes the weights of trajectories.

`minibatch_loss` combines one loss from the settings `algorithm.*`:

    ratio        token: new / old                        sequence (gspo): the geometric mean of its tokens' ratios
    objective    grpo, gspo, distil: clipped    cispo: clipped and detached    sapo: gated softly    rft: likelihood    own_loss.py
    mismatch     importance weight for the difference between engine and trainer: none, token_tis, icepop, sequence_mask
    + kl_coef * KL divergence from a reference policy (k1, k2, k3)   - entropy_coef * entropy
    aggregation  the sum over tokens, normalised in one of four ways

All tensors are [sequences, length], with log-probabilities in nats; advantages may also be [sequences]. Sources:

    clip             Schulman et al. 2017 (arXiv 1707.06347); separate upper bound: Yu et al. 2025 (DAPO, 2503.14476)
    dual clip        Ye et al. 2020 (1912.09729)             gspo    Zheng et al. 2025 (2507.18071)
    cispo            MiniMax 2025 (2506.13585)               sapo    Gao et al. 2025 (2511.20347)
    value loss       as verl and TRL clip it (OpenAI's baselines, ppo2)
    rft              Yuan et al. 2023 (2308.01825)           k1-k3   Schulman 2020 (joschu.net/blog/kl-approx.html)
    aggregations     token mean: DAPO; mean of means: Shao et al. 2024 (GRPO, 2402.03300); by a constant: Liu et al. 2025
                     (Dr.GRPO, 2503.20783)
    token_tis        Yao et al. 2025 (fengyao.notion.site/off-policy-rl)    icepop    Ling team 2025 (2510.18855)
    sequence_mask    Liu et al. 2025 (richardli.xyz/rl-collapse), as TRL computes it
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fsbarrier.settings.losses import Aggregation, KlEstimator, LossName
from fsbarrier.settings.sections import AlgorithmSettings
from fsbarrier.training.log_prob_head import LEAST
from fsbarrier.training.own_loss import load_loss

#: the lower bound of `icepop`; the upper one is `algorithm.mismatch_high`
ICEPOP_LOW = 0.5

# Clamp log-ratios to this range to keep the exponential finite; a larger ratio carries no more information.
MOST_LOG_RATIO = 20.0
# SAPO's gate temperatures for positive and negative advantages, from its paper.
SAPO_TEMPERATURES = (1.0, 1.05)


class PolicySums(NamedTuple):
    """Sums over the tokens of a micro-batch. The update shows each, divided by the number of tokens, as a metric with its name."""

    clipped_low: Tensor
    clipped_high: Tensor
    entropy: Tensor
    negative_log_likelihood: Tensor
    kl: Tensor
    policy_kl: Tensor
    mismatch_kl: Tensor
    mismatch_dropped: Tensor


class ValueSums(NamedTuple):
    """The sums of a critic's update, which are shown in the same way."""

    value_clipped: Tensor


@dataclass(frozen=True, slots=True)
class TokenValues:
    """Values per token. Only `new` (and `entropy`, if it is used) have a gradient."""

    new: Tensor
    # Log-probabilities in the denominator of the ratio.
    old: Tensor
    # Log-probabilities from the engine at sampling time.
    engine: Tensor
    entropy: Tensor
    # Log-probabilities of the reference policy; None without a KL term.
    reference: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Divisor:
    """Normalisers of the whole minibatch, over all processes: masked tokens, sequences with any, and the constant length."""

    tokens: int
    sequences: int
    constant: int


@dataclass(frozen=True, slots=True)
class LossSums:
    """`loss`: this micro-batch's contribution to the minibatch loss, independent of the split. `sums` are detached."""

    loss: Tensor
    sums: PolicySums | ValueSums


def minibatch_loss(
    algorithm: AlgorithmSettings, values: TokenValues, advantages: Tensor, mask: Tensor, divisor: Divisor
) -> LossSums:
    """A micro-batch's contribution to the loss. `mask`: the tokens to train on."""
    new, old, engine = (
        torch.where(mask, log_probs, 0.0) for log_probs in (values.new, values.old, values.engine)
    )
    log_ratio = sequence_log_ratio(new - old, mask) if algorithm.loss == "gspo" else new - old
    ratio = bounded_exp(log_ratio)
    weight = advantages[:, None] if advantages.dim() == 1 else advantages
    reference = None if values.reference is None else torch.where(mask, values.reference, 0.0)
    at_bounds: Bounded = none_bounded
    if (built_in := algorithm.built_in_loss) is not None:
        objective, at_bounds = token_loss_of(built_in)
        token_loss = objective(algorithm, new, ratio, weight)
    else:
        # In all tensors that the user's loss gets, the positions that are not trained on are zero.
        given = {"new": new, "old": old, "engine": engine, "entropy": torch.where(mask, values.entropy, 0.0)}
        weights = torch.where(mask, weight, 0.0)
        token_loss = load_loss(algorithm.loss)(**given, reference=reference, advantages=weights, mask=mask)
    correction = mismatch_weight(algorithm, old - engine, mask)
    token_loss = token_loss * correction
    kl = torch.zeros_like(new)
    if reference is not None:
        kl = kl_estimate(algorithm.kl_estimator, new, reference)
        token_loss = token_loss + algorithm.kl_coef * kl
    if algorithm.entropy_coef:
        token_loss = token_loss - algorithm.entropy_coef * values.entropy
    with torch.no_grad():
        low, high = at_bounds(algorithm, ratio, weight)
        per_token = PolicySums(
            clipped_low=low,
            clipped_high=high,
            entropy=values.entropy,
            negative_log_likelihood=-new,
            kl=kl,
            policy_kl=kl_estimate("k3", new, old),
            mismatch_kl=kl_estimate("k3", old, engine),
            mismatch_dropped=correction == 0,
        )
        sums = PolicySums(*(torch.where(mask, value, 0).sum().double() for value in per_token))
    return LossSums(aggregated(algorithm.aggregation, token_loss, mask, divisor), sums)


def value_loss(
    clip: float | None,
    aggregation: Aggregation,
    new: Tensor,
    old: Tensor,
    returns: Tensor,
    mask: Tensor,
    divisor: Divisor,
) -> LossSums:
    """A critic's loss: half the squared error, or that of the value clipped to within `clip` of the old one if that is larger."""
    error = (new - returns).square()
    bounded = error if clip is None else (torch.clamp(new, old - clip, old + clip) - returns).square()
    sums = ValueSums(value_clipped=(mask & (bounded > error)).sum().double())
    return LossSums(aggregated(aggregation, torch.maximum(error, bounded) / 2, mask, divisor), sums)


# --- ratios -------------------------------------------------------------------------------------------------------------


def bounded_exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO).exp()


def sequence_log_ratio(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """[sequences, 1]: the mean over a sequence's tokens (GSPO)."""
    return (log_ratio * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)


# --- objective per token ------------------------------------------------------------------------------------------------


# Computes the loss of each token from `new`, the ratio, and the weight: the advantage, or with rft the reward.
TokenObjective = Callable[[AlgorithmSettings, Tensor, Tensor, Tensor], Tensor]
# Tells from the ratio and the weight which tokens are clipped at the lower bound and which at the upper bound.
Bounded = Callable[[AlgorithmSettings, Tensor, Tensor], tuple[Tensor, Tensor]]


def token_loss_of(loss: LossName) -> tuple[TokenObjective, Bounded]:
    """The functions that compute a built-in loss. settings/losses.py says which settings it uses."""
    match loss:
        case "grpo" | "gspo" | "distil":
            return clipped_surrogate, bounded_against_the_advantage
        case "cispo":
            return clipped_weight, bounded_either_way
        case "sapo":
            return soft_gate, none_bounded
        case "rft":
            return likelihood, none_bounded


def clipped_surrogate(algorithm: AlgorithmSettings, new: Tensor, ratio: Tensor, weight: Tensor) -> Tensor:
    """PPO's objective. Without the dual clip a negative advantage with a large ratio would be unbounded."""
    low, high = 1 - algorithm.clip_low, 1 + algorithm.clip_high
    bounded = ratio if algorithm.dual_clip is None else ratio.clamp(max=algorithm.dual_clip)
    return (-torch.minimum(bounded * weight, ratio.clamp(low, high) * weight)).expand_as(new)


def clipped_weight(algorithm: AlgorithmSettings, new: Tensor, ratio: Tensor, weight: Tensor) -> Tensor:
    return -ratio.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high).detach() * weight * new


def soft_gate(algorithm: AlgorithmSettings, new: Tensor, ratio: Tensor, weight: Tensor) -> Tensor:
    positive, negative = SAPO_TEMPERATURES
    temperature = torch.where(weight > 0, weight.new_tensor(positive), weight.new_tensor(negative))
    return -torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature * weight


def likelihood(algorithm: AlgorithmSettings, new: Tensor, ratio: Tensor, weight: Tensor) -> Tensor:
    return -new * weight


def bounded_against_the_advantage(
    algorithm: AlgorithmSettings, ratio: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    below, above = bounded_either_way(algorithm, ratio, weight)
    return below & (weight < 0), above & (weight > 0)


def bounded_either_way(algorithm: AlgorithmSettings, ratio: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return ratio < 1 - algorithm.clip_low, ratio > 1 + algorithm.clip_high


def none_bounded(algorithm: AlgorithmSettings, ratio: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    nowhere = torch.zeros_like(ratio, dtype=torch.bool)
    return nowhere, nowhere


# --- corrections and further terms --------------------------------------------------------------------------------------


def mismatch_weight(algorithm: AlgorithmSettings, log_ratio: Tensor, mask: Tensor) -> Tensor:
    """The importance weight of each token for the difference between trainer and engine (`log_ratio`: trainer over engine)."""
    log_ratio = log_ratio.detach()
    high = algorithm.mismatch_high
    match algorithm.mismatch:
        case "none":
            return torch.ones_like(log_ratio)
        case "token_tis":
            return bounded_exp(log_ratio).clamp(max=high)
        case "icepop":
            ratio = bounded_exp(log_ratio)
            return torch.where((ratio >= ICEPOP_LOW) & (ratio <= high), ratio, 0.0)
        case "sequence_mask":
            ratio = bounded_exp((log_ratio * mask).sum(1, keepdim=True))
            return torch.where(ratio <= high, ratio, 0.0).expand_as(log_ratio)


def kl_estimate(estimator: KlEstimator, new: Tensor, other: Tensor) -> Tensor:
    """The KL divergence of `new` from `other`, estimated from tokens sampled by `new`."""
    log_ratio = (other - new).clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO)
    match estimator:
        case "k1":
            return -log_ratio
        case "k2":
            return log_ratio.square() / 2
        case "k3":
            return log_ratio.exp() - log_ratio - 1


# --- aggregation --------------------------------------------------------------------------------------------------------


def aggregated(aggregation: Aggregation, token_loss: Tensor, mask: Tensor, divisor: Divisor) -> Tensor:
    """A micro-batch's contribution to the minibatch loss. The names are verl's."""
    of_sequences = torch.where(mask, token_loss, 0.0).sum(1)
    match aggregation:
        case "token-mean":
            return of_sequences.sum() / divisor.tokens
        case "seq-mean-token-mean":
            return (of_sequences / mask.sum(1).clamp(min=1)).sum() / divisor.sequences
        case "seq-mean-token-sum":
            return of_sequences.sum() / divisor.sequences
        case "seq-mean-token-sum-norm":
            return of_sequences.sum() / (divisor.sequences * divisor.constant)


# --- from full logits ---------------------------------------------------------------------------------------------------


def token_log_probs(logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Compute each token's log-probability given those before it, at the sampling temperature, and the entropy and the self-certainty (the
    KL divergence of the uniform distribution) of the distribution that it was drawn from.

    logits [batch, length, vocabulary], tokens [batch, length] -> three times [batch, length]; position 0, which nothing predicts, is 0.
    """
    all_log_probs = (logits[:, :-1].float() / (temperature if temperature > 0 else 1.0)).log_softmax(2)
    chosen = all_log_probs.gather(2, tokens[:, 1:, None]).squeeze(2)
    entropy = -(all_log_probs.exp() * all_log_probs).sum(2)
    sampleable = all_log_probs > LEAST
    counts = sampleable.sum(2)
    certainty = -all_log_probs.detach().where(sampleable, 0.0).sum(2) / counts - counts.log()
    chosen, entropy, certainty = (
        torch.nn.functional.pad(tensor, (1, 0)) for tensor in (chosen, entropy, certainty)
    )
    return chosen, entropy, certainty
