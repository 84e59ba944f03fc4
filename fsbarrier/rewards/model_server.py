"""Sends the requests of rewards to a model: a frozen engine of this run, or an external server.

At most `CONCURRENCY` requests are in flight, no matter how many trajectories wait. Transient failures are retried: a frozen engine
that has died is back within its own `start_timeout_s`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from fsbarrier.data.tasks import Task
from fsbarrier.engine.openai_http import (
    LONGEST_PAUSE_S,
    asked_again,
    bearer,
    described,
    may_pass,
    refusal_text,
)
from fsbarrier.rewards.score import Answer, Reward, Score
from fsbarrier.specs import EngineAddress
from fsbarrier.store.foreign_json import NotJson, parse
from fsbarrier.store.reading import ANSWER_BYTES
from fsbarrier.wording import without_passwords

#: maximum number of concurrent requests of a node to one model
CONCURRENCY = 32
#: attempts per request to an external server, with pauses
TRIES = 4


class ModelServerError(Exception):
    """Raised if the model gives no answer; the message is the reason."""


class _Again(ModelServerError):
    """A failure that a retry may fix."""


class ModelServer:
    """A client of the model. `said`: what error messages call the model. Each request gets `timeout_s`."""

    def __init__(self, name: str, where: EngineAddress, timeout_s: float) -> None:
        self.said, self.timeout_s, self._patience_s = name, timeout_s, where.patience_s
        self._free = asyncio.Semaphore(CONCURRENCY)
        self._client = httpx.AsyncClient(
            base_url=where.base_url.rstrip("/"),
            headers={**bearer(where.api_key), "Accept-Encoding": "identity"},
            timeout=httpx.Timeout(timeout_s, pool=None),
            limits=httpx.Limits(max_connections=CONCURRENCY),
            # A frozen engine is in this cluster.
            trust_env=where.patience_s is None,
        )

    @property
    def patience_s(self) -> float:
        """The maximum duration of one question, including retries."""
        if self._patience_s is not None:
            return self._patience_s + self.timeout_s
        return TRIES * self.timeout_s + (TRIES - 1) * LONGEST_PAUSE_S

    async def post(self, path: str, body: Mapping[str, object]) -> Any:
        """The answer, as JSON. Raises ModelServerError."""
        tries = TRIES if self._patience_s is None else None
        async with self._free:
            return await asked_again(
                lambda: self._post_once(path, body), after=_Again, tries=tries, within_s=self._patience_s
            )

    async def _post_once(self, path: str, body: Mapping[str, object]) -> Any:
        try:
            # httpx limits the time between chunks of a response; this limits the whole request.
            async with asyncio.timeout(self.timeout_s):
                status, answer = await self._answer(path, body)
        except (httpx.TransportError, TimeoutError) as error:
            # The message is stored with the trajectory, so remove the password from the address.
            raise _Again(
                without_passwords(
                    f"{self.said} at {self._client.base_url} does not answer: {described(error)}"
                )
            ) from None
        if status != 200:
            refusal = without_passwords(f"{self.said} refuses: HTTP {status}: {refusal_text(answer)}")
            raise (_Again if may_pass(status) else ModelServerError)(refusal)
        try:
            return parse(answer)
        except NotJson:
            raise ModelServerError(f"the answer of {self.said} is not JSON") from None

    async def _answer(self, path: str, body: Mapping[str, object]) -> tuple[int, bytes]:
        """The status and content of a response. Raises ModelServerError if it is too long or compressed, httpx.TransportError."""
        async with self._client.stream("POST", path, json=body) as response:
            if response.headers.get("content-encoding", "identity").lower() != "identity":
                # Reject compressed responses: none was requested, and a few bytes of gzip may expand to gigabytes.
                raise ModelServerError(
                    f"the answer of {self.said} is compressed, although that was not asked for"
                )
            answer = bytearray()
            async for piece in response.aiter_raw():
                answer += piece
                if len(answer) > ANSWER_BYTES:
                    raise ModelServerError(
                        f"the answer of {self.said} is longer than {ANSWER_BYTES >> 20} MiB"
                    )
        return response.status_code, bytes(answer)

    async def close(self) -> None:
        await self._client.aclose()


class ClassifierReward(Reward):
    """`reward.kind=engines.NAME`: the raw score of a reward model with a classifier head for the tokens of prompt and answer."""

    def __init__(self, engine: EngineAddress, timeout_s: float) -> None:
        self.engine = engine
        self.server = ModelServer(f"engines.{engine.model}", engine, timeout_s)

    async def score_group(self, task: Task, answers: Sequence[Answer]) -> list[Score]:
        if not answers:
            return []
        started, name = time.monotonic(), self.engine.model
        tokens = [list(answer.token_ids) for answer in answers]
        # Request the raw score, without the activation, which would be a sigmoid.
        body = {"model": name, "input": tokens, "use_activation": False}
        try:
            reply = await self.server.post(f"{self.engine.root}/classify", body)
            scores = [float(score) for item in reply["data"] for score in item["probs"]]
            if len(scores) != len(answers) or not all(map(math.isfinite, scores)):
                raise ValueError(f"{str(scores)[:80]} for {len(answers)} answers")
        except (ModelServerError, KeyError, TypeError, ValueError) as error:
            ours = isinstance(error, ModelServerError)
            problem = str(error) if ours else f"engines.{name} gave no score for each answer: {error}"
            return [Score(0.0, error=problem, seconds=time.monotonic() - started)] * len(answers)
        return [Score(score, {name: score}, seconds=time.monotonic() - started) for score in scores]

    async def close(self) -> None:
        await self.server.close()
