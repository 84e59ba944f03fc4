"""All that a rollout program is asked for, read once from its spec."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from fsbarrier.errors import UsageError
from fsbarrier.rollouts.assignment import Assignment
from fsbarrier.rollouts.sampling import Server
from fsbarrier.settings.sections import Settings

#: prompts times samples: see sampling.py
SEQUENCES_PER_REQUEST = 128


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """`sampling` is how answers are sampled, as the finished file tells it; `server` has it too, for the requests."""

    assignment: Assignment
    task_file: Path
    sampling: Mapping[str, float]
    server: Server
    settings: Settings

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any], settings: Settings) -> Self:
        """Raises UsageError."""
        sampling, engine = spec["sampling"], spec["engine"]
        samples = sampling["samples"]
        if samples > 1 and sampling["temperature"] == 0:
            raise UsageError(
                f"{samples} samples a task at temperature 0 would all be the same; give samples=1 or a temperature"
            )
        server = Server(
            url=engine["url"],
            api_key=engine.get("api_key") or "",
            model=engine.get("model") or "",
            samples=samples,
            temperature=sampling["temperature"],
            top_p=sampling["top_p"],
            top_k=sampling["top_k"],
            max_tokens=sampling["max_tokens"],
            timeout_s=settings.rollout.request_timeout_s,
            tries=settings.rollout.retries + 1,
            # A server of ours is started again by the daemon, once this program has failed: waiting for it would be in vain.
            patience_s=0.0 if settings.manages_engine else settings.engine.start_timeout_s,
        )
        return cls(Assignment.from_spec(spec), Path(spec["task_file"]), sampling, server, settings)

    @property
    def prompts_per_request(self) -> int:
        """As many as make about SEQUENCES_PER_REQUEST sequences, but at least two requests; one where agents make the prompts."""
        rollout = self.settings.rollout
        if rollout.agent:
            return 1
        if rollout.prompts_per_request:
            return min(rollout.concurrency, rollout.prompts_per_request)
        return max(1, min(SEQUENCES_PER_REQUEST // self.server.samples, rollout.concurrency // 2))
