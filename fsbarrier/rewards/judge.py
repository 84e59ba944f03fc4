"""`reward.kind=judge`: a language model behind any OpenAI-compatible API grades the answers.

The prompt is below. A user's reward function with a parameter `judge` gets the Judge and can send its own prompts. At most
`judge.concurrency` requests are in flight, no matter how many trajectories wait for a reward.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Mapping, Sequence

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
from fsbarrier.rewards.matching import last_number
from fsbarrier.rewards.score import Messages, Reward, Score
from fsbarrier.settings.sections import JudgeSettings
from fsbarrier.store.printable import without_passwords
from fsbarrier.store.reading import ANSWER_BYTES

#: how often a question is asked, with pauses
TRIES = 4
QUESTION = """You judge an answer to a task.

Task:
{prompt}

Reference answer:
{answer}

Answer to be judged:
{response}

Is it right? End with a line that holds nothing but a number from 0 (wrong) to 1 (right)."""


class JudgeError(Exception):
    """The judge gave no answer; the message is the reason."""


class _Again(JudgeError):
    """A failure that a retry may fix."""


class Judge:
    """Sends prompts to the model in the settings `judge.*`; each request gets `timeout_s`. Raises JudgeError after `TRIES` tries."""

    def __init__(self, settings: JudgeSettings, timeout_s: float) -> None:
        self.settings, self.timeout_s = settings, timeout_s
        self._free = asyncio.Semaphore(settings.concurrency)
        self._client = httpx.AsyncClient(
            base_url=str(settings.url).rstrip("/"),
            headers={
                **bearer(os.environ.get(settings.api_key_env or "", "")),
                "Accept-Encoding": "identity",
            },
            timeout=httpx.Timeout(timeout_s, pool=None),
            limits=httpx.Limits(max_connections=settings.concurrency),
        )

    @property
    def patience_s(self) -> float:
        """The maximum duration of one question, including retries."""
        return TRIES * self.timeout_s + (TRIES - 1) * LONGEST_PAUSE_S

    async def ask(self, question: str | Sequence[Mapping[str, object]], **options: object) -> str:
        """The judge's answer to a text or chat messages. `options` are added to the request (default temperature: 0)."""
        messages = [{"role": "user", "content": question}] if isinstance(question, str) else list(question)
        body = {"model": self.settings.model, "temperature": 0, **options, "messages": messages}
        async with self._free:
            return await asked_again(lambda: self._ask_once(body), after=_Again, tries=TRIES)

    async def _ask_once(self, body: Mapping[str, object]) -> str:
        try:
            # httpx limits the time between chunks of a response; this limits the whole request.
            async with asyncio.timeout(self.timeout_s):
                status, answer = await self._post(body)
        except (httpx.TransportError, TimeoutError) as error:
            # Stored with the trajectory, so without the password of its address.
            raise _Again(
                without_passwords(f"the judge at {self._client.base_url} does not answer: {described(error)}")
            ) from None
        if status != 200:
            refusal = f"the judge refuses: HTTP {status}: {refusal_text(answer)}"
            raise (_Again if may_pass(status) else JudgeError)(without_passwords(refusal))
        try:
            return str(json.loads(answer)["choices"][0]["message"]["content"])
        except (ValueError, KeyError, IndexError, TypeError, RecursionError):
            raise JudgeError("the judge's answer is no chat completion") from None

    async def _post(self, body: Mapping[str, object]) -> tuple[int, bytes]:
        """Status and content of the answer. Raises JudgeError for one that is too long or compressed, httpx.TransportError."""
        async with self._client.stream("POST", "/chat/completions", json=body) as response:
            if response.headers.get("content-encoding", "identity").lower() != "identity":
                # A few bytes of gzip may stand for gigabytes, and none was asked for.
                raise JudgeError("the judge's answer is compressed, although that was not asked for")
            answer = bytearray()
            async for piece in response.aiter_raw():
                answer += piece
                if len(answer) > ANSWER_BYTES:
                    raise JudgeError(f"the judge's answer is longer than {ANSWER_BYTES >> 20} MiB")
        return response.status_code, bytes(answer)

    async def close(self) -> None:
        await self._client.aclose()


class JudgeReward(Reward):
    """The number at the end of the judge's answer as a reward; the whole answer is kept in the Score's `info`."""

    def __init__(self, judge: Judge) -> None:
        self.judge = judge

    async def score(self, task: Task, response: str, messages: Messages | None = None) -> Score:
        started = time.monotonic()
        prompt = task.prompt if isinstance(task.prompt, str) else task.prompt[-1]["content"]
        question = QUESTION.format(prompt=prompt, answer=task.answer, response=response)
        try:
            said = await self.judge.ask(question)
        except JudgeError as error:
            return Score(0.0, error=str(error), seconds=time.monotonic() - started)
        grade, seconds = last_number(said.strip().rpartition("\n")[2]), time.monotonic() - started
        if grade is None or not 0 <= grade <= 1:
            problem = f"the judge gave no number from 0 to 1: {said[-200:]!r}"
            return Score(0.0, error=problem, seconds=seconds)
        return Score(grade, {"judge": grade}, {"judge": said}, seconds=seconds)

    async def close(self) -> None:
        await self.judge.close()
