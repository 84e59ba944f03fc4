"""`reward.kind=path/file.py:function`: a user's function as a Reward; function_process.py says how it is called.

It runs in its own processes (call_pool.py): up to PROCESSES for a plain function, each with one call at a time, and one for an `async`
function, whose calls run concurrently.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from fsbarrier.data.tasks import Task
from fsbarrier.processes.call_pool import GRACE_S, CallPool, ProcessEnded
from fsbarrier.rewards.score import Answer, Messages, Reward, Score
from fsbarrier.user_code import log_once

if TYPE_CHECKING:
    from fsbarrier.settings.sections import JudgeSettings
    from fsbarrier.specs import EngineAddress

#: parallel calls of a plain function
PROCESSES = 8


class FunctionReward(Reward):
    """Calls the function with a timeout, and stores its errors in the Score."""

    def __init__(
        self,
        kind: str,
        timeout_s: float,
        judge: JudgeSettings | None = None,
        engines: Mapping[str, EngineAddress] | None = None,
        processes: int = PROCESSES,
        options: Mapping[str, object] | None = None,
    ) -> None:
        """`options`: an argument of the functions of this package that have settings of their own."""
        self.kind, self.name = kind, kind.rpartition(":")[2]
        self.timeout_s, self.processes = timeout_s, processes
        self._judge, self._engines, self._options = judge, engines or {}, options
        self._calls = CallPool("fsbarrier.workers.reward", kind)
        self._about: dict[str, Any] | None = None
        self._turn: asyncio.Semaphore | nullcontext[None] = nullcontext()

    async def open(self) -> None:
        """Load the function. Raises UsageError if it cannot be used, ProgramFailed if its process dies."""
        about = await self._calls.open()
        if self._about is not None:
            return
        patience_s = [0.0]
        if "engines" in about["asks"]:
            patience_s += [engine.patience_s or 0.0 for engine in self._engines.values()]
        if not about["together"]:
            self._turn = asyncio.Semaphore(self.processes)
        if "judge" in about["asks"]:
            # Imported late: only a judge needs httpx, which the checks before a run do not load.
            from fsbarrier.rewards.judge import open_judge
            from fsbarrier.rewards.model_server import CONCURRENCY

            judge = open_judge(self.kind, self._judge, self.timeout_s, self._engines)
            patience_s.append(judge.patience_s)
            await judge.close()
            if about["together"]:
                # Allow as many concurrent calls as requests to the judge; waiting for a free slot does not count towards the timeout.
                self._turn = asyncio.Semaphore(CONCURRENCY)
        # The time limit of one call.
        self._limit_s = self.timeout_s + max(patience_s)
        hello = {
            "timeout_s": self.timeout_s,
            "limit_s": self._limit_s,
            "judge": self._judge if "judge" in about["asks"] else None,
            "engines": self._engines,
            "options": self._options,
        }
        self._calls.begin(hello, together=about["together"])
        self._about = about

    async def score(self, task: Task, answer: Answer) -> Score:
        await self.open()
        assert self._about is not None
        if self._about["groups"]:
            return (await self.score_group(task, [answer]))[0]
        return (await self._scores(task, answer.text, answer.reasoning, _plain(answer.messages), 1))[0]

    async def score_group(self, task: Task, answers: Sequence[Answer]) -> list[Score]:
        await self.open()
        assert self._about is not None
        if not (self._about["groups"] and answers):
            return await super().score_group(task, answers)
        messages = (
            [_plain(answer.messages) for answer in answers] if answers[0].messages is not None else None
        )
        thoughts = [answer.reasoning for answer in answers]
        texts = [answer.text for answer in answers]
        return await self._scores(task, texts, thoughts, messages, len(answers))

    async def _scores(
        self,
        task: Task,
        response: str | list[str],
        reasoning: str | list[str],
        messages: object,
        count: int,
    ) -> list[Score]:
        """Compute `count` Scores with their duration; they contain the error if the function fails. `messages`: the conversation, or
        the conversations of the whole group; None without an agent."""
        metadata: dict[str, object] = {"task_id": task.task_id, **task.metadata}
        if messages is not None:
            metadata["messages"] = messages
        prompt = task.prompt if isinstance(task.prompt, str) else task.messages
        question = {
            **{"prompt": prompt, "response": response, "reasoning": reasoning},
            **{"answer": task.answer, "metadata": metadata},
        }
        started = time.monotonic()
        async with self._turn:
            error, scores = await self._asked(question)
        if error is not None:
            scores = [Score(0.0, error=f"{self.name}: {error}")] * count
        return [replace(score, seconds=time.monotonic() - started) for score in scores]

    async def _asked(self, question: object) -> tuple[str | None, list[Score]]:
        """Call the function; returns the Scores, or the reason why there are none."""
        assert self._about is not None
        too_late = f"no reward within {self._limit_s:g} s (reward.timeout_s)"
        try:
            # Concurrent calls enforce their own time limit; killing the process for one call would end all others.
            grace_s = GRACE_S if self._about["together"] else 0.0
            answer = await self._calls.call(question, self._limit_s + grace_s)
        except TimeoutError:
            return too_late, []
        except ProcessEnded as ended:
            print(f"{self.name}: the reward's process {ended}", file=sys.stderr)
            return f"its process {ended}", []
        except ValueError as error:
            return str(error), []
        if answer.get("late"):
            return too_late, []
        if "trace" in answer:
            log_once(answer["place"], answer["trace"])
        return answer.get("error"), msgspec.convert(answer.get("scores", []), list[Score])

    async def close(self) -> None:
        await self._calls.close()


def _plain(messages: Messages | None) -> list[dict[str, object]] | None:
    return None if messages is None else [dict(message) for message in messages]
