"""One judgement of a trajectory, and what every kind of reward can do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fsbarrier.data.tasks import Task

#: a conversation as chat messages
Messages = Sequence[Mapping[str, object]]


@dataclass(frozen=True, slots=True)
class Score:
    """One judgement. `error` says why there is none (`reward` is then 0); `info` is what a function said beside numbers."""

    reward: float
    parts: dict[str, float] = field(default_factory=dict)
    info: dict[str, str] = field(default_factory=dict)
    error: str | None = None
    seconds: float = 0.0


class Reward(Protocol):
    """What judges. `score` never raises: what goes wrong is in the Score. `close` ends what it started.

    `messages`: the whole conversation, where an agent had one.
    """

    async def score(self, task: Task, response: str, messages: Messages | None = None) -> Score: ...

    async def close(self) -> None: ...
