"""Runs a user's agent: one instance for each sample of a task, many at once, each with a client of its own (agent_client.py).

`rollout.agent` names a class as `path/file.py:Class`. Its instances are made without arguments and have

    async def run(self, task, client) -> Trajectory | None

If an agent raises or takes too long, its trajectory is invalid and the failure is counted; the others go on.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, Self, cast

from fsbarrier.data.tasks import Task
from fsbarrier.errors import UsageError
from fsbarrier.rollouts.agent_client import Client, finished
from fsbarrier.rollouts.engine_pool import Place
from fsbarrier.rollouts.episode import Episode, Trajectory
from fsbarrier.rollouts.samples import Emit, SampledGroup
from fsbarrier.settings.sections import RolloutSettings
from fsbarrier.user_code import code_file, described_failure, load_named

__all__ = ["AgentSampler", "Client", "Trajectory", "load_agent"]


# How long an episode may last where no setting says so: an agent that waits for something that never comes would hold up every node.
EPISODE_TIMEOUT_S = 3600.0


class Agent(Protocol):
    """What the user's class makes."""

    async def run(self, task: Task, client: Client) -> Trajectory | None: ...


MakeAgent = Callable[[], Agent]


def load_agent(value: str) -> MakeAgent:
    """The class that `rollout.agent` names. Raises UsageError where there is none, or it is no agent."""
    said = f"rollout.agent={value}"
    found = load_named("rollout.agent", value)
    if not inspect.isclass(found):
        what = "a function" if inspect.isfunction(found) else repr(found)
        raise UsageError(f"{said}: {value.rpartition(':')[2]} is {what}, not a class")
    run = getattr(found, "run", None)
    if not inspect.iscoroutinefunction(run):
        what = "has no method run" if run is None else "its method run is not async"
        raise UsageError(f"{said}: {what}; an agent has `async def run(self, task, client)`")
    # Call errors should show now, not in the first episode.
    for what, signature, arguments in (
        ("is made without arguments", inspect.signature(found), ()),
        ("is called as run(task, client)", inspect.signature(run), (None, None, None)),
    ):
        try:
            signature.bind(*arguments)
        except TypeError as error:
            raise UsageError(f"{said}: an agent {what}: {error}") from None
    return cast(MakeAgent, found)


class AgentSampler:
    """Makes each task's group by as many episodes, all of them at one place (engine_pool.py). Raises EngineGone as that does."""

    def __init__(self, make: MakeAgent, settings: RolloutSettings, custom: Mapping[str, Any]) -> None:
        # Not at the top: a rollout without an agent has no use for an HTTP server.
        from fsbarrier.rollouts.agent_http import Endpoint

        self.make, self.custom = make, custom
        self.file = code_file(getattr(make, "run", make))
        self.turn_timeout_s = settings.turn_timeout_s
        self.task_timeout_s = settings.task_timeout_s or EPISODE_TIMEOUT_S
        self._endpoint = Endpoint()

    async def __aenter__(self) -> Self:
        await self._endpoint.open()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._endpoint.close()

    async def sample(self, place: Place, tasks: Sequence[Task], emit: Emit) -> None:
        """Run each task's episodes, all at once; `emit` gets each group as it is finished."""
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
        client = Client(place, custom=self.custom, turn_timeout_s=self.turn_timeout_s)
        returned, error, begin = Trajectory(), None, time.monotonic()
        limit = asyncio.timeout(self.task_timeout_s)
        with self._endpoint.serving(client):
            try:
                async with limit:
                    returned = _checked(await self.make().run(task, client))
            # Whatever the user's code raises.
            except Exception as failure:
                if limit.expired():
                    error = f"not finished within {self.task_timeout_s:g} s (rollout.task_timeout_s)"
                else:
                    error = described_failure(failure, self.file)
        # A lost engine is no failure of the agent, even if the agent has caught the error and gone on.
        if client.engine_gone is not None:
            raise client.engine_gone
        return finished(client, returned, error=error, seconds=time.monotonic() - begin)


def _checked(returned: object) -> Trajectory:
    if returned is None:
        return Trajectory()
    if not isinstance(returned, Trajectory):
        raise TypeError(
            f"run gave {type(returned).__name__}, not a Trajectory (client.trajectory(...)) or None"
        )
    return returned
