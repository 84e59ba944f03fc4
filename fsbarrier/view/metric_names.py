"""What the columns of the table of iterations mean, in words for charts. The names of columns are for programs. Pure."""

from __future__ import annotations

import re

#: column -> its meaning, the most important first
NAMES = {
    "rollout_answer_tokens_mean": "tokens in an answer, mean",
    "rollout_truncated_share": "share of answers cut off at the token limit",
    "rollout_reward_std": "standard deviation of the rewards within a group",
    "rollout_groups_without_signal": "groups whose rewards are all equal",
    "update_loss": "loss",
    "update_held_out_loss": "held-out loss",
    "update_entropy": "entropy of the policy, per token",
    "update_grad_norm": "gradient norm",
    "update_kl": "KL divergence from the reference policy",
    "update_clip_fraction": "share of tokens that are clipped",
    "update_logprob_gap_mean": "log-probability gap between engine and trainer, mean",
    "update_lr": "learning rate",
    "update_policy_kl": "KL divergence from the sampled policy",
    "update_mismatch_kl": "KL divergence between trainer and engine",
    "update_mismatch_dropped": "share of tokens dropped by the mismatch correction",
    "update_clipped_low": "share of tokens clipped at the lower bound",
    "update_clipped_high": "share of tokens clipped at the upper bound",
    "update_negative_log_likelihood": "negative log-likelihood, per token",
    "update_self_certainty": "self-certainty, per token",
    "update_teacher_kl": "KL divergence from the teacher",
    "update_reward_kl": "KL divergence in the reward",
    "update_reward_kl_coef": "coefficient of the KL divergence in the reward",
    "update_value_loss": "loss of the critic",
    "update_value_clip_fraction": "share of values that are clipped",
    "update_explained_variance": "share of the returns' variance that the critic explains",
    "update_critic_grad_norm": "gradient norm of the critic",
    "update_critic_lr": "learning rate of the critic",
    "update_logprob_gap_max": "log-probability gap between engine and trainer, largest",
    "update_optimizer_steps": "optimizer steps",
    "update_tokens": "tokens trained on",
    "update_trajectories": "trajectories trained on",
    "update_replayed": "trajectories of other policy versions trained on",
    "update_memory_peak_gb": "largest memory of a trainer process, in GB",
    "update_max_tokens_per_micro_batch": "tokens in a micro-batch, at most",
    "batch_staleness": "policy versions between sampling and update, mean",
    "rollout_answer_tokens_min": "tokens in an answer, fewest",
    "rollout_answer_tokens_max": "tokens in an answer, most",
    "rollout_segments_per_episode": "contexts per episode",
    "rollout_rounds": "rounds of rollouts",
    "rollout_left_out": "groups left out",
    "rollout_reward_errors": "answers whose reward failed",
    "rollout_agent_errors": "episodes whose agent failed",
    "rollout_environment_errors": "episodes whose environment failed",
    "eval_reward_mean": "held-out reward, mean",
}
#: pattern of columns -> their meaning
PATTERNS = {
    r"rollout_reward_parts_(.+)": r"reward {}, in training",
    r"rollout_train_reward_(.+)": r"training reward of the set {}",
    r"eval_(?:(.+)_)?pass_at_(\d+)": r"held-out pass@{1}{0}",
    r"eval_(?:(.+)_)?majority_at_(\d+)": r"held-out majority@{1}{0}",
    r"eval_reward_(.+)": r"held-out reward of {}",
    r"eval_(.+)_reward": r"held-out reward of the set {}",
}


def metric_name(column: str) -> str:
    """A column's meaning; of an unknown one its name without underscores."""
    if column in NAMES:
        return NAMES[column]
    for pattern, words in PATTERNS.items():
        if match := re.fullmatch(pattern, column):
            first, *more = match.groups()
            return words.format(f" of the set {first}" * bool(first) if more else first, *more)
    return column.removeprefix("update_").replace("_", " ")


def importance(column: str) -> int:
    """The position of a column's chart: parts of rewards and evaluations first, unknown metrics last."""
    if any(re.fullmatch(pattern, column) for pattern in PATTERNS):
        return -1
    return [*NAMES, column].index(column)
