"""Load balancing over a node's engines: each piece of work goes to the least loaded engine, and moves to another if that one dies.

    async with EnginePool(servers, ...) as pool:
        await pool.query_models()
        await Reservation(pool, 128, sampling).sample(tasks, emit)

A group stays on the engine that began it, whose prefix cache then serves all its samples and turns. An engine that does not answer gets no
work until it answers again; the daemon restarts it at the same address.

Requests are held back until the engine has capacity: one in its queue would only wait, while another node without tasks could take it over.
vLLM reports the number of waiting sequences at /metrics, updated after each step, so it does not include very recent requests. If the
server does not report it, the only limit is `rollout.concurrency`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any, Self, TypeVar

from fsbarrier.data.tasks import Task
from fsbarrier.engine.openai_http import asked_again
from fsbarrier.rollouts.answers import Thoughts
from fsbarrier.rollouts.pictures import Pictures
from fsbarrier.rollouts.renderer import Renderer
from fsbarrier.rollouts.samples import (
    Emit,
    EngineDown,
    EngineGone,
    Refusal,
    Sample,
    SampledGroup,
    Sampling,
    SamplingServer,
)
from fsbarrier.rollouts.sampling import Sampler
from fsbarrier.rollouts.thinking import Thinking, asked_for, has_opened, may_think
from fsbarrier.store.retry import Backoff
from fsbarrier.user_code import log_once

# Pauses between two checks of an engine that does not answer: the first, and the longest. So work goes on soon after it is back.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 2.0
#: delay after a request before the engine's count of waiting sequences is trusted
SETTLE_S = 0.2
#: the route to vLLM's own parsers of tool calls, and the timeout of one request to it
DERENDER, READ_S = "/v1/chat/completions/derender", 20.0
#: the flags that a user's own server needs for that route
NEEDS = (
    "a server of your own needs --enable-scale-out --enable-auto-tool-choice --tool-call-parser NAME (and --reasoning-parser NAME for "
    "rollout.reasoning_parser)"
)
#: polling interval of that count
PAUSES = Backoff(0.1, 0.5, factor=2.0)

T = TypeVar("T")


class EnginePool:
    """`patience_s`: how long to wait if no engine answers. `on_tokens` receives the number of new tokens.

    Up to 2 * `step` sequences are sent to an engine without a check, and `step` more whenever hardly any are waiting in it.
    """

    def __init__(
        self,
        servers: Sequence[SamplingServer],
        *,
        connections: int,
        on_tokens: Callable[[int], None],
        patience_s: float,
        step: int = 128,
        pictures: Pictures | None = None,
        renderer: Renderer | None = None,
    ) -> None:
        self.pictures = pictures or Pictures(None, None)
        # Reads answers and appends turns instead of the servers, if the user wants that.
        self.renderer = renderer
        # None until they are needed.
        self.thoughts: asyncio.Task[Thinking] | None = None
        # kind of message -> whether the chat template shows its content (template_turns.py)
        self.shown: dict[str, bool] = {}
        self.engines = [
            Sampler(server, number, connections=connections, on_tokens=on_tokens, pictures=self.pictures)
            for number, server in enumerate(servers)
        ]
        self._on_tokens, self._patience_s = on_tokens, patience_s
        #: what is waited for, for people; "" while some engine answers
        self.awaits = ""
        self._watching: dict[Sampler, asyncio.Task[None]] = {}
        self._step, self._granted, self._sent_at = step, 0, 0.0
        self._waiting_is_known = True
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        for engine in self.engines:
            await self._stack.enter_async_context(engine)
        return self

    async def __aexit__(self, *_: object) -> None:
        for watch in self._watching.values():
            watch.cancel()
        await asyncio.gather(*self._watching.values(), return_exceptions=True)
        await self._stack.aclose()

    @property
    def next(self) -> Sampler:
        """The engine for the next piece of work: the least loaded one, preferring engines that answer."""
        return min(self.engines, key=lambda engine: (not engine.up.is_set(), engine.sequences))

    @property
    def longest(self) -> int | None:
        """The maximum number of tokens in prompt plus answer."""
        return next((e.longest for e in self.engines if e.longest is not None), None)

    async def query_models(self) -> None:
        """Check that some engine answers, and query its model. Raises EngineGone if none answers or one is not a vLLM server."""
        results = await asyncio.gather(
            *(engine.query_model() for engine in self.engines), return_exceptions=True
        )
        for engine, error in zip(self.engines, results, strict=True):
            if isinstance(error, EngineDown):
                self._set_down(engine, error)
            elif isinstance(error, BaseException):
                raise error
        for error in results:
            if isinstance(error, EngineDown):
                await self._until_some_is_up(error)

    async def wait_for_capacity(self) -> None:
        """Wait until the next piece of work may be sent."""
        pauses = iter(PAUSES)
        while self._waiting_is_known and self.next.sequences >= 2 * self._step and self._granted <= 0:
            if time.monotonic() - self._sent_at >= SETTLE_S:
                waiting = await self.next.count_waiting()
                self._waiting_is_known = waiting is not None
                if waiting is None or waiting <= self._step // 2:
                    self._granted = self._step
                    return
            await asyncio.sleep(next(pauses))

    def reserve(self, sequences: int) -> Sampler:
        """Choose the engine for this many sequences and count them as its load; sends nothing."""
        self._granted -= sequences
        self._sent_at = time.monotonic()
        engine = self.next
        engine.sequences += sequences
        return engine

    def progress(self) -> list[dict[str, object]]:
        """The activity of each engine, for display; [] for a single engine."""
        engines = self.engines if len(self.engines) > 1 else []
        return [
            {"replica": number, "up": e.up.is_set(), "sequences": e.sequences, "tokens": e.sampled_tokens}
            for number, e in enumerate(engines)
        ]

    async def leave(self, engine: Sampler, error: EngineDown) -> None:
        """Mark `engine` as down and wait until some engine answers. Raises EngineDown if none does in time."""
        self._set_down(engine, error)
        await self._until_some_is_up(error)

    def _set_down(self, engine: Sampler, error: EngineDown) -> None:
        if not engine.up.is_set():
            return
        engine.up.clear()
        self._watching[engine] = asyncio.create_task(self._watch(engine))
        if not any(other.up.is_set() for other in self.engines):
            limit = f"up to {self._patience_s:g} s (engine.start_timeout_s)"
            self.awaits = f"{error}; waiting {limit} until it answers"
            # The progress, which shows what is waited for, has changed.
            self._on_tokens(0)

    async def _watch(self, engine: Sampler) -> None:
        """Wait until this engine answers again."""

        async def query() -> None:
            # Waiting for the engine counts as progress.
            self._on_tokens(0)
            await engine.query_model()

        await asked_again(
            query,
            after=EngineDown,
            within_s=self._patience_s,
            first_pause_s=FIRST_PAUSE_S,
            longest_pause_s=LONGEST_PAUSE_S,
        )
        engine.up.set()
        self.awaits = ""
        self._on_tokens(0)

    async def _until_some_is_up(self, error: EngineDown) -> None:
        if any(engine.up.is_set() for engine in self.engines):
            return
        waiting = {asyncio.create_task(engine.up.wait()) for engine in self.engines}
        done, _ = await asyncio.wait(waiting, timeout=self._patience_s, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
        if not done:
            raise error


class Reservation:
    """Capacity for some sequences on one engine, with common sampling parameters; moves to another engine if that one dies.

    `replica`: the engine's number; None after a move.
    """

    def __init__(self, pool: EnginePool, sequences: int, sampling: Sampling) -> None:
        self.sequences, self.sampling = sequences, sampling
        self._pool = pool
        self._engine = pool.reserve(sequences)
        self.replica: int | None = self._engine.number

    @property
    def longest(self) -> int | None:
        return self._pool.longest

    def finished(self, sequences: int) -> None:
        """Release capacity of this many finished sequences."""
        self.sequences -= sequences
        self._engine.sequences -= sequences

    async def sample(self, tasks: Sequence[Task], emit: Emit) -> None:
        """Like Sampler.sample. Does not repeat samples that were already emitted before an engine died."""
        left = {task.index: task for task in tasks}
        most, limit = self.sampling.max_tokens, self._engine.server.max_thinking_tokens
        begun = replace(self.sampling, max_tokens=min(most, limit or most))
        going_on: list[asyncio.Task[None]] = []

        def sampled(group: SampledGroup) -> None:
            if may_think(group, self._engine.server):
                going_on.append(asyncio.create_task(self._finish(group, emit)))
            else:
                emit(group)

        try:
            await self._on_live_engine(lambda sampler: sampler.sample(left, sampled, begun))
            await asyncio.gather(*going_on)
        finally:
            for unfinished in going_on:
                unfinished.cancel()

    async def _finish(self, group: SampledGroup, emit: Emit) -> None:
        """Continue those answers of a group whose thoughts have reached their limit, split thoughts from text, and emit the group."""
        thinking, server = await self.thinking(), self._engine.server
        opened = has_opened(group.task.prompt, group.prompt_ids, thinking)

        async def whole(number: int, sample: Sample) -> Sample:
            async def go_on(begun: Sequence[int], room: int) -> Sample:
                prompt, seed = [*group.prompt_ids, *begun], server.seed_of(group.task, f":{number}")
                _, rest = await self._turn(prompt, group.images, max_tokens=room, stop=server.stop, seed=seed)
                return rest

            if thinking.served:
                return await self._read_by_server(sample, group.prompt_ids)
            room = self._room(len(group.prompt_ids), self.sampling.max_tokens)
            return await thinking.finished(sample, opened=opened, room=room, go_on=go_on)

        samples = await asyncio.gather(
            *(whole(number, sample) for number, sample in enumerate(group.samples))
        )
        emit(replace(group, samples=tuple(samples)))

    async def turn(
        self,
        prompt_ids: Sequence[int],
        images: Sequence[str] = (),
        *,
        max_tokens: int,
        stop: Sequence[str] = (),
    ) -> tuple[list[int], Sample]:
        """Like Sampler.turn; the sample has its thoughts."""
        thinking = await self.thinking()
        first = thinking.first_part(max_tokens)
        shown, sample = await self._turn(prompt_ids, images, max_tokens=first, stop=stop)

        async def go_on(begun: Sequence[int], room: int) -> Sample:
            _, rest = await self._turn([*shown, *begun], images, max_tokens=room, stop=stop)
            return rest

        if thinking.served:
            return shown, await self._read_by_server(sample, shown)
        opened = thinking.marks.opened_by(prompt_ids)
        room = self._room(len(shown), max_tokens)
        return shown, await thinking.finished(sample, opened=opened, room=room, go_on=go_on)

    async def _turn(
        self,
        prompt_ids: Sequence[int],
        images: Sequence[str],
        *,
        max_tokens: int,
        stop: Sequence[str],
        seed: Mapping[str, object] | None = None,
    ) -> tuple[list[int], Sample]:
        return await self._on_live_engine(
            lambda sampler: sampler.turn(
                prompt_ids, images, self.sampling, max_tokens=max_tokens, stop=stop, seed=seed
            )
        )

    def _room(self, before: int, max_tokens: int) -> int:
        """How many tokens an answer may have after a prompt of `before` tokens."""
        return max_tokens if self.longest is None else min(max_tokens, self.longest - before)

    @property
    def pictures(self) -> Pictures:
        return self._pool.pictures

    @property
    def renderer(self) -> Renderer | None:
        return self._pool.renderer

    @property
    def shown(self) -> dict[str, bool]:
        """kind of message -> whether the chat template shows its content, for the kinds that were checked so far."""
        return self._pool.shown

    async def tokens(self, **body: object) -> list[int]:
        """Like Sampler.tokens."""
        return await self._on_live_engine(lambda sampler: sampler.tokens(**body))

    async def text_of(self, token_ids: Sequence[int]) -> str:
        """Like Sampler.text_of."""
        return await self._on_live_engine(lambda sampler: sampler.text_of(token_ids))

    async def thinking(self) -> Thinking:
        """How the model marks its thoughts. Raises EngineGone, Refusal."""
        if self._pool.thoughts is None:
            self._pool.thoughts = asyncio.create_task(asked_for(self._engine.server, self.tokens))
        return await asyncio.shield(self._pool.thoughts)

    async def _read_by_server(self, sample: Sample, prompt_ids: Sequence[int]) -> Sample:
        """The sample with its thoughts, as the server's own parser reads them, or the renderer."""
        message = await self.read_message(sample.token_ids, (), prompt_ids)
        reasoning, content = message.get("reasoning"), str(message.get("content") or "")
        # A renderer also takes off what its family writes around an answer without thoughts.
        if not message or (not reasoning and (self.renderer is None or content == sample.text)):
            return sample
        closed = sample.finish_reason == "stop" and not message.get("open")
        return replace(sample, thoughts=Thoughts(str(reasoning) if reasoning else None, content, closed))

    async def read_message(
        self,
        token_ids: Sequence[int],
        tools: Sequence[Mapping[str, object]],
        prompt_ids: Sequence[int] | None = None,
    ) -> Mapping[str, object]:
        """Parse an answer's tokens into a message, with the renderer or the server's parsers. Returns {} if the server has no parser, or
        refuses the tokens. Raises EngineGone; Refusal if it takes too long, because the answer may call a tool."""
        if self.renderer is not None:
            return self.renderer.message(token_ids, tools, prompt_ids)
        answer = {"request_id": "turn", "choices": [{"index": 0, "token_ids": [*token_ids]}]}
        about = {"messages": [{"role": "user", "content": ""}], **({"tools": [*tools]} if tools else {})}
        before = {} if prompt_ids is None else {"prompt_token_ids": [*prompt_ids]}
        body = {"generate_response": answer, "chat_request": about, **before}

        async def ask(sampler: Sampler) -> object:
            async with asyncio.timeout(READ_S):
                return await sampler.posted(DERENDER, body)

        try:
            response: Any = await self._on_live_engine(ask)
            message: Mapping[str, object] = response["choices"][0]["message"]
        except EngineDown:
            raise
        except (Refusal, EngineGone) as error:
            log_once(DERENDER, f"calls of tools, or thoughts, are not read: {error}; {NEEDS}\n")
            return {}
        except TimeoutError:
            raise Refusal(
                f"the engine has not read which tools the answer calls within {READ_S:g} s; its log may say why"
            ) from None
        except (LookupError, TypeError):
            return {}
        return message if isinstance(message, Mapping) else {}

    async def _on_live_engine(self, ask: Callable[[Sampler], Awaitable[T]]) -> T:
        """Call `ask` on the reserved engine, or on another if it dies. Raises EngineGone if none is left."""
        while True:
            engine = self._engine
            try:
                return await ask(engine)
            except EngineDown as error:
                await self._pool.leave(engine, error)
                # Several requests of one reservation may fail at once; only the first one moves it.
                if self._engine is engine:
                    self._move()

    def _move(self) -> None:
        self._engine.sequences -= self.sequences
        self._engine = self._pool.next
        self._engine.sequences += self.sequences
        self.replica = None
