"""A user's agent and its episode: what runs in the episode's own process (agent_sampler.py starts it).

`rollout.agent` is a class given as `path/file.py:Class`. Its instances, one per episode, are created without arguments and have

    async def run(self, task, client) -> Trajectory | None

The class may also have `async def open(cls, custom)` and `async def close(cls)`, class methods that one more process calls at the begin and
the end of each rollout; all episodes get what `open` returns as `client.opened`.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

import msgspec

from fsbarrier.data.tasks import Task, plain
from fsbarrier.errors import UsageError
from fsbarrier.loader import failure
from fsbarrier.processes.fork_server import Messages
from fsbarrier.protocol.facts import JsonObject
from fsbarrier.rewards.score import finite
from fsbarrier.rollouts.episode import Reply, Trajectory, TurnFailed
from fsbarrier.specs import EngineAddress
from fsbarrier.user_code import code_file, load_named

__all__ = ["Client", "EnvironmentLost", "Reply", "Trajectory", "TurnFailed", "load_agent"]


class EnvironmentLost(Exception):
    """Raised by an agent when its environment failed rather than the agent itself; the episode is then retried a few times."""


class Agent(Protocol):
    """The interface of a user's agent."""

    async def run(self, task: Task, client: Client) -> Trajectory | None: ...


MakeAgent = Callable[[], Agent]


