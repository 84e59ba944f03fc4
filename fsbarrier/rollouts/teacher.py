"""The log-probabilities of sampled tokens under the frozen engine `engines.teacher`, for `algorithm.loss=distil`.

They are requested when a group is finished, and stored with it. vLLM computes them at temperature 1, so rollouts must use it too.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from typing import Any

from fsbarrier.data.trajectory import Trajectory
from fsbarrier.engine.openai_http import given_logprobs
from fsbarrier.errors import ProgramFailed
from fsbarrier.rewards.model_server import ModelServer, ModelServerError
from fsbarrier.specs import EngineAddress

#: timeout of a request
TIMEOUT_S = 600.0


class Teacher:
    def __init__(self, engine: EngineAddress) -> None:
        self._model = engine.model
        self._server = ModelServer(f"engines.{engine.model}", engine, TIMEOUT_S)

    async def mark(self, trajectories: Sequence[Trajectory]) -> None:
        """Add `teacher_logprobs` to these trajectories. Raises ProgramFailed if the teacher does not give them."""
        try:
            await asyncio.gather(*(self._mark(one) for one in trajectories))
        except ModelServerError as error:
            raise ProgramFailed(str(error)) from None

    async def _mark(self, trajectory: Trajectory) -> None:
        tokens, mask = trajectory["token_ids"].tolist(), trajectory["loss_mask"]
        starts = trajectory.get("segments", [0])
        ends = [*starts[1:], len(tokens)]
        parts = await asyncio.gather(*(self._ask(tokens[a:b]) for a, b in zip(starts, ends, strict=True)))
        found = [value for part in parts for value in part]
        trajectory["teacher_logprobs"] = array(
            "f", [p if m else 0.0 for p, m in zip(found, mask, strict=True)]
        )

    async def _ask(self, tokens: list[int]) -> list[float]:
        """The log-probability of each token given the previous ones; 0 for the first token."""
        if len(tokens) < 2:
            return [0.0] * len(tokens)
        body = {"model": self._model, "prompt": [tokens], "max_tokens": 1, "prompt_logprobs": 0}
        answer: Any = await self._server.post("/completions", body)
        try:
            return given_logprobs(answer, [tokens])[0]
        except ValueError as error:
            raise ModelServerError(f"engines.{self._model} gave {error}") from None

    async def close(self) -> None:
        await self._server.close()
