"""Runs a user's agent: one instance per sample, many concurrently, each with its own client (agent_client.py).

`rollout.agent` is a class given as `path/file.py:Class`. Its instances are created without arguments and have

    async def run(self, task, client) -> Trajectory | None

If an agent raises or times out, its trajectory is invalid and the failure is counted; the other agents continue.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, Self, cast

from fsbarrier.data.tasks import Task
from fsbarrier.engine.openai_http import EngineAddress
from fsbarrier.errors import UsageError
from fsbarrier.rewards.score import finite
from fsbarrier.rollouts.agent_client import Client, finished
from fsbarrier.rollouts.engine_pool import Place
from fsbarrier.rollouts.episode import Episode, Trajectory
from fsbarrier.rollouts.samples import Emit, SampledGroup
from fsbarrier.settings.sections import RolloutSettings
from fsbarrier.user_code import code_file, described_failure, load_named

__all__ = ["AgentSampler", "Client", "Trajectory", "load_agent"]


# Default timeout of an episode: an agent that hangs would otherwise block all nodes.
EPISODE_TIMEOUT_S = 3600.0


class Agent(Protocol):
    """The interface of a user's agent."""

    async def run(self, task: Task, client: Client) -> Trajectory | None: ...


MakeAgent = Callable[[], Agent]


def load_agent(value: str) -> MakeAgent:
    """Load the class in `rollout.agent`. Raises UsageError if it is missing or not an agent."""
    said = f"rollout.agent={value}"
    found = load_named("rollout.agent", value)
    if not inspect.isclass(found):
        what = "a function" if inspect.isfunction(found) else repr(found)
        raise UsageError(f"{said}: {value.rpartition(':')[2]} is {what}, not a class")
    run = getattr(found, "run", None)
    if not inspect.iscoroutinefunction(run):
        what = "has no method run" if run is None else "its method run is not async"
        raise UsageError(f"{said}: {what}; an agent has `async def run(self, task, client)`")
    # Check the signatures now instead of failing in the first episode.
    for what, signature, arguments in (
        ("must be constructible without arguments", inspect.signature(found), ()),
        ("must accept a call run(task, client)", inspect.signature(run), (None, None, None)),
    ):
        try:
            signature.bind(*arguments)
        except TypeError as error:
            raise UsageError(f"{said}: an agent {what}: {error}") from None
    return cast(MakeAgent, found)


class AgentSampler:
    """Runs a group of episodes per task, all on one engine (engine_pool.py). Raises EngineGone."""

    def __init__(
        self,
        make: MakeAgent,
        settings: RolloutSettings,
        custom: Mapping[str, Any],
        engines: Mapping[str, EngineAddress],
    ) -> None:
        # Imported late: only rollouts with an agent need an HTTP server.
        from fsbarrier.rollouts.agent_http import Endpoint

        self.make, self.custom, self.engines = make, custom, engines
        self.file = code_file(getattr(make, "run", make))
        self.task_timeout_s = settings.task_timeout_s or EPISODE_TIMEOUT_S
        self._endpoint = Endpoint()

    async def __aenter__(self) -> Self:
        await self._endpoint.open()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._endpoint.close()

    async def sample(self, place: Place, tasks: Sequence[Task], emit: Emit) -> None:
        """Run all episodes concurrently; `emit` receives each finished group."""
        async with asyncio.TaskGroup() as running:
            for task in tasks:
                running.create_task(self._group(place, task, emit))

    async def _group(self, place: Place, task: Task, emit: Emit) -> None:
        async with asyncio.TaskGroup() as running:
            episodes = [
                running.create_task(self._episode(place, task)) for _ in range(place.sampling.samples)
            ]
        emit(SampledGroup(task, [], tuple(episode.result() for episode in episodes)))

    async def _episode(self, place: Place, task: Task) -> Episode:
        client = Client(place, custom=self.custom, engines=self.engines)
        returned, error, begin = Trajectory(), None, time.monotonic()
        limit = asyncio.timeout(self.task_timeout_s)
        with self._endpoint.serving(client):
            try:
                async with limit:
                    returned = _checked(await self.make().run(task, client))
            # The user's code may raise anything. SystemExit would end the event loop, and this program without a result.
            except (Exception, SystemExit) as failure:
                if limit.expired():
                    error = f"not finished within {self.task_timeout_s:g} s (rollout.task_timeout_s)"
                else:
                    error = described_failure(failure, self.file)
        # A lost engine is not a failure of the agent, even if the agent caught the error and continued.
        if client.engine_gone is not None:
            raise client.engine_gone
        return finished(client, returned, error=error, seconds=time.monotonic() - begin)


def _checked(returned: object) -> Trajectory:
    if returned is None:
        return Trajectory()
    if not isinstance(returned, Trajectory):
        raise TypeError(
            f"run returned {type(returned).__name__}, expected a Trajectory (client.trajectory(...)) or None"
        )
    if returned.reward is None:
        return returned
    reward = finite(returned.reward)
    if reward is None:
        raise ValueError(f"run gave the reward {returned.reward!r}, not a finite number")
    return replace(returned, reward=reward)
