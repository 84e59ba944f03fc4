"""`reward.kind=judge`: a language model behind any OpenAI-compatible API grades the answers.

The prompt is below. A user's reward function with a parameter `judge` gets the Judge and can send its own prompts. At most
`CONCURRENCY` requests of a node are in flight, no matter how many trajectories wait for a reward.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence

from fsbarrier.data.images import text_of
from fsbarrier.data.tasks import Task
from fsbarrier.engine.openai_http import EngineAddress
from fsbarrier.rewards.matching import last_number
from fsbarrier.rewards.model_server import ModelServer, ModelServerError
from fsbarrier.rewards.score import Messages, Reward, Score
from fsbarrier.settings.sections import JudgeSettings

QUESTION = """You judge an answer to a task.

Task:
{prompt}

Reference answer:
{answer}

Answer to be judged:
{response}

Is it right? End with a line that holds nothing but a number from 0 (wrong) to 1 (right)."""


#: the judge gave no answer; the message is the reason
JudgeError = ModelServerError


class Judge:
    """Sends prompts to the model in the settings `judge.*`; each request gets `timeout_s`. Raises JudgeError if retries do not help."""

    def __init__(
        self, settings: JudgeSettings, timeout_s: float, engine: EngineAddress | None = None
    ) -> None:
        """`engine`: the frozen engine that `judge.model` names."""
        key = os.environ.get(settings.api_key_env or "", "")
        where = engine or EngineAddress(str(settings.url), key, settings.model or "", None)
        self.model = where.model
        self._server = ModelServer("the judge", where, timeout_s)

    @property
    def patience_s(self) -> float:
        """The maximum duration of one question, including retries."""
        return self._server.patience_s

    async def ask(self, question: str | Sequence[Mapping[str, object]], **options: object) -> str:
        """The judge's answer to a text or chat messages. `options` are added to the request (default temperature: 0)."""
        messages = [{"role": "user", "content": question}] if isinstance(question, str) else list(question)
        body = {"model": self.model, "temperature": 0, **options, "messages": messages}
        answer = await self._server.post("/chat/completions", body)
        try:
            return str(answer["choices"][0]["message"]["content"])
        except (KeyError, IndexError, TypeError):
            raise JudgeError("the judge's answer is no chat completion") from None

    async def close(self) -> None:
        await self._server.close()


class JudgeReward(Reward):
    """The number at the end of the judge's answer as a reward; the whole answer is kept in the Score's `info`."""

    def __init__(self, judge: Judge) -> None:
        self.judge = judge

    async def score(self, task: Task, response: str, messages: Messages | None = None) -> Score:
        started = time.monotonic()
        prompt = task.prompt if isinstance(task.prompt, str) else text_of(task.prompt[-1]["content"])
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
