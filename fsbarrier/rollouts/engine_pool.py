"""All engines of a node as one: each piece of work goes to the least loaded, and to another when its own is gone.

    async with EnginePool(servers, ...) as pool:
        await pool.look()
        await Place(pool, 128, sampling).sample(tasks, emit)

A group stays with the engine that began it, which keeps its prompt in the cache for all its samples and all turns of its episodes. An
engine that does not answer gets no work until it does again: the daemon starts it again at the same address.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Self, TypeVar

from fsbarrier.data.tasks import Task
from fsbarrier.openai_http import asked_again
from fsbarrier.rollouts.engine_queue import EngineMetrics
from fsbarrier.rollouts.samples import Emit, EngineDown, Sample, SampledGroup, Sampling
from fsbarrier.rollouts.sampling import Sampler, SamplingServer

# Before the first look at an engine that does not answer.
FIRST_PAUSE_S = 0.5

T = TypeVar("T")


class PooledEngine:
    """One engine, the node's replica `number`, and what it has to do. `up`: set while it answers; `sequences`: in flight there."""

    def __init__(
        self, number: int, server: SamplingServer, *, connections: int, on_tokens: Callable[[int], None]
    ) -> None:
        self.number = number
        self.up = asyncio.Event()
        self.up.set()
        self.sequences = self.tokens = 0
        self._on_tokens = on_tokens
        self.sampler = Sampler(server, connections=connections, on_tokens=self._count_tokens)
        self.metrics = EngineMetrics(server.url, server.api_key)

    def _count_tokens(self, count: int) -> None:
        self.tokens += count
        self._on_tokens(count)


class EnginePool:
    """`patience_s`: how long to wait where no engine answers. `on_tokens` hears how many tokens have come."""

    def __init__(
        self,
        servers: Sequence[SamplingServer],
        *,
        connections: int,
        on_tokens: Callable[[int], None],
        patience_s: float,
    ) -> None:
        self.engines = [
            PooledEngine(number, server, connections=connections, on_tokens=on_tokens)
            for number, server in enumerate(servers)
        ]
        self._on_tokens, self._patience_s = on_tokens, patience_s
        self._watching: dict[PooledEngine, asyncio.Task[None]] = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        for engine in self.engines:
            await self._stack.enter_async_context(engine.sampler)
            await self._stack.enter_async_context(engine.metrics)
        return self

    async def __aexit__(self, *_: object) -> None:
        for watch in self._watching.values():
            watch.cancel()
        await asyncio.gather(*self._watching.values(), return_exceptions=True)
        await self._stack.aclose()

    @property
    def next(self) -> PooledEngine:
        """Where the next piece of work goes: to the engine that has least in flight, one that answers if any does."""
        return min(self.engines, key=lambda engine: (not engine.up.is_set(), engine.sequences))

    @property
    def longest(self) -> int | None:
        """The most tokens of prompt and answer together."""
        return next((e.sampler.longest for e in self.engines if e.sampler.longest is not None), None)

    async def look(self) -> None:
        """See that some engine answers, and what it serves. Raises EngineGone where none does, or one is no vLLM server."""
        found = await asyncio.gather(
            *(engine.sampler.look() for engine in self.engines), return_exceptions=True
        )
        for engine, error in zip(self.engines, found, strict=True):
            if isinstance(error, EngineDown):
                self._set_down(engine)
            elif isinstance(error, BaseException):
                raise error
        for error in found:
            if isinstance(error, EngineDown):
                await self._until_some_is_up(error)

    async def count_waiting(self) -> int | None:
        """How many sequences wait in the engine that gets the next piece of work (see engine_queue.py)."""
        return await self.next.metrics.count_waiting()

    def progress(self) -> list[dict[str, object]]:
        """What each engine does, for people; [] where there is only one."""
        engines = self.engines if len(self.engines) > 1 else []
        return [
            {"replica": number, "up": e.up.is_set(), "sequences": e.sequences, "tokens": e.tokens}
            for number, e in enumerate(engines)
        ]

    async def leave(self, engine: PooledEngine, error: EngineDown) -> None:
        """`engine` does not answer; returns when some engine does. Raises EngineDown where none does for long."""
        self._set_down(engine)
        await self._until_some_is_up(error)

    def _set_down(self, engine: PooledEngine) -> None:
        if engine.up.is_set():
            engine.up.clear()
            self._watching[engine] = asyncio.create_task(self._watch(engine))

    async def _watch(self, engine: PooledEngine) -> None:
        """Until it answers again."""

        async def look() -> None:
            # Waiting for it is a sign of life, too.
            self._on_tokens(0)
            await engine.sampler.look()

        await asked_again(look, after=EngineDown, within_s=self._patience_s, first_pause_s=FIRST_PAUSE_S)
        engine.up.set()

    async def _until_some_is_up(self, error: EngineDown) -> None:
        if any(engine.up.is_set() for engine in self.engines):
            return
        waiting = {asyncio.create_task(engine.up.wait()) for engine in self.engines}
        done, _ = await asyncio.wait(waiting, timeout=self._patience_s, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
        if not done:
            raise error


class Place:
    """For some sequences at one engine, all sampled in one way; at another one once that is gone.

    `replica`: which engine that is; None once there was another.
    """

    def __init__(self, pool: EnginePool, sequences: int, sampling: Sampling) -> None:
        self.sequences, self.sampling = sequences, sampling
        self._pool = pool
        self._engine = pool.next
        self._engine.sequences += sequences
        self.replica: int | None = self._engine.number

    @property
    def longest(self) -> int | None:
        return self._pool.longest

    def finished(self, sequences: int) -> None:
        """So many of them are no longer in flight."""
        self.sequences -= sequences
        self._engine.sequences -= sequences

    async def sample(self, tasks: Sequence[Task], emit: Emit) -> None:
        """As Sampler.sample. What was handed out before an engine went is not asked for again."""
        left = {task.index: task for task in tasks}

        def done(group: SampledGroup) -> None:
            del left[group.task.index]
            emit(group)

        await self._somewhere(lambda sampler: sampler.sample(list(left.values()), done, self.sampling))

    async def turn(self, prompt_ids: Sequence[int], *, max_tokens: int, stop: Sequence[str] = ()) -> Sample:
        """As Sampler.turn."""
        return await self._somewhere(
            lambda sampler: sampler.turn(prompt_ids, self.sampling, max_tokens=max_tokens, stop=stop)
        )

    async def tokens(self, **body: object) -> list[int]:
        """As Sampler.tokens."""
        return await self._somewhere(lambda sampler: sampler.tokens(**body))

    async def text_of(self, token_ids: Sequence[int]) -> str:
        """As Sampler.text_of."""
        return await self._somewhere(lambda sampler: sampler.text_of(token_ids))

    async def _somewhere(self, ask: Callable[[Sampler], Awaitable[T]]) -> T:
        """What `ask` gives, of this place's engine or of another. Raises EngineGone where none is left."""
        while True:
            engine = self._engine
            try:
                return await ask(engine.sampler)
            except EngineDown as error:
                await self._pool.leave(engine, error)
                # Several requests of one place may fail at once; the first of them moves it.
                if self._engine is engine:
                    self._move()

    def _move(self) -> None:
        sequences = self.sequences
        self._engine.sequences -= sequences
        self._engine = self._pool.next
        self._engine.sequences += sequences
        self.replica = None
