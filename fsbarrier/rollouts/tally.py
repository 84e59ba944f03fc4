"""What a rollout has done so far, counted, and shown in its progress file."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsbarrier.rollouts.samples import Group
from fsbarrier.supervision.worker_contract import SHOW_S, Progress


@dataclass
class Tally:
    """What has been done so far, by this start of the program."""

    groups: int = 0
    trajectories: int = 0
    reward: float = 0.0
    invalid: int = 0
    truncated: int = 0
    refused: int = 0
    timed_out: int = 0
    reward_errors: int = 0
    agent_errors: int = 0
    prompt_tokens: int = 0
    tokens: int = 0  # that have come, also of groups not finished
    completion_tokens: int = 0  # of finished groups

    def add(self, group: Group, made: Sequence[Mapping[str, Any]], late: bool = False) -> None:
        self.groups += 1
        self.trajectories += len(made)
        self.reward += sum(item["reward"] for item in made)
        self.invalid += sum(not item["valid"] for item in made)
        self.truncated += sum(item["finish_reason"] == "length" for item in made)
        self.timed_out += late
        self.refused += group.error is not None and not late
        self.reward_errors += sum("reward_error" in item["metadata"] for item in made)
        self.agent_errors += sum("agent_error" in item["metadata"] for item in made)
        self.prompt_tokens += made[0]["prompt_tokens"] if made else 0
        self.completion_tokens += sum(sample.sampled_tokens for sample in group.samples)

    def counts(self) -> dict[str, int]:
        """What a result tells, beside what is in the file."""
        names = (
            "invalid",
            "truncated",
            "refused",
            "timed_out",
            "reward_errors",
            "agent_errors",
            "prompt_tokens",
            "completion_tokens",
        )
        return {name: getattr(self, name) for name in names}

    def note(self) -> str:
        counts = (
            ("truncated", self.truncated),
            ("refused", self.refused),
            ("timed out", self.timed_out),
            ("reward errors", self.reward_errors),
            ("agent errors", self.agent_errors),
        )
        return ", ".join(f"{count} {what}" for what, count in counts if count)


class Shown:
    """The progress file, kept up with the tally: written when there is news, a few times a second at most, the last news too."""

    def __init__(self, progress: Progress, total: int, tally: Tally) -> None:
        self.progress, self.total, self.tally = progress, total, tally
        self.begin = time.monotonic()
        self._last = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def seconds(self) -> float:
        return max(1e-9, time.monotonic() - self.begin)

    def news(self) -> None:
        if self._timer is None:
            wait_s = max(0.0, self._last + SHOW_S - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(wait_s, self.write)

    def write(self) -> None:
        self.close()
        self._last, tally = time.monotonic(), self.tally
        self.progress.show(
            tally.trajectories,
            self.total,
            "trajectories",
            last=True,
            reward_mean=tally.reward / tally.trajectories if tally.trajectories else None,
            tokens_per_s=round(tally.tokens / self.seconds, 1),
            note=tally.note(),
        )

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
