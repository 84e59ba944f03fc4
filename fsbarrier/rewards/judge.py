"""`reward.kind=judge`: a language model behind any OpenAI-compatible API grades the answers.

The prompt is below. A user's reward function with a parameter `judge` gets the Judge and can send its own prompts. At most
`CONCURRENCY` requests of a node are in flight, no matter how many trajectories wait for a reward.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence

from fsbarrier.data import images
from fsbarrier.data.tasks import Task
from fsbarrier.errors import UsageError
from fsbarrier.rewards.matching import last_number
from fsbarrier.rewards.model_server import ModelServer, ModelServerError
from fsbarrier.rewards.score import Answer, Reward, Score
from fsbarrier.settings.sections import JudgeSettings
from fsbarrier.settings.value_types import frozen_engine
from fsbarrier.specs import EngineAddress

QUESTION = """You judge an answer to a task.

Task:
{prompt}

{more}Answer to be judged:
{response}

Is it right? End with a line that holds nothing but a number from 0 (wrong) to 1 (right)."""


#: the sentence about the images in the prompt, by `judge.images`
SHOWN = {"last": "The image is what was seen last.", "all": "The images are what was seen, in order."}

#: raised if the judge gives no answer; the message is the reason
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
        """Ask the judge with a text or chat messages, with images as in tasks. `options`: of the request (default temperature: 0)."""
        asked = [{"role": "user", "content": question}] if isinstance(question, str) else list(question)
        try:
            messages = await asyncio.to_thread(images.replaced, asked, _sent)
        except ValueError as error:
            raise JudgeError(f"an image for the judge: {error}") from None
        body = {"model": self.model, "temperature": 0, **options, "messages": messages}
        answer = await self._server.post("/chat/completions", body)
        try:
            return str(answer["choices"][0]["message"]["content"])
        except (KeyError, IndexError, TypeError):
            raise JudgeError("the judge's answer is no chat completion") from None

    async def close(self) -> None:
        await self._server.close()


def open_judge(
    kind: str, settings: JudgeSettings | None, timeout_s: float, engines: Mapping[str, EngineAddress]
) -> Judge:
    """The judge for the reward `kind`. Raises UsageError if none is configured."""
    if settings is not None and (name := frozen_engine(settings.model)) is not None:
        return Judge(settings, timeout_s, engines[name])
    if settings is None or not settings.url or not settings.model:
        raise UsageError(
            f"reward.kind={kind}: uses a judge, which needs judge.model=engines.NAME, or judge.url and judge.model"
        )
    if not settings.url.startswith(("http://", "https://")):
        raise UsageError(f"judge.url={settings.url}: must be a URL such as https://host/v1")
    if settings.api_key_env is not None and not os.environ.get(settings.api_key_env):
        raise UsageError(
            f"judge.api_key_env={settings.api_key_env}: this variable is not set on this node; export it"
        )
    return Judge(settings, timeout_s)


class JudgeReward(Reward):
    """Uses the number at the end of the judge's answer as the reward; the Score's `info` keeps the whole answer."""

    def __init__(self, judge: Judge, shows: str) -> None:
        """`shows`: the setting `judge.images`."""
        self.judge, self.shows = judge, shows

    async def score(self, task: Task, answer: Answer) -> Score:
        started = time.monotonic()
        shown = {"none": [], "last": answer.images[-1:], "all": dict.fromkeys(answer.images)}[self.shows]
        prompt = task.prompt if isinstance(task.prompt, str) else images.text_of(task.prompt[-1]["content"])
        more = "" if task.answer is None else f"Reference answer:\n{task.answer}\n\n"
        if shown:
            more += f"{SHOWN[self.shows]}\n\n"
        text = QUESTION.format(prompt=prompt, more=more, response=answer.text)
        content = [
            *({"type": "image", "image": image} for image in shown),
            {"type": "text", "text": text},
        ]
        try:
            verdict = await self.judge.ask([{"role": "user", "content": content if shown else text}])
        except JudgeError as error:
            return Score(0.0, error=str(error), seconds=time.monotonic() - started)
        grade, seconds = _grade(verdict), time.monotonic() - started
        if grade is None or not 0 <= grade <= 1:
            problem = f"the judge gave no number from 0 to 1: {verdict[-200:]!r}"
            return Score(0.0, error=problem, seconds=seconds)
        return Score(grade, {"judge": grade}, {"judge": verdict}, seconds=seconds)

    async def close(self) -> None:
        await self.judge.close()


def _grade(said: str) -> float | None:
    """The number at the end of the last line, which only punctuation and markup may follow. A number before other words is no grade."""
    line = said.strip().rpartition("\n")[2]
    return last_number(line) if line.rstrip(" .*_`$)]}")[-1:].isdigit() else None


def _sent(source: str) -> dict[str, object]:
    """An image in the format of OpenAI's API. Raises ValueError."""
    return {"type": "image_url", "image_url": {"url": images.as_url(source)}}
