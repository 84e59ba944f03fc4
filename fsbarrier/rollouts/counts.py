"""Counts the work of a rollout and reports it in the progress file."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from fsbarrier.data.group_stats import GroupStats
from fsbarrier.data.trajectory import Trajectory
from fsbarrier.decisions import RolloutReport
from fsbarrier.processes.worker_contract import SHOW_S, ProgressWriter
from fsbarrier.rollouts.samples import SampledGroup


@dataclass
class Counts:
    """Counts the work done since the program started. `stats`: the sums over its groups."""

    groups: int = 0
    stats: GroupStats = field(default_factory=GroupStats)
    refused: int = 0
    timed_out: int = 0
    prompt_tokens: int = 0
    #: sampled tokens, including those of unfinished groups
    tokens: int = 0
    #: tokens of finished groups
    completion_tokens: int = 0

    def add(self, group: SampledGroup, trajectories: Sequence[Trajectory], late: bool = False) -> None:
        """Count a finished group; `late`: it was ended by its timeout."""
        self.groups += 1
        self.stats = GroupStats.total((self.stats, GroupStats.of(trajectories)))
        self.timed_out += late
        self.refused += group.error is not None and not late
        # The samples of a group share one prompt.
        self.prompt_tokens += trajectories[0]["prompt_tokens"] if trajectories else 0
        self.completion_tokens += sum(sample.sampled_tokens for sample in group.samples)

    @property
    def unusual(self) -> dict[str, int]:
        """The counts that the progress shows only if they are not 0."""
        return {
            "truncated": self.stats.truncated,
            "refused": self.refused,
            "timed_out": self.timed_out,
            "reward_errors": self.stats.reward_errors,
            "agent_errors": self.stats.agent_errors,
            "environment_errors": self.stats.environment_errors,
        }

    def added_to(self, report: RolloutReport) -> RolloutReport:
        """The report with these counts."""
        stats = self.stats
        return replace(
            report,
            invalid=stats.invalid,
            truncated=stats.truncated,
            refused=self.refused,
            timed_out=self.timed_out,
            reward_errors=stats.reward_errors,
            agent_errors=stats.agent_errors,
            environment_errors=stats.environment_errors,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
        )

    def note(self) -> str:
        # An episode whose history the agent changed is trained on in several segments, which costs its context again.
        shown = {**self.unusual, "forked episodes": self.stats.forked}
        return ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in shown.items() if count)


class CountsProgress:
    """Writes the counts to the progress file, at most a few times a second; the final counts are always written.

    `servers`: returns the activity of engines and environments, which is shown too.
    """

    def __init__(
        self,
        progress: ProgressWriter,
        total: int,
        counts: Counts,
        servers: Callable[[], dict[str, object]],
    ) -> None:
        self.progress, self.total, self.counts, self.servers = progress, total, counts, servers
        self.begin = time.monotonic()
        self._written_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def seconds(self) -> float:
        return max(1e-9, time.monotonic() - self.begin)

    def write_soon(self) -> None:
        """Call this after changing the counts."""
        if self._timer is None:
            wait_s = max(0.0, self._written_at + SHOW_S - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(wait_s, self.write)

    def write(self) -> None:
        self.close()
        self._written_at, counts = time.monotonic(), self.counts
        self.progress.show(
            counts.stats.trajectories,
            self.total,
            "trajectories",
            last=True,
            reward_mean=counts.stats.reward_mean,
            tokens_per_s=round(counts.tokens / self.seconds, 1),
            note=counts.note(),
            **self.servers(),
        )

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
