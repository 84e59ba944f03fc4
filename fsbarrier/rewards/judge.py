"""A judge: a language model behind any OpenAI-compatible address that says how good an answer is.

`reward.kind=judge` asks it with the words below; a reward function that has a parameter `judge` gets it, and asks what it likes. However
many trajectories wait for their reward, no more than `judge.concurrency` requests are under way.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from fsbarrier.data.tasks import Task
from fsbarrier.engine.client import refusal_text
from fsbarrier.rewards.rewards import Messages, Score, last_number

LONGEST_PAUSE_S = 10.0  # between two tries
PASSES = (408, 425, 429)  # HTTP's errors that may pass, beside 5xx

ASKED = """You judge an answer to a task.

Task:
{prompt}

Reference answer:
{answer}

Answer to be judged:
{response}

Is it right? End with a line that holds nothing but a number from 0 (wrong) to 1 (right)."""


class JudgeError(Exception):
    """The judge gave no answer, and why."""


class _Again(JudgeError):
    """It may answer when it is asked again."""


class Judge:
    """Asks the model of the settings `judge.*`. Raises JudgeError after `judge.retries` further tries."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = settings
        self.tries = int(settings["retries"]) + 1
        concurrency = int(settings["concurrency"])
        key = os.environ.get(settings["api_key_env"] or "", "")
        self._free = asyncio.Semaphore(concurrency)
        self._client = httpx.AsyncClient(
            base_url=str(settings["url"]).rstrip("/"),
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(float(settings["timeout_s"]), pool=None),
            limits=httpx.Limits(max_connections=concurrency),
        )

    @property
    def patience_s(self) -> float:
        """How long one question may take at most, once it is asked."""
        return self.tries * float(self.settings["timeout_s"]) + (self.tries - 1) * LONGEST_PAUSE_S

    async def ask(self, question: str | Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The judge's answer to a text or to chat messages. `options` go into the request (temperature is 0 where none is given)."""
        messages = [{"role": "user", "content": question}] if isinstance(question, str) else list(question)
        body = {"model": self.settings["model"], "temperature": 0, **options, "messages": messages}
        async with self._free:
            async for attempt in AsyncRetrying(
                retry=retry_if_exception_type(_Again),
                stop=stop_after_attempt(self.tries),
                wait=wait_random_exponential(multiplier=0.2, max=LONGEST_PAUSE_S),
                reraise=True,
            ):
                with attempt:
                    return await self._once(body)
        raise AssertionError("unreachable")

    async def _once(self, body: Mapping[str, Any]) -> str:
        try:
            async with asyncio.timeout(float(self.settings["timeout_s"])):
                response = await self._client.post("/chat/completions", json=body)
        except (httpx.TransportError, TimeoutError) as error:
            told = f"{type(error).__name__}: {error}".rstrip(": ")
            raise _Again(f"the judge at {self._client.base_url} does not answer: {told}") from None
        if response.status_code != 200:
            told = f"the judge refuses: HTTP {response.status_code}: {refusal_text(response.content)}"
            passes = response.status_code in PASSES or response.status_code >= 500
            raise (_Again if passes else JudgeError)(told)
        try:
            return str(response.json()["choices"][0]["message"]["content"])
        except (ValueError, KeyError, IndexError, TypeError):
            raise JudgeError("the judge's answer is no chat completion") from None

    async def close(self) -> None:
        await self._client.aclose()


class JudgeReward:
    """`reward.kind=judge`."""

    def __init__(self, judge: Judge) -> None:
        self.judge = judge

    async def score(self, task: Task, response: str, messages: Messages = None) -> Score:
        started = time.monotonic()
        prompt = task.prompt if isinstance(task.prompt, str) else task.prompt[-1]["content"]
        try:
            said = await self.judge.ask(ASKED.format(prompt=prompt, answer=task.answer, response=response))
        except JudgeError as error:
            return Score(0.0, error=str(error), seconds=time.monotonic() - started)
        grade, seconds = last_number(said.strip().rpartition("\n")[2]), time.monotonic() - started
        if grade is None or not 0 <= grade <= 1:
            told = f"the judge gave no number from 0 to 1: {said[-200:]!r}"
            return Score(0.0, error=told, seconds=seconds)
        return Score(grade, {"judge": grade}, {"judge": said}, seconds=seconds)

    async def close(self) -> None:
        await self.judge.close()
