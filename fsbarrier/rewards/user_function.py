"""`reward.kind=path/file.py:function`: a user's function as a Reward.

It is called for each trajectory as

    reward(prompt, response, answer, metadata) -> float | {"reward": float, ...}

and may be `async`. `prompt` has the form of the task file (text or chat messages); `metadata` contains the task's other fields and its
`task_id`. A function with verl's parameters (`data_source, solution_str, ground_truth, extra_info`) is called with those. A function with
a parameter `responses` instead of `response` scores all answers to a task together and returns a list; `metadata["messages"]` is then a
list too. Other numbers in a returned dict become the trajectory's `reward_parts`, other values its metadata. Up to THREADS calls of a plain
function run in parallel threads, so it may block and must be thread-safe. A parameter `judge` receives the model of the settings `judge.*`
(judge.py), a parameter `engines` the addresses of the frozen engines by name, for any client.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from fsbarrier.data.tasks import Task
from fsbarrier.rewards.score import Answer, Messages, Reward, Score, finite
from fsbarrier.user_code import code_file, described_failure

if TYPE_CHECKING:
    from fsbarrier.engine.openai_http import EngineAddress
    from fsbarrier.rewards.judge import Judge

T = TypeVar("T")

#: parallel calls of a plain function
THREADS = 8
#: the parameters of a function with verl's signature
VERLS_PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")


def is_verls(function: Callable[..., object]) -> bool:
    return "solution_str" in inspect.signature(function).parameters


def takes_groups(function: Callable[..., object]) -> bool:
    """Whether the function scores all answers to a task together."""
    return "responses" in inspect.signature(function).parameters


class FunctionReward(Reward):
    """Calls the function with a timeout, and stores its errors in the Score."""

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        timeout_s: float,
        judge: Judge | None = None,
        engines: Mapping[str, EngineAddress] | None = None,
    ) -> None:
        self.name, self.function, self.judge = name, function, judge
        self._more = {key: one for key, one in (("judge", judge), ("engines", engines)) if one is not None}
        self.file = code_file(function)
        self._is_async, self._threads = inspect.iscoroutinefunction(function), DaemonThreads()
        # With a judge, as many calls at once as requests to it; waiting for a slot does not count towards the timeout.
        patience_s = [one.patience_s or 0.0 for one in (judge, *(engines or {}).values()) if one is not None]
        self.timeout_s = timeout_s + max(patience_s, default=0.0)
        self._turn: asyncio.Semaphore | nullcontext[None]
        if judge is not None:
            from fsbarrier.rewards.model_server import CONCURRENCY

            self._turn = asyncio.Semaphore(CONCURRENCY)
        else:
            self._turn = nullcontext() if self._is_async else asyncio.Semaphore(THREADS)

    async def score(self, task: Task, answer: Answer) -> Score:
        async def scores() -> list[Score]:
            return [self._read(await self._call(task, answer.text, _plain(answer.messages)))]

        (score,) = await self._timed(scores, 1)
        return score

    async def _timed(self, scores: Callable[[], Awaitable[list[Score]]], count: int) -> list[Score]:
        """`count` Scores with their time; with the error if the function fails."""
        started = time.monotonic()
        try:
            found = await scores()
        except TimeoutError:
            reason = f"{self.name}: no reward within {self.timeout_s:g} s (reward.timeout_s)"
            found = [Score(0.0, error=reason)] * count
        # The user's code may raise anything.
        except Exception as error:
            found = [Score(0.0, error=f"{self.name}: {described_failure(error, self.file)}")] * count
        return [replace(score, seconds=time.monotonic() - started) for score in found]

    async def _call(self, task: Task, response: str | list[str], messages: object) -> object:
        """`messages`: the conversation, or the conversations of the whole group; None without an agent."""
        prompt = task.prompt if isinstance(task.prompt, str) else task.messages
        metadata: dict[str, object] = {"task_id": task.task_id, **task.metadata}
        if messages is not None:
            metadata["messages"] = messages
        if is_verls(self.function):
            arguments = (
                metadata.get("data_source"),
                response,
                task.answer,
                metadata.get("extra_info", metadata),
            )
            call = partial(self.function, **dict(zip(VERLS_PARAMETERS, arguments, strict=True)), **self._more)
        else:
            call = partial(self.function, prompt, response, task.answer, metadata, **self._more)
        async with self._turn:
            if self._is_async:
                return await asyncio.wait_for(_staying(call()), self.timeout_s)
            calling = asyncio.get_running_loop().run_in_executor(self._threads, call)
            value = await asyncio.wait_for(calling, self.timeout_s)
        # A plain function may return a coroutine.
        return (
            await asyncio.wait_for(_staying(value), self.timeout_s) if inspect.isawaitable(value) else value
        )

    def _read(self, value: object) -> Score:
        """The function's result as a Score."""
        rest: dict[str, object] = {}
        if isinstance(value, Mapping):
            name = "score" if is_verls(self.function) else "reward"
            rest = {str(key): inner for key, inner in value.items() if key != name}
            value = value.get(name)
        reward = finite(value)
        if reward is None:
            reason = f'{self.name}: gave {value!r}, not a finite number or a dict with "reward"'
            return Score(0.0, error=reason)
        numbers = {key: number for key, inner in rest.items() if (number := finite(inner)) is not None}
        info = {key: str(inner) for key, inner in rest.items() if key not in numbers}
        return Score(reward, {self.name: reward, **numbers}, info)

    async def close(self) -> None:
        if self.judge is not None:
            await self.judge.close()


class GroupFunctionReward(FunctionReward):
    """A function that scores all answers to a task together."""

    async def score_group(self, task: Task, answers: Sequence[Answer]) -> list[Score]:
        if not answers:
            return []
        messages = [_plain(one.messages) for one in answers] if answers[0].messages is not None else None

        async def scores() -> list[Score]:
            found = await self._call(task, [one.text for one in answers], messages)
            if not isinstance(found, Sequence) or len(found) != len(answers):
                raise ValueError(f"gave {found!r}, not a list of {len(answers)} rewards")
            return [self._read(one) for one in found]

        return await self._timed(scores, len(answers))


def _plain(messages: Messages | None) -> list[dict[str, object]] | None:
    return None if messages is None else [dict(message) for message in messages]


async def _staying(call: Awaitable[T]) -> T:
    """The function's result. One that calls sys.exit has failed; it would end the event loop, and this program without a result."""
    try:
        return await call
    except SystemExit as error:
        raise RuntimeError(f"SystemExit: {error}") from error


class DaemonThreads(ThreadPoolExecutor):
    """An executor for users' code, each call in a daemon thread of its own: one that hangs takes no other's place, and cannot keep this
    program from exiting."""

    def submit(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        # A running call cannot be cancelled, so a caller that stops waiting does not affect the thread.
        future.set_running_or_notify_cancel()

        def run() -> None:
            try:
                future.set_result(function(*args, **kwargs))
            except (StopIteration, SystemExit) as error:
                # The first cannot be raised into a coroutine, and the second would end its event loop.
                future.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))
            except Exception as error:
                future.set_exception(error)

        threading.Thread(target=run, name="user's code", daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Nothing is waited for."""
