"""Runs in the process of a reward function (user_function.py starts it).

The function is called for each trajectory as

    reward(prompt, response, answer, metadata) -> float | {"reward": float, ...}

and may be `async`. `prompt` has the form of the task file (text or chat messages); `metadata` contains the task's other fields and its
`task_id`. A function with verl's parameters (`data_source, solution_str, ground_truth, extra_info`) is called with those. A function with
a parameter `responses` instead of `response` scores all answers to a task together and returns a list, array or tensor of as many;
`metadata["messages"]` is then a list too. Other numbers in a returned dict become the trajectory's `reward_parts`, other values its
metadata. A parameter `reasoning` receives the thoughts, which are not in the response (a list if there are `responses`; "" without
thoughts). A parameter `judge` receives the model of the settings `judge.*` (judge.py), a parameter `engines` the addresses of the frozen
engines by name, for any client.
"""

from __future__ import annotations

import asyncio
import inspect
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import Any

import msgspec

from fsbarrier.errors import UsageError
from fsbarrier.loader import failure
from fsbarrier.processes.call_pool import AnswerTo, answer_calls
from fsbarrier.processes.fork_server import Work
from fsbarrier.rewards.score import Score, finite
from fsbarrier.settings.sections import JudgeSettings
from fsbarrier.specs import EngineAddress
from fsbarrier.user_code import code_file, load_named

Function = Callable[..., Any]

#: the parameters of a function with verl's signature
VERLS_PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")
#: longest value that an error shows
SHOWN = 200


def load(kind: str) -> tuple[Work, object]:
    """Load the function; returns the work of its process, and its properties for the parent. Raises UsageError."""
    function = load_function(kind)
    together = inspect.iscoroutinefunction(function)

    def work(connection: socket.socket) -> None:
        answer_calls(partial(_answers, kind, function), connection, together=together)

    return work, {
        "together": together,
        "groups": asks(function, "responses"),
        "asks": [name for name in ("judge", "engines") if asks(function, name)],
    }


def load_function(kind: str) -> Function:
    """Load the user's function ("path/file.py:function"), or the one of a built-in kind. Raises UsageError, also for a wrong signature."""
    if kind == "math":
        from fsbarrier.rewards.math_verify import math

        return math
    if kind == "code":
        from fsbarrier.rewards.code import usable

        return usable()
    function = load_named("reward.kind", kind)
    if not callable(function):
        raise UsageError(f"reward.kind={kind}: {kind.rpartition(':')[2]} is not a function")
    more = {name: None for name in ("judge", "engines", "reasoning") if asks(function, name)}
    try:
        if is_verls(function):
            inspect.signature(function).bind(**dict.fromkeys(VERLS_PARAMETERS), **more)
        else:
            inspect.signature(function).bind("prompt", "response", "answer", {}, **more)
    except TypeError as error:
        called = ", ".join(VERLS_PARAMETERS) if is_verls(function) else "prompt, response, answer, metadata"
        raise UsageError(f"reward.kind={kind}: must accept a call reward({called}): {error}") from None
    return function


def asks(function: Function, name: str) -> bool:
    """Whether the function has a parameter of this name."""
    return name in inspect.signature(function).parameters


def is_verls(function: Function) -> bool:
    return asks(function, "solution_str")


def _answers(kind: str, function: Function, hello: dict[str, Any]) -> AnswerTo:
    """The handler for the parent's calls."""
    more: dict[str, object] = {}
    engines = msgspec.convert(hello["engines"], dict[str, EngineAddress])
    if hello["judge"] is not None:
        # Imported late: only a judge needs httpx.
        from fsbarrier.rewards.judge import open_judge

        settings = msgspec.convert(hello["judge"], JudgeSettings)
        more["judge"] = open_judge(kind, settings, hello["timeout_s"], engines)
    if asks(function, "engines"):
        more["engines"] = engines
    if hello["options"]:
        more["options"] = hello["options"]
    call = partial(_call, function, more)
    if inspect.iscoroutinefunction(function):
        return partial(_answer_in_time, function, call, hello["limit_s"])
    return partial(_answer, function, call)


def _call(function: Function, more: Mapping[str, object], question: Mapping[str, Any]) -> Any:
    prompt, response, answer, metadata = (
        question[name] for name in ("prompt", "response", "answer", "metadata")
    )
    if asks(function, "reasoning"):
        more = {**more, "reasoning": question["reasoning"]}
    if is_verls(function):
        arguments = (
            metadata.get("data_source"),
            response,
            answer,
            metadata.get("extra_info", metadata),
        )
        return function(**dict(zip(VERLS_PARAMETERS, arguments, strict=True)), **more)
    return function(prompt, response, answer, metadata, **more)


def _answer(function: Function, call: Callable[[Any], Any], question: Mapping[str, Any]) -> Any:
    # The user's code may raise any exception.
    try:
        value = call(question)
        # A plain function may return a coroutine.
        if inspect.isawaitable(value):
            return _answer_later(function, value, question)
        return _told(function, value, question)
    except (Exception, SystemExit) as error:
        return _failed(function, error)


async def _answer_later(function: Function, value: Awaitable[Any], question: Mapping[str, Any]) -> Any:
    try:
        return _told(function, await value, question)
    except (Exception, SystemExit) as error:
        return _failed(function, error)


async def _answer_in_time(
    function: Function, call: Callable[[Any], Any], limit_s: float, question: Mapping[str, Any]
) -> Any:
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            return await _answer_later(function, call(question), question)
    except TimeoutError:
        return {"late": True}


def _failed(function: Function, error: BaseException) -> dict[str, object]:
    text, place, trace = failure(error, code_file(function))
    return {"error": text, "place": place, "trace": trace}


def _told(function: Function, value: object, question: Mapping[str, Any]) -> dict[str, object]:
    """The function's result as Scores, or the error if it is not a valid reward."""
    response = question["response"]
    if isinstance(response, str):
        return {"scores": [_read(function, value)]}
    # Accept a list, an array or a tensor, but no text or dict.
    several = isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)
    values = list(value) if several and isinstance(value, Iterable) else []
    if not several or len(values) != len(response):
        return {"error": f"gave {_shown(value)}, not a list of {len(response)} rewards"}
    return {"scores": [_read(function, value) for value in values]}


def _read(function: Function, value: object) -> Score:
    if isinstance(value, Score):
        return value
    name, rest = getattr(function, "__name__", "reward"), dict[str, object]()
    if isinstance(value, Mapping):
        key = "score" if is_verls(function) else "reward"
        rest = {str(inner): value[inner] for inner in value if inner != key}
        value = value.get(key)
    reward = finite(value)
    if reward is None:
        return Score(0.0, error=f'{name}: gave {_shown(value)}, not a finite number or a dict with "reward"')
    numbers = {key: number for key, inner in rest.items() if (number := finite(inner)) is not None}
    info = {key: str(inner) for key, inner in rest.items() if key not in numbers}
    return Score(reward, {name: reward, **numbers}, info)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
