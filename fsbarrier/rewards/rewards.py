"""How a trajectory is judged: exact match, numeric match, math-verify, or a function of one's own.

`reward.kind` names one of KINDS, or `path/file.py:function`: loaded by path, called as

    reward(prompt, response, answer, metadata) -> float | {"reward": float, ...}

for each trajectory, and it may be `async`. `prompt` is as the task file has it (text or chat messages), `metadata` holds the task's
other fields and its `task_id`. Further numbers of a dict become the trajectory's `reward_parts`, other values its metadata. A plain
function runs in up to THREADS threads at once, so it may block, and must be fit for threads. One with a parameter `judge` gets the
model of the settings `judge.*` (fsbarrier/rewards/judge.py). Where it raises, or takes longer
than `reward.timeout_s`, the trajectory is marked and counted; above `reward.max_error_share` of them the phase fails.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fsbarrier.data.tasks import Task
from fsbarrier.errors import UsageError
from fsbarrier.rewards.user_file import load_named

if TYPE_CHECKING:
    from fsbarrier.rewards.judge import Judge

KINDS = ("exact", "numeric", "math")
JUDGE = "judge"
TOLERANCE = 1e-6  # relative, between numbers
THREADS = 8  # calls of a plain reward function at once
MATH_PROCESSES = 4  # at most; they are started when the first answer is there
DEFAULT_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Score:
    """One judgement. `error` says why there is none (`reward` is then 0); `info` is what a function said beside numbers."""

    reward: float
    parts: dict[str, float] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    seconds: float = 0.0


Messages = Sequence[Mapping[str, Any]] | None


class Reward(Protocol):
    """What judges. `score` never raises: what goes wrong is in the Score. `close` ends what it started.

    `messages`: the whole conversation, where an agent had one.
    """

    async def score(self, task: Task, response: str, messages: Messages = None) -> Score: ...

    async def close(self) -> None: ...


def open_reward(
    kind: str, *, timeout_s: float = DEFAULT_TIMEOUT_S, judge: Mapping[str, Any] | None = None
) -> Reward:
    """The reward that `reward.kind` names; `judge`: the settings of that name. Raises UsageError where its file or function is missing
    or broken, or a judge is wanted and none is set."""
    match kind:
        case "exact":
            return BuiltIn(kind, exact)
        case "numeric":
            return BuiltIn(kind, numeric)
        case "math":
            return MathReward(timeout_s)
        case "judge":
            from fsbarrier.rewards.judge import JudgeReward

            return JudgeReward(_open_judge(kind, judge))
    if ":" not in kind:
        raise UsageError(f"reward.kind={kind}: must be {', '.join(KINDS)}, {JUDGE} or path/file.py:function")
    name, function = kind.rpartition(":")[2], load_named("reward.kind", kind)
    if not callable(function):
        raise UsageError(f"reward.kind={kind}: {name} is not a function")
    asks = JUDGE in inspect.signature(function).parameters
    return FunctionReward(name, function, timeout_s, _open_judge(kind, judge) if asks else None)


def _open_judge(kind: str, settings: Mapping[str, Any] | None) -> Judge:
    from fsbarrier.rewards.judge import Judge

    if not settings or not settings.get("url") or not settings.get("model"):
        raise UsageError(f"reward.kind={kind}: asks a judge; give judge.url and judge.model")
    return Judge(settings)


def check_answers(kind: str, tasks: Iterable[Task], path: Path) -> None:
    """Raises UsageError naming the line of the first task whose answer `kind` can never judge by."""
    if kind not in KINDS:
        return
    for task in tasks:
        if task.answer is None or not str(task.answer).strip():
            raise UsageError(
                f"{path}, task {task.index}: reward.kind={kind} needs an answer, and it has none"
            )
        if kind == "numeric" and last_number(str(task.answer)) is None:
            raise UsageError(
                f"{path}, task {task.index}: reward.kind=numeric, but the answer has no number: {task.answer!r}"
            )


# --- built in -------------------------------------------------------------------------------------------------------------


def exact(response: str, answer: Any) -> float:
    """1.0 where the response is the answer, but for white space around either."""
    return float(response.strip() == str(answer).strip())


def numeric(response: str, answer: Any) -> float:
    """1.0 where the response's last number is the answer's, within TOLERANCE; see `last_number`."""
    found, wanted = last_number(response), last_number(str(answer))
    same = (
        found is not None
        and wanted is not None
        and math.isclose(found, wanted, rel_tol=TOLERANCE, abs_tol=1e-12)
    )
    return float(same)


_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_NUMBER = re.compile(
    rf"""(?P<sign>(?<![\w.)}}\]])-)?\$?(?:
        \\[dt]?frac\s*{{\s*(?P<top>-?(?:{_DIGITS}))\s*}}\s*{{\s*(?P<bottom>-?(?:{_DIGITS}))\s*}}
        | (?P<number>(?:{_DIGITS})(?:[eE][+-]?\d+)?)(?:\s*/\s*(?P<over>(?:{_DIGITS})))?
    )""",
    re.VERBOSE,
)
_BOXED = re.compile(r"\\boxed\s*{((?:[^{}]|{(?:[^{}]|{[^{}]*})*})*)}")
_THIN = re.compile(r"\{,\}|\\[,!;]|(?<=\d)[\u00a0\u2009\u202f](?=\d)")


def last_number(text: str) -> float | None:
    r"""The last number in a text: in its last \boxed{...} if there is one with a number, else anywhere.

    Thousands' commas and a currency sign are read over, and so is %: "50%" is 50. "3/4" and "\frac{3}{4}" are quotients. A minus
    counts unless something stands right before it ("5-3" ends in 3). None: no finite number.
    """
    text = _THIN.sub("", text.replace("\u2212", "-").replace("\\$", "$").replace("\\%", "%"))
    for boxed in reversed(_BOXED.findall(text)):
        number = _last(boxed)
        if number is not None:
            return number
    return _last(text)


def _last(text: str) -> float | None:
    value = None
    for match in _NUMBER.finditer(text):
        top, bottom = match["top"] or match["number"], match["bottom"] or match["over"] or "1"
        numerator, denominator = (float(part.replace(",", "")) for part in (top, bottom))
        if denominator:
            value = (-1 if match["sign"] else 1) * numerator / denominator
        elif match["over"]:
            value = numerator
    return value if value is not None and math.isfinite(value) else None


class BuiltIn:
    """A quick pure function as a Reward."""

    def __init__(self, kind: str, judge: Callable[[str, Any], float]) -> None:
        self.kind, self.judge = kind, judge

    async def score(self, task: Task, response: str, messages: Messages = None) -> Score:
        reward = self.judge(response, task.answer)
        return Score(reward, {self.kind: reward})

    async def close(self) -> None:
        pass


# --- math-verify, in processes of its own -----------------------------------------------------------------------------------


class MathReward:
    """math-verify's judgement of LaTeX answers (`fsbarrier.workers.math_reward`).

    It is a matter of a symbolic algebra system, which may take for ever on a strange answer and interrupts itself by signals, which
    only works in a main thread. So it runs in processes of its own, one question at a time, and one that is late is killed.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        count = max(1, min(MATH_PROCESSES, len(os.sched_getaffinity(0))))
        self._free = asyncio.Semaphore(count)
        self._idle: list[asyncio.subprocess.Process] = []
        self._all: set[asyncio.subprocess.Process] = set()

    async def score(self, task: Task, response: str, messages: Messages = None) -> Score:
        async with self._free:
            started = time.monotonic()
            try:
                verdict = await self._ask({"answer": str(task.answer), "response": response})
            except (OSError, ValueError) as error:  # ValueError: what came back is no line of JSON
                verdict = {"error": f"math-verify: {error}"}
            seconds = time.monotonic() - started
        if "error" in verdict:
            return Score(0.0, error=str(verdict["error"]), seconds=seconds)
        reward = float(verdict["reward"])
        return Score(reward, {"math": reward}, seconds=seconds)

    async def _ask(self, question: dict[str, str]) -> dict[str, Any]:
        process = self._idle.pop() if self._idle else await self._start()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(question).encode() + b"\n")
            line = await asyncio.wait_for(process.stdout.readline(), self.timeout_s)
            answer = json.loads(line) if line else {"error": "math-verify: its process ended"}
        except TimeoutError:
            answer = {"error": f"math-verify: no verdict within {self.timeout_s:g} s (reward.timeout_s)"}
        except BaseException:
            await self._end(process)
            raise
        if "error" in answer and not answer.get("alive"):
            await self._end(process)
        else:
            self._idle.append(process)
        return dict(answer)

    async def _start(self) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "fsbarrier.workers.math_reward"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 20,
        )
        self._all.add(process)
        return process

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        self._all.discard(process)
        if process.returncode is None:
            process.kill()
        await process.wait()

    async def close(self) -> None:
        self._idle.clear()
        for process in list(self._all):
            await self._end(process)