class Client:
    """The policy, for one episode.

    Use `chat` and `complete` directly, or any OpenAI-compatible client with `base_url`, `api_key` and `model`, whose requests are recorded
    in the same way. `custom`: the run's settings `custom.*`; `engines`: the models beside the policy, by name.
    """

    def __init__(self, messages: Messages, job: Mapping[str, Any]) -> None:
        self.base_url: str = job["base_url"]
        self.api_key: str = job["api_key"]
        self.model: str = job["model"]
        self.custom: Mapping[str, Any] = job["custom"]
        self.engines: Mapping[str, EngineAddress] = msgspec.convert(job["engines"], dict[str, EngineAddress])
        self.opened: Any = job["opened"]
        self._environment_url: str | None = job["environment_url"]
        self._messages, self._numbers = messages, itertools.count()
        self._asked: dict[int, asyncio.Future[JsonObject]] = {}

    @property
    def environment_url(self) -> str:
        """The address of the episode's environment. Raises ValueError if it has none."""
        if self._environment_url is None:
            raise ValueError(
                "the episode has no environment: give environment.command, or a field environment to its task"
            )
        return self._environment_url

    async def chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Reply:
        """Sample the policy's answer to a conversation, including its calls of `tools`.

        Sampling parameters are the run's, so that training matches the recorded distribution. Raises TurnFailed.
        """
        conversation = [dict(message) for message in messages]
        return await self._ask("chat", messages=conversation, tools=tools, max_tokens=max_tokens, stop=stop)

    async def complete(
        self, prompt: str, *, max_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Reply:
        """Sample the policy's continuation of a text, without a chat template. A prompt that starts with an earlier prompt and its answer
        continues from their tokens. If that answer ended at a stop string, which is not part of its text, the prompt must contain the stop
        string. Raises TurnFailed."""
        return await self._ask("complete", prompt=prompt, max_tokens=max_tokens, stop=stop)

    def trajectory(
        self, *, reward: float | None = None, text: str | None = None, **metadata: object
    ) -> Trajectory:
        """The return value for an agent's `run`."""
        return Trajectory(reward, text, metadata)

    async def _ask(self, what: str, **arguments: object) -> Reply:
        number = next(self._numbers)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        await self._messages.send([number, what, plain(arguments)])
        answer_fields = await answer
        if "failed" in answer_fields:
            raise TurnFailed(answer_fields["failed"])
        return Reply(**answer_fields)

    async def receive_answers(self) -> None:
        """Receive the answers to `_ask` until the episode ends."""
        while (answer := await self._messages.receive()) is not None:
            number, answer_fields = answer
            self._asked.pop(number).set_result(answer_fields)


def load_agent(value: str) -> MakeAgent:
    """Load the class in `rollout.agent`. Raises UsageError if it is missing or not an agent."""
    setting = f"rollout.agent={value}"
    agent_class = load_named("rollout.agent", value)
    if not inspect.isclass(agent_class):
        what = "a function" if inspect.isfunction(agent_class) else repr(agent_class)
        raise UsageError(f"{setting}: {value.rpartition(':')[2]} is {what}, not a class")
    run = getattr(agent_class, "run", None)
    if not inspect.iscoroutinefunction(run):
        what = "has no method run" if run is None else "its method run is not async"
        raise UsageError(f"{setting}: {what}; an agent has `async def run(self, task, client)`")
    # Check the signatures now instead of failing in the first episode.
    for what, signature, arguments in (
        ("must be constructible without arguments", inspect.signature(agent_class), ()),
        ("must accept a call run(task, client)", inspect.signature(run), (None, None, None)),
    ):
        try:
            signature.bind(*arguments)
        except TypeError as error:
            raise UsageError(f"{setting}: an agent {what}: {error}") from None
    for name in ("open", "close"):
        method = getattr(agent_class, name, None)
        if method and not (inspect.ismethod(method) and inspect.iscoroutinefunction(method)):
            raise UsageError(f"{setting}: its method {name} must be an async class method")
    return cast(MakeAgent, agent_class)


# --- in the process of an episode -------------------------------------------------------------------------------------------


def run_job(make: MakeAgent, connection: socket.socket) -> None:
    """Run one job of this process: an episode, or the `open` and `close` of the agent's class.

    Anything that the agent has not awaited, such as a thread, ends with this process.
    """
    asyncio.new_event_loop().run_until_complete(_job(make, connection))


async def _job(make: MakeAgent, connection: socket.socket) -> None:
    messages = await Messages.over(connection)
    job: JsonObject | None = await messages.receive()
    if job is None:
        return
    limit = asyncio.timeout(job["limit_s"])
    try:
        async with limit:
            answer = await (_run(make, messages, job) if "task" in job else _keep_open(make, messages, job))
    # The user's code may raise any exception.
    except BaseException as error:
        file = code_file(getattr(make, "run", make))
        text, place, trace = failure(error, file)
        lost = isinstance(error, EnvironmentLost)
        answer = (
            {"late": True}
            if limit.expired()
            else {"error": text, "place": place, "trace": trace, "lost": lost}
        )
    await messages.send(answer)


async def _run(make: MakeAgent, messages: Messages, job: JsonObject) -> JsonObject:
    client = Client(messages, job)
    receiving = asyncio.create_task(client.receive_answers())
    returned = checked(await make().run(msgspec.convert(job["task"], Task), client))
    receiving.cancel()
    return {
        "returned": {"reward": returned.reward, "text": returned.text, "metadata": plain(returned.metadata)}
    }


async def _keep_open(make: MakeAgent, messages: Messages, job: JsonObject) -> JsonObject:
    """Call the class's `open`, and its `close` when the rollout ends."""
    agent: Any = make
    await messages.send(
        {"opened": plain(await agent.open(job["custom"])) if hasattr(agent, "open") else None}
    )
    await messages.receive()
    if hasattr(agent, "close"):
        await agent.close()
    return {}


def checked(returned: object) -> Trajectory:
    """Check the return value of `run`. Raises TypeError, ValueError."""
    if returned is None:
        return Trajectory()
    if not isinstance(returned, Trajectory):
        raise TypeError(
            f"run returned {type(returned).__name__}, expected a Trajectory (client.trajectory(...)) or None"
        )
    if returned.text is not None and not isinstance(returned.text, str):
        raise TypeError(f"run gave the text {returned.text!r}, not a string")
    reward = None if returned.reward is None else finite(returned.reward)
    if reward is None and returned.reward is not None:
        raise ValueError(f"run gave the reward {returned.reward!r}, not a finite number")
    return Trajectory(reward, returned.text, returned.metadata)
