"""Which metrics of a run the report and its tables show, and their titles. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from fsbarrier.rundir.journal import Event

#: names of evaluation metrics in the journal (rewards/evaluation.py), with an optional set name
EVALUATION_FIGURE = re.compile(r"([^/]+/)?(reward_mean|reward(/.+)?|pass_at_\d+|majority_at_\d+)(_se)?")

#: field of `rolled_out` -> title
ROLLOUT = {
    "reward_std": "std of rewards within a group",
    "groups_without_signal": "groups without signal",
    "rounds": "rounds",
    "answer_tokens_mean": "tokens per answer, mean",
    "answer_tokens_min": "least",
    "answer_tokens_max": "most",
    "truncated_share": "share truncated",
    "left_out": "groups dropped",
    "reward_errors": "reward failed",
    "agent_errors": "agent failed",
}
#: field of `updated` -> title
UPDATE = {
    "loss": "loss",
    "logprob_gap_mean": "log-prob gap, mean",
    "logprob_gap_max": "log-prob gap, max",
    "clip_fraction": "clipped",
    "clipped_low": "clipped below",
    "clipped_high": "clipped above",
    "entropy": "entropy",
    "kl": "KL to the reference policy",
    "policy_kl": "KL to the previous policy",
    "mismatch_kl": "KL between engine and trainer",
    "mismatch_dropped": "share with weight 0",
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "optimizer_steps": "steps",
    "seconds": "seconds",
}
#: the curves of the report in their order: event, field, title
CURVES = (
    ("updated", "entropy", "Entropy"),
    ("updated", "policy_kl", "KL to the previous policy"),
    ("updated", "kl", "KL to the reference policy"),
    ("updated", "clip_fraction", "Clip fraction"),
    ("updated", "logprob_gap_mean", "Log-prob gap between engine and trainer"),
    ("updated", "mismatch_kl", "KL between engine and trainer"),
    ("updated", "grad_norm", "Gradient norm"),
    ("updated", "lr", "Learning rate"),
    ("updated", "loss", "Loss"),
    ("rolled_out", "answer_tokens_mean", "Tokens per answer"),
    ("rolled_out", "truncated_share", "Share of answers truncated"),
    ("rolled_out", "groups_without_signal", "Groups without signal"),
    ("rolled_out", "reward_std", "Std of rewards within a group"),
)
#: the journal's prefix of the parts of a reward
PART = "reward_parts/"


def rollout_columns(rollouts: Collection[Event]) -> dict[str, str]:
    """The metrics of the training rollouts with their titles, without those that were always 0."""
    parts = dict.fromkeys(name for event in rollouts for name in event.fields if name.startswith(PART))
    known = {**ROLLOUT, **{name: name.removeprefix(PART) for name in sorted(parts)}}
    return {
        name: title
        for name, title in known.items()
        if any(event.number(name) for event in rollouts) or (name in parts and not name.endswith("_failed"))
    }


def update_columns(updates: Collection[Event]) -> dict[str, str]:
    """The metrics of the updates with their titles, without those that were always 0: a KL that nobody asks for is not computed."""
    return {name: title for name, title in UPDATE.items() if any(event.number(name) for event in updates)}


def evaluation_figures(evaluations: Iterable[Event]) -> list[str]:
    """The metric names of the evaluations, including those per set and per source."""
    found: dict[str, None] = {}
    for event in evaluations:
        found |= {name: None for name in event.fields if EVALUATION_FIGURE.fullmatch(name)}
    return list(found)
