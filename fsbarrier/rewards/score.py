"""The score of a trajectory, and the interfaces of rewards."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fsbarrier.data.tasks import Task

#: a conversation as chat messages
Messages = Sequence[Mapping[str, object]]


@dataclass(frozen=True, slots=True)
class Score:
    """A score. `error`: why scoring failed (`reward` is then 0); `info`: other values returned by a reward function."""

    reward: float
    parts: dict[str, float] = field(default_factory=dict)
    info: dict[str, str] = field(default_factory=dict)
    error: str | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer to score. `text`: without its thoughts, which are `reasoning`. `messages`: the whole conversation of an agent's episode.
    `token_ids`: the tokens of prompt and answer, for an episode those of its last segment. `images`: the paths of the images it saw, in
    order, with repetitions."""

    text: str
    messages: Messages | None = None
    token_ids: Sequence[int] = ()
    images: Sequence[str] = ()
    reasoning: str = ""


def finite(value: Any) -> float | None:
    """A finite number, including numpy and torch scalars; None for anything else, including numeric text."""
    try:
        number = float(value) if not isinstance(value, str | bytes) else math.nan
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


class Reward:
    """Scores one answer at a time, or all answers to a task together. Errors of the reward are stored in the Score; it raises nothing but
    ProgramFailed, and UsageError if it was not opened."""

    async def open(self) -> None:
        """Prepare for scoring. Raises UsageError if the reward cannot be used, ProgramFailed."""

    async def score(self, task: Task, answer: Answer) -> Score:
        raise NotImplementedError

    async def score_group(self, task: Task, answers: Sequence[Answer]) -> list[Score]:
        """The Scores of the answers to a task, in order."""
        return list(await asyncio.gather(*(self.score(task, answer) for answer in answers)))

    async def close(self) -> None:
        """Release resources."""


class AddedRewards(Reward):
    """The weighted sum of several named rewards. If one of them fails, the answer has no reward."""

    def __init__(self, rewards: Sequence[tuple[float, Reward]]) -> None:
        self.rewards = rewards

    async def open(self) -> None:
        for _, reward in self.rewards:
            await reward.open()

    async def score_group(self, task: Task, answers: Sequence[Answer]) -> list[Score]:
        of_each = await asyncio.gather(*(reward.score_group(task, answers) for _, reward in self.rewards))
        weights = [weight for weight, _ in self.rewards]
        return [_added(weights, scores) for scores in zip(*of_each, strict=True)]

    async def close(self) -> None:
        for _, reward in self.rewards:
            await reward.close()


def _added(weights: Sequence[float], scores: Sequence[Score]) -> Score:
    parts: dict[str, float] = {}
    info: dict[str, str] = {}
    for number, score in enumerate(scores, start=1):
        # Two functions may have the same name.
        parts |= {f"{name}_{number}" if name in parts else name: value for name, value in score.parts.items()}
        info |= {f"{name}_{number}" if name in info else name: value for name, value in score.info.items()}
    error = next((score.error for score in scores if score.error is not None), None)
    total = sum(weight * score.reward for weight, score in zip(weights, scores, strict=True))
    return Score(0.0 if error else total, parts, info, error, max(score.seconds for score in scores))
