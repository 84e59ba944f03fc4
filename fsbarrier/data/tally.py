"""Statistics of a group's trajectories (truncated, failed, lengths, reward parts), and an iteration's metrics computed from them.

The statistics are stored with each group as JSON, so that metrics need no unpickling and include groups of earlier generations.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from fsbarrier.data.trajectory import is_judged
from fsbarrier.protocol.facts import JsonObject, Payload

#: maximum number of reward parts with their own metrics
MOST_PARTS = 20


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
class Tally:
    """Statistics of some trajectories; `tokens`, `shortest` and `longest` are answer lengths in tokens.

    `answers`: number of trajectories with an answer; one that failed before sampling has none. `reward_std`: sample standard deviation of
    the rewards of scored trajectories; None for fewer than two.
    """

    truncated: int = 0
    reward_errors: int = 0
    agent_errors: int = 0
    answers: int = 0
    tokens: int = 0
    shortest: int = 0
    longest: int = 0
    parts: Mapping[str, RewardPart] = field(default_factory=dict)
    reward_std: float | None = None

    @classmethod
    def of(cls, trajectories: Iterable[Payload]) -> Self:
        """Count these trajectories. Fields that a user's own program omits are not counted."""
        truncated = reward_errors = agent_errors = 0
        lengths: list[int] = []
        judged: list[float] = []
        parts: dict[str, RewardPart] = {}
        for one in trajectories:
            metadata, mask, rewards = (one.get(name) for name in ("metadata", "loss_mask", "reward_parts"))
            notes: Mapping[str, Any] = metadata if isinstance(metadata, Mapping) else {}
            failed = "reward_error" in notes
            truncated += one.get("finish_reason") == "length"
            reward_errors += failed
            agent_errors += "agent_error" in notes
            if is_judged(one):
                judged.append(float(one["reward"]))
            if isinstance(mask, array) and len(mask):
                lengths.append(mask.count(1))
            for name, value in rewards.items() if isinstance(rewards, Mapping) else ():
                if isinstance(value, int | float) and math.isfinite(value):
                    parts[str(name)] = parts.get(str(name), RewardPart()) + RewardPart(
                        float(value), 1, int(failed)
                    )
        return cls(
            truncated,
            reward_errors,
            agent_errors,
            len(lengths),
            sum(lengths),
            min(lengths, default=0),
            max(lengths, default=0),
            dict(list(parts.items())[:MOST_PARTS]),
            _deviation(judged),
        )

    def as_json(self) -> JsonObject:
        parts = {name: [part.total, part.count, part.though_failed] for name, part in self.parts.items()}
        std = {} if self.reward_std is None else {"reward_std": self.reward_std}
        return {**{name: getattr(self, name) for name in NUMBERS}, "parts": parts, **std}

    @classmethod
    def from_json(cls, record: JsonObject) -> Self:
        """Raises KeyError, TypeError, ValueError for invalid input."""
        parts = {
            str(name): RewardPart(float(total), int(count), int(failed))
            for name, (total, count, failed) in record["parts"].items()
        }
        numbers: Any = {name: int(record[name]) for name in NUMBERS}
        # Not written by older versions.
        std = record.get("reward_std")
        return cls(**numbers, parts=parts, reward_std=None if std is None else float(std))


NUMBERS = ("truncated", "reward_errors", "agent_errors", "answers", "tokens", "shortest", "longest")


def _deviation(rewards: Sequence[float]) -> float | None:
    if len(rewards) < 2 or not all(map(math.isfinite, rewards)):
        return None
    mean = sum(rewards) / len(rewards)
    equal = min(rewards) == max(rewards)
    return 0.0 if equal else math.sqrt(sum((one - mean) ** 2 for one in rewards) / (len(rewards) - 1))


def figures(tallies: Sequence[Tally]) -> dict[str, float]:
    """An iteration's metrics for the journal; shares are from 0 to 1. {} if all groups were written by an older version without
    statistics."""
    if not tallies:
        return {}
    found: dict[str, float] = {
        "truncated": sum(one.truncated for one in tallies),
        "reward_errors": sum(one.reward_errors for one in tallies),
        "agent_errors": sum(one.agent_errors for one in tallies),
    }
    with_answers = [one for one in tallies if one.answers]
    if with_answers:
        answers = sum(one.answers for one in with_answers)
        found |= {
            "answer_tokens_mean": sum(one.tokens for one in with_answers) / answers,
            "answer_tokens_min": min(one.shortest for one in with_answers),
            "answer_tokens_max": max(one.longest for one in with_answers),
            "truncated_share": found["truncated"] / answers,
        }
    deviations = [one.reward_std for one in tallies if one.reward_std is not None]
    if deviations:
        without_signal = deviations.count(0.0)
        found |= {
            "reward_std": sum(deviations) / len(deviations),
            "groups_without_signal": without_signal,
            "without_signal_share": without_signal / len(deviations),
        }
    parts: dict[str, RewardPart] = {}
    for one in tallies:
        for name, part in one.parts.items():
            parts[name] = parts.get(name, RewardPart()) + part
    for name in sorted(parts)[:MOST_PARTS]:
        if parts[name].count:
            found[f"reward_parts/{name}"] = parts[name].total / parts[name].count
        # A failed reward contributes only the parts that did not fail.
        if failed := int(found["reward_errors"]) - parts[name].though_failed:
            found[f"reward_parts/{name}_failed"] = failed
    return found
