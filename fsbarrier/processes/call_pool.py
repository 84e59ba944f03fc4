"""Calls of a user's function, each in a process that a fork server (fork_server.py) has forked after it loaded the function once.

A process serves one call after the other, in its main thread, so that the function may use signals, event loops, processes and its current
directory as in any program. A process that crashes or takes too long is ended with all that it has started, and replaced.

Questions and answers are values of JSON's types. A process gets `hello` first, then `[number, question]`, and sends `[number, answer]`.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import os
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

from fsbarrier.processes.fork_server import ForkServer, Job, Messages
from fsbarrier.processes.supervisor import own_program, with_this_package

# How long a process may take to end, and how late its answer may come if it enforces the time limit of its calls itself.
GRACE_S = 2.0


class ProcessEnded(Exception):
    """The process ended during the call. The message says how, and continues "its process "."""


class CallPool:
    """The pool in our program. Raises UsageError if the function cannot be loaded, ProgramFailed if loading crashes."""

    def __init__(self, *words: str) -> None:
        """`words`: the module whose process calls `serve`, and its arguments."""
        self._words, self._opening = words, asyncio.Lock()
        self._server: ForkServer | None = None
        self._hello: object = None
        self._together = False
        self._idle: list[_Process] = []
        self._stack = AsyncExitStack()

    async def open(self) -> Any:
        """Load the function, unless that is done; returns what the loading side says about it."""
        async with self._opening:
            if self._server is None:
                server = ForkServer(own_program(*self._words), with_this_package(os.environ))
                self._server = await self._stack.enter_async_context(server)
        return self._server.about

    def begin(self, hello: object, *, together: bool) -> None:
        """`hello`: the first message to each process. `together`: one process takes all calls, because the function is `async`."""
        self._hello, self._together = hello, together

    async def call(self, question: object, within_s: float) -> Any:
        """The function's answer. Raises TimeoutError, ProcessEnded, ProgramFailed, ValueError (the question is too long)."""
        process = await self._free_process()
        try:
            async with asyncio.timeout(within_s):
                answer = await process.ask(question)
        except BaseException:
            # The process may still work on this question, so it must not take another one.
            if process in self._idle:
                self._idle.remove(process)
            await process.close()
            raise
        if process not in self._idle:
            self._idle.append(process)
        return answer

    async def _free_process(self) -> _Process:
        async with self._opening if self._together else contextlib.nullcontext():
            if self._idle:
                return self._idle[-1] if self._together else self._idle.pop()
            assert self._server is not None
            process = _Process()
            await process.start(self._server, self._hello)
            self._stack.push_async_callback(process.close)
            if self._together:
                self._idle.append(process)
            return process

    async def close(self) -> None:
        await self._stack.aclose()


class _Process:
    """One process of the pool."""

    def __init__(self) -> None:
        self._stack, self._numbers = AsyncExitStack(), itertools.count()
        self._asked: dict[int, asyncio.Future[Any]] = {}

    async def start(self, server: ForkServer, hello: object) -> None:
        self._job: Job = await self._stack.enter_async_context(server.job())
        await self._job.send(hello)
        self._hearing = asyncio.create_task(self._hear())

    async def ask(self, question: object) -> Any:
        number = next(self._numbers)
        asked = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            # A process that has just ended will not answer.
            if self._hearing.done():
                raise ProcessEnded("had ended before")
            await self._job.send([number, question])
            return await asked
        finally:
            self._asked.pop(number, None)

    async def _hear(self) -> None:
        while (said := await self._job.receive()) is not None:
            number, answer = said
            if (asked := self._asked.get(number)) is not None and not asked.done():
                asked.set_result(answer)
        how = await self._job.how_it_ended(GRACE_S)
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(ProcessEnded(how))

    async def close(self) -> None:
        await self._stack.aclose()
        await self._hearing


# --- in the process ---------------------------------------------------------------------------------------------------------

#: gives the answer to a question, at once or when awaited
AnswerTo = Callable[[Any], Any]


def answer_calls(make: Callable[[Any], AnswerTo], connection: socket.socket, *, together: bool) -> None:
    """Answer questions in one process. `make` gets the hello and returns the function that answers. `together`: answers are awaited in
    parallel."""
    # Unless `together`, this loop runs only between the calls, so that the function may have an event loop of its own.
    loop = asyncio.new_event_loop()
    messages = loop.run_until_complete(Messages.over(connection))
    hello = loop.run_until_complete(messages.receive())
    if hello is None:
        # The pool closed this process before its first question.
        return
    if together:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(_answer_together(make(hello), messages))
        return
    answer_to, home = make(hello), os.open(".", os.O_RDONLY | os.O_CLOEXEC)
    while (asked := loop.run_until_complete(messages.receive())) is not None:
        number, question = asked
        answer = answer_to(question)
        if inspect.isawaitable(answer):
            answer = loop.run_until_complete(answer)
        # Each call begins in the same folder, whichever process it gets.
        os.fchdir(home)
        loop.run_until_complete(_send(messages, number, answer))


async def _send(messages: Messages, number: int, answer: object) -> None:
    """Always answer, or the pool waits until the call's limit and then ends the process, with all other calls in it."""
    try:
        await messages.send([number, answer])
    except (ValueError, RecursionError) as error:
        await messages.send([number, {"error": f"its answer cannot be sent: {error}"}])


async def _answer_together(answer_to: AnswerTo, messages: Messages) -> None:
    under_way: set[asyncio.Task[None]] = set()

    async def answer(number: int, question: object) -> None:
        await _send(messages, number, await answer_to(question))

    while (asked := await messages.receive()) is not None:
        task = asyncio.create_task(answer(*asked))
        under_way.add(task)
        task.add_done_callback(under_way.discard)
