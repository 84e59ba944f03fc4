"""Statistics of a group's trajectories (failed, truncated, lengths, rewards and their parts), and an iteration's metrics from them.

This is the only place where failures of a reward or an agent are counted. Readers and writers of groups both compute them here.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from fsbarrier.data.trajectory import is_judged
from fsbarrier.protocol.facts import Payload

#: maximum number of reward parts with their own metrics
MOST_PARTS = 20
#: the statistics that add up over groups
ADDED = (
    *("trajectories", "unjudged", "invalid", "reward_sum", "truncated", "reward_errors", "agent_errors"),
    *("environment_errors", "answers", "tokens", "episodes", "segments", "forked"),
    *("reasoning_tokens", "thoughts_closed"),
)


@dataclass(frozen=True, slots=True)
class RewardPart:
    """One part of the reward: its sum, the number of trajectories with it, and how many of those have a failed reward."""

    total: float = 0.0
    count: int = 0
    though_failed: int = 0

    def __add__(self, other: RewardPart) -> RewardPart:
        return RewardPart(
            self.total + other.total, self.count + other.count, self.though_failed + other.though_failed
        )


@dataclass(frozen=True, slots=True)
class GroupStats:
    """Statistics of some trajectories; `tokens`, `shortest` and `longest` are answer lengths in tokens."""

    trajectories: int = 0
    #: trajectories without a score, because the reward, the agent or its environment failed
    unjudged: int = 0
    #: trajectories that failed in any way
    invalid: int = 0
    #: over the scored trajectories
    reward_sum: float = 0.0
    #: whether the scored rewards differ, i.e. whether the group has a training signal
    signal: bool = False
    truncated: int = 0
    reward_errors: int = 0
    agent_errors: int = 0
    environment_errors: int = 0
    #: trajectories with an answer; one that failed before sampling has none
    answers: int = 0
    tokens: int = 0
    #: episodes of an agent, their segments, and episodes with more than one (docs/decisions/0008)
    episodes: int = 0
    segments: int = 0
    forked: int = 0
    #: tokens of thoughts, and how many thoughts were closed at their limit
    reasoning_tokens: int = 0
    thoughts_closed: int = 0
    shortest: int = 0
    longest: int = 0
    parts: Mapping[str, RewardPart] = field(default_factory=dict)
    #: sample standard deviation of the rewards of scored trajectories; None for fewer than two
    reward_std: float | None = None

    @classmethod
    def of(cls, trajectories: Iterable[Payload]) -> Self:
        """Count these trajectories. Fields that a user's own program omits are not counted."""
        added = {name: 0 for name in ADDED if name != "reward_sum"}
        lengths: list[int] = []
        rewards: list[float] = []
        parts: dict[str, RewardPart] = {}
        for trajectory in trajectories:
            metadata, mask, its_parts = (
                trajectory.get(name) for name in ("metadata", "loss_mask", "reward_parts")
            )
            notes: Mapping[str, Any] = metadata if isinstance(metadata, Mapping) else {}
            added["trajectories"] += 1
            added["invalid"] += trajectory.get("valid") is False
            added["truncated"] += trajectory.get("finish_reason") == "length"
            for what in ("reward", "agent", "environment"):
                added[f"{what}_errors"] += f"{what}_error" in notes
            if is_judged(trajectory):
                rewards.append(float(trajectory["reward"]))
            if trajectory.get("turns"):
                segments = len(trajectory.get("segments", (0,)))
                added["episodes"] += 1
                added["segments"] += segments
                added["forked"] += segments > 1
            if isinstance(mask, array) and len(mask):
                lengths.append(mask.count(1))
            for name in ("reasoning_tokens", "thoughts_closed"):
                added[name] += trajectory.get(name) or 0
            for name, value in its_parts.items() if isinstance(its_parts, Mapping) else ():
                if isinstance(value, int | float) and math.isfinite(value):
                    part = RewardPart(float(value), 1, int("reward_error" in notes))
                    parts[str(name)] = parts.get(str(name), RewardPart()) + part
        added |= {
            "unjudged": added["trajectories"] - len(rewards),
            "answers": len(lengths),
            "tokens": sum(lengths),
        }
        return cls(
            **added,
            reward_sum=float(sum(rewards)),
            signal=len(set(rewards)) > 1,
            shortest=min(lengths, default=0),
            longest=max(lengths, default=0),
            parts=dict(list(parts.items())[:MOST_PARTS]),
            reward_std=_deviation(rewards),
        )

    @classmethod
    def total(cls, groups: Iterable[GroupStats]) -> Self:
        """The sums of ADDED over these groups; the other statistics stay empty."""
        summands = list(groups)
        return cls(**{name: sum(getattr(stats, name) for stats in summands) for name in ADDED})

    @property
    def is_finished(self) -> bool:
        """Whether another attempt may take over the group. One in which the reward or the agent failed, or in which nothing could be
        sampled, is rolled out again."""
        return not self.unjudged and self.invalid < self.trajectories

    @property
    def reward_mean(self) -> float | None:
        """The mean over the scored trajectories, or None without any."""
        judged = self.trajectories - self.unjudged
        return self.reward_sum / judged if judged else None


def _deviation(rewards: Sequence[float]) -> float | None:
    if len(rewards) < 2 or not all(map(math.isfinite, rewards)):
        return None
    mean = sum(rewards) / len(rewards)
    equal = min(rewards) == max(rewards)
    return 0.0 if equal else math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))


def metrics(groups: Sequence[GroupStats]) -> dict[str, float]:
    """An iteration's metrics for the journal; shares are from 0 to 1. {} if there are no groups."""
    if not groups:
        return {}
    total = GroupStats.total(groups)
    figures: dict[str, float] = {
        "truncated": total.truncated,
        "reward_errors": total.reward_errors,
        "agent_errors": total.agent_errors,
        "environment_errors": total.environment_errors,
    }
    if total.answers:
        figures |= {
            "answer_tokens_mean": total.tokens / total.answers,
            "answer_tokens_min": min(group.shortest for group in groups if group.answers),
            "answer_tokens_max": max(group.longest for group in groups),
            "truncated_share": total.truncated / total.answers,
        }
    if total.reasoning_tokens and total.tokens:
        share = total.reasoning_tokens / total.tokens
        figures |= {
            "reasoning_share": share,
            "response_share": 1 - share,
            "thoughts_closed_share": total.thoughts_closed / total.answers,
        }
    if total.episodes:
        figures["segments_per_episode"] = total.segments / total.episodes
    deviations = [group.reward_std for group in groups if group.reward_std is not None]
    if deviations:
        without_signal = deviations.count(0.0)
        figures |= {
            "reward_std": sum(deviations) / len(deviations),
            "groups_without_signal": without_signal,
            "without_signal_share": without_signal / len(deviations),
        }
    parts: dict[str, RewardPart] = {}
    for group in groups:
        for name, part in group.parts.items():
            parts[name] = parts.get(name, RewardPart()) + part
    for name in sorted(parts)[:MOST_PARTS]:
        if parts[name].count:
            figures[f"reward_parts/{name}"] = parts[name].total / parts[name].count
        # A failed reward contributes only the parts that did not fail.
        if failed := total.reward_errors - parts[name].though_failed:
            figures[f"reward_parts/{name}_failed"] = failed
    return figures