# --- a function of one's own ------------------------------------------------------------------------------------------------


class FunctionReward:
    """`file.py:function` as a Reward."""

    def __init__(
        self, name: str, function: Callable[..., Any], timeout_s: float, judge: Judge | None = None
    ) -> None:
        self.name, self.function, self.judge = name, function, judge
        # Waiting for its turn is not the function's time: no more run at once than the judge answers.
        self.timeout_s = timeout_s + (judge.patience_s if judge else 0.0)
        self._more = {} if judge is None else {JUDGE: judge}
        self._free = asyncio.Semaphore(THREADS if judge is None else int(judge.settings["concurrency"]))

    async def score(self, task: Task, response: str, messages: Messages = None) -> Score:
        started = time.monotonic()
        try:
            value = await self._call(task, response, messages)
        except TimeoutError:
            score = Score(0.0, error=f"{self.name}: no reward within {self.timeout_s:g} s (reward.timeout_s)")
        except Exception as error:  # whatever the user's code raises
            score = Score(0.0, error=f"{self.name}: {type(error).__name__}: {error}")
        else:
            score = self._score(value)
        return Score(score.reward, score.parts, score.info, score.error, time.monotonic() - started)

    async def _call(self, task: Task, response: str, messages: Messages) -> Any:
        prompt = task.prompt if isinstance(task.prompt, str) else task.messages
        metadata = {"task_id": task.task_id, **task.metadata}
        if messages is not None:
            metadata["messages"] = [dict(message) for message in messages]
        arguments = (prompt, response, task.answer, metadata)
        call = partial(self.function, *arguments, **self._more)
        if inspect.iscoroutinefunction(self.function):
            if self.judge is None:
                return await asyncio.wait_for(call(), self.timeout_s)
            async with self._free:
                return await asyncio.wait_for(call(), self.timeout_s)
        async with self._free:
            value = await asyncio.wait_for(_in_thread(call), self.timeout_s)
        return await asyncio.wait_for(value, self.timeout_s) if inspect.isawaitable(value) else value

    def _score(self, value: Any) -> Score:
        rest: dict[str, Any] = {}
        if isinstance(value, Mapping):
            rest = {str(key): inner for key, inner in value.items() if key != "reward"}
            value = value.get("reward")
        reward = _number(value)
        if reward is None:
            return Score(
                0.0, error=f'{self.name}: gave {value!r}, not a finite number or a dict with "reward"'
            )
        numbers = {key: number for key, inner in rest.items() if (number := _number(inner)) is not None}
        info = {key: str(inner) for key, inner in rest.items() if key not in numbers}
        return Score(reward, {self.name: reward, **numbers}, info)

    async def close(self) -> None:
        if self.judge is not None:
            await self.judge.close()


def _number(value: Any) -> float | None:
    try:
        number = float(value) if not isinstance(value, str | bytes) else math.nan
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


async def _in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call it in a daemon thread: one that never returns cannot keep this program from ending, as a pool's would."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: Exception | None) -> None:
        if not future.done():
            if error is None:
                future.set_result(value)
            else:
                future.set_exception(error)

    def run() -> None:
        value: Any = None
        failure: Exception | None = None
        try:
            value = function(*arguments)
        except StopIteration as error:  # cannot be set on a future
            failure = RuntimeError(f"StopIteration: {error}")
        except Exception as error:
            failure = error
        try:
            loop.call_soon_threadsafe(settle, value, failure)
        except RuntimeError:
            pass  # the loop has ended: nobody waits any more

    threading.Thread(target=run, name="reward", daemon=True).start()
    return await future
