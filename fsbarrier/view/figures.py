"""Which metrics of a run the report and its tables show. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from fsbarrier.rundir.journal import Event

#: names of evaluation metrics in the journal (rewards/evaluation.py), with an optional set name
EVALUATION_FIGURE = re.compile(r"([^/]+/)?(reward_mean|reward(/.+)?|pass_at_\d+|majority_at_\d+)(_se)?")

#: fields of `rolled_out` that become columns, apart from the parts of a reward
ROLLOUT = (
    *("reward_std", "groups_without_signal", "rounds", "left_out", "reward_errors", "agent_errors"),
    "environment_errors",
    *("answer_tokens_mean", "answer_tokens_min", "answer_tokens_max", "truncated_share"),
)
#: numbers of an event that say where it happened
PLACE = frozenset({"node_rank", "incarnation", "generation", "iteration", "phase", "policy_version"})
#: the curves of the report in their order: event, field, title
CURVES = (
    ("updated", "entropy", "Entropy"),
    ("updated", "self_certainty", "Self-certainty"),
    ("updated", "teacher_kl", "KL to the teacher"),
    ("updated", "policy_kl", "KL to the previous policy"),
    ("updated", "kl", "KL to the reference policy"),
    ("updated", "reward_kl", "KL to the reference policy, in the reward"),
    ("updated", "clip_fraction", "Clip fraction"),
    ("updated", "logprob_gap_mean", "Engine-trainer log-prob gap"),
    ("updated", "mismatch_kl", "KL between engine and trainer"),
    ("updated", "explained_variance", "Share of the returns' variance that the critic foresees"),
    ("updated", "value_loss", "Loss of the critic"),
    ("updated", "grad_norm", "Gradient norm"),
    ("updated", "lr", "Learning rate"),
    ("updated", "loss", "Loss"),
    ("updated", "held_out_loss", "Held-out loss"),
    ("rolled_out", "answer_tokens_mean", "Tokens per answer"),
    ("rolled_out", "truncated_share", "Share of answers truncated"),
    ("rolled_out", "groups_without_signal", "Groups without signal"),
    ("rolled_out", "reward_std", "Std of rewards within a group"),
    ("batch_prepared", "staleness", "Staleness in policy versions"),
)
#: the journal's prefixes of the parts of a reward, and of the mean reward of a set of training tasks
PARTS = ("reward_parts/", "train_reward/")


def rollout_columns(rollouts: Collection[Event]) -> list[str]:
    """The metrics of the training rollouts, without those that were always 0."""
    parts = sorted({name for event in rollouts for name in event.fields if name.startswith(PARTS)})
    return _measured(rollouts, ROLLOUT) + [
        name for name in parts if not name.endswith("_failed") or _measured(rollouts, [name])
    ]


def update_columns(updates: Collection[Event]) -> list[str]:
    """The numbers of the updates other than times, without those that were always 0: a KL that nobody asks for is not computed."""
    names = {name: None for event in updates for name in event.fields if not name.endswith("_s")}
    return _measured(updates, [name for name in names if name not in PLACE])


def _measured(events: Collection[Event], names: Iterable[str]) -> list[str]:
    return [name for name in names if any(event.number(name) for event in events)]


def evaluation_figures(evaluations: Iterable[Event]) -> list[str]:
    """The metric names of the evaluations, including those per set and per source."""
    found: dict[str, None] = {}
    for event in evaluations:
        found |= {name: None for name in event.fields if EVALUATION_FIGURE.fullmatch(name)}
    return list(found)
