"""Runs the episodes of a user's agent, many at a time, each in a process of its own with its own recorder (agent_client.py).

If an agent raises, crashes or takes too long, its trajectory is invalid and the failure is counted; the other episodes continue. Nothing
that an episode has started outlives it.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from typing import Self

from fsbarrier.data.tasks import Task
from fsbarrier.errors import ProgramFailed
from fsbarrier.processes.fork_server import ForkServer, Job
from fsbarrier.processes.limits import processes_left
from fsbarrier.processes.supervisor import own_program, with_this_package
from fsbarrier.protocol.facts import JsonObject
from fsbarrier.rollouts.agent_client import Recorder, finished
from fsbarrier.rollouts.engine_pool import Reservation
from fsbarrier.rollouts.environment import Environment, Session
from fsbarrier.rollouts.episode import Episode, Trajectory, TurnFailed
from fsbarrier.rollouts.samples import Emit, EngineGone, Refusal, SampledGroup
from fsbarrier.settings.sections import Settings
from fsbarrier.specs import EngineAddress
from fsbarrier.user_code import log_once

# Default timeout of an episode: an agent that hangs would otherwise block all nodes.
EPISODE_TIMEOUT_S = 3600.0
# Extra time for a process to end by itself; it may have to release its resources in an environment.
GRACE_S = 2.0
# How long the agent's `close` may take.
CLOSE_S = 10.0
# The end of an environment's server is noticed within this time.
NOTICE_S = 0.5
# Maximum number of attempts of an episode whose environment fails.
TRIES = 3


#: Each episode needs two processes: the agent and its guard. Some processes are reserved for the rest of the node.
PROCESSES_PER_EPISODE, OTHER_PROCESSES = 2, 128


def within_limits(concurrency: int, episodes: int) -> int:
    """The number of groups in flight that the process limit of this container or job allows. `episodes`: concurrent episodes per group."""
    left, source = processes_left()
    fits = (
        concurrency
        if left is None
        else max(1, (left - OTHER_PROCESSES) // (PROCESSES_PER_EPISODE * episodes))
    )
    if fits < concurrency:
        print(
            f"rollout.concurrency: {fits} instead of {concurrency}, because {source} leaves {left} processes",
            flush=True,
        )
    return min(fits, concurrency)


class AgentSampler:
    """Runs a group of episodes per task, all on one engine (engine_pool.py). Raises EngineGone."""

    def __init__(
        self,
        agent: str,
        settings: Settings,
        engines: Mapping[str, EngineAddress],
        environments: Mapping[str, Environment],
    ) -> None:
        # Imported late: only rollouts with an agent need an HTTP server.
        from fsbarrier.rollouts.agent_http import Endpoint

        self.agent, self.custom, self.engines = agent, settings.custom, engines
        self.environments = environments
        # A task selects an environment only if environments have names.
        self.choose = bool(settings.environments)
        self.task_timeout_s = settings.rollout.task_timeout_s or EPISODE_TIMEOUT_S
        self._endpoint = Endpoint()
        argv = own_program("fsbarrier.workers.episodes", agent)
        self._processes = ForkServer(argv, with_this_package(os.environ))
        self._stack = AsyncExitStack()
        self._opened: object = None

    async def __aenter__(self) -> Self:
        """Start what the episodes need. Raises UsageError if the agent cannot be used, ProgramFailed."""
        try:
            await self._endpoint.open()
            self._stack.push_async_callback(self._endpoint.close)
            for environment in self.environments.values():
                await self._stack.enter_async_context(environment)
            await self._stack.enter_async_context(self._processes)
            self._opened = await self._stack.enter_async_context(self._open())
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    def expect(self, tasks: Sequence[Task], samples: int) -> None:
        """Announce the tasks that will be sampled."""
        for task in tasks:
            if (environment := self._environment_of(task)) is not None:
                environment.episodes += samples

    async def sample(self, reservation: Reservation, tasks: Sequence[Task], emit: Emit) -> None:
        """Run all episodes concurrently; `emit` receives each finished group."""
        async with asyncio.TaskGroup() as running:
            for task in tasks:
                running.create_task(self._group(reservation, task, emit))

    async def _group(self, reservation: Reservation, task: Task, emit: Emit) -> None:
        async with asyncio.TaskGroup() as running:
            episodes = [
                running.create_task(self._episode(reservation, task))
                for _ in range(reservation.sampling.samples)
            ]
        emit(SampledGroup(task, [], tuple(episode.result() for episode in episodes)))

    async def _episode(self, reservation: Reservation, task: Task) -> Episode:
        environment = self._environment_of(task)
        for _ in range(TRIES):
            episode = await self._attempt(reservation, task, environment)
            if not episode.lost:
                break
        if environment is not None:
            environment.episodes -= 1
        return episode

    def _environment_of(self, task: Task) -> Environment | None:
        named = task.metadata.get("environment") if self.choose else ""
        return self.environments.get(str(named or ""))

    async def _attempt(
        self, reservation: Reservation, task: Task, environment: Environment | None
    ) -> Episode:
        recorder = Recorder(reservation, task.chat_template_kwargs)
        async with environment.session() if environment is not None else nullcontext() as session:
            begin = time.monotonic()
            with self._endpoint.serving(recorder):
                outcome = await self._conversation(recorder, task, session)
                if session is not None and "error" in outcome:
                    # The agent may have noticed first that the environment is gone.
                    await asyncio.sleep(NOTICE_S)
        if session is not None and session.lost:
            outcome = {"error": session.lost, "lost": True}
        # A lost engine is not a failure of the agent, even if the agent caught the error and continued.
        if recorder.engine_gone is not None:
            raise recorder.engine_gone
        if "trace" in outcome:
            log_once(outcome["place"], outcome["trace"])
        return finished(
            recorder,
            Trajectory(**outcome.get("returned", {})),
            error=outcome.get("error"),
            lost=outcome.get("lost", False),
            seconds=time.monotonic() - begin,
        )

    async def _conversation(self, recorder: Recorder, task: Task, session: Session | None) -> JsonObject:
        """Run an episode in its process, but sample its turns here. Returns the process's last message."""
        turns: set[asyncio.Task[None]] = set()
        too_late = f"not finished within {self.task_timeout_s:g} s (rollout.task_timeout_s)"
        async with self._processes.job() as job:
            if session is not None:
                session.job = job
            try:
                async with asyncio.timeout(self.task_timeout_s + GRACE_S):
                    await job.send(
                        {
                            "task": task,
                            "limit_s": self.task_timeout_s,
                            "base_url": recorder.base_url,
                            "api_key": recorder.api_key,
                            "model": recorder.model,
                            "custom": self.custom,
                            "engines": self.engines,
                            "opened": self._opened,
                            "environment_url": None if session is None else session.url,
                        }
                    )
                    while isinstance(message := await job.receive(), list):
                        turns.add(asyncio.create_task(_turn(recorder, job, *message)))
                    how = await job.how_it_ended(GRACE_S)
            except TimeoutError:
                return {"error": f"{too_late}; its process did not answer any more and was killed"}
            finally:
                for turn in turns:
                    turn.cancel()
                await asyncio.gather(*turns, return_exceptions=True)
        if message is None and (session is None or not session.lost):
            print(f"task {task.task_id}: the agent's process {how}", file=sys.stderr)
        message = message or {"error": f"the agent's process {how}"}
        return {"error": too_late} if message.get("late") else message

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[object]:
        """Context manager that calls the class's `open` and `close` in another process; yields the return value of `open`."""
        async with self._processes.job() as job:
            await job.send({"custom": self.custom, "limit_s": None})
            message = await job.receive()
            if message is None or "error" in message:
                why = message["error"] if message else f"its process {await job.how_it_ended(GRACE_S)}"
                raise ProgramFailed(f"rollout.agent={self.agent}: open: {why}")
            yield message["opened"]
            await job.send({})
            await job.how_it_ended(CLOSE_S)


async def _turn(recorder: Recorder, job: Job, number: int, what: str, arguments: JsonObject) -> None:
    """Sample one turn that an episode has requested."""
    try:
        reply = await (recorder.chat if what == "chat" else recorder.complete)(**arguments)
        answer: object = reply
    # The arguments come from the user's code and may be invalid.
    except Exception as error:
        answer = {
            "failed": str(error) if isinstance(error, TurnFailed | Refusal | EngineGone) else repr(error)
        }
    try:
        await job.send([number, answer])
    except (ValueError, RecursionError) as error:
        # Always answer, or the agent waits until its timeout.
        await job.send([number, {"failed": f"the answer cannot be sent: {type(error).__name__}"}])
