"""`reward.kind=math`: scores LaTeX answers with math-verify.

math-verify uses a symbolic algebra system that may not terminate on unusual answers. Its own timeout uses signals, which only work in a
main thread. It therefore runs in processes of its own, forked from one that has imported it (`python -m fsbarrier.rewards.math_verify
CONTROL_FD`, fork_server.py), one question at a time, which are killed on timeout.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack

from fsbarrier.data.tasks import Task
from fsbarrier.processes.fork_server import ForkServer, Job, Messages, Work, serve
from fsbarrier.processes.supervisor import own_program, with_this_package
from fsbarrier.rewards.matching import unusable
from fsbarrier.rewards.score import Answer, Reward, Score

#: maximum number of processes; each is started on demand
PROCESSES = 4
#: timeout of one parse or comparison; math-verify's default
STEP_S = 5

#: {"reward": number} or {"error": text}
Verdict = dict[str, float | str]


class MathReward(Reward):
    """Sends each question to a free process, or waits for one."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._free = asyncio.Semaphore(max(1, min(PROCESSES, len(os.sched_getaffinity(0)))))
        self._idle: list[Job] = []
        self._server: asyncio.Task[ForkServer] | None = None
        self._stack = AsyncExitStack()

    async def score(self, task: Task, answer: Answer) -> Score:
        if (problem := unusable("math", task.answer)) is not None:
            return Score(0.0, error=problem)
        async with self._free:
            started = time.monotonic()
            verdict = await self._verdict({"answer": str(task.answer), "response": answer.text})
            seconds = time.monotonic() - started
        if "error" in verdict:
            return Score(0.0, error=f"math-verify {verdict['error']}", seconds=seconds)
        reward = float(verdict["reward"])
        return Score(reward, {"math": reward}, seconds=seconds)

    async def _verdict(self, question: Mapping[str, str]) -> Verdict:
        """A process that failed to answer is not used again."""
        job = self._idle.pop() if self._idle else await self._start()
        try:
            await job.send(question)
            verdict: Verdict | None = await asyncio.wait_for(job.receive(), self.timeout_s)
        except TimeoutError:
            job.close()
            return {"error": f"gave no verdict within {self.timeout_s:g} s (reward.timeout_s)"}
        if verdict is None:
            return {"error": "ended its process"}
        self._idle.append(job)
        return verdict

    async def _start(self) -> Job:
        """Raises ProgramFailed."""
        if self._server is None:
            server = ForkServer(own_program("fsbarrier.rewards.math_verify"), with_this_package(os.environ))
            self._server = asyncio.create_task(self._stack.enter_async_context(server))
        return await self._stack.enter_async_context((await self._server).job())

    async def close(self) -> None:
        await self._stack.aclose()


# --- in the processes --------------------------------------------------------------------------------------------------


def load() -> Work:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    # math-verify warns about each answer it cannot parse.
    logging.disable(logging.CRITICAL)

    def judge(question: Mapping[str, str]) -> Verdict:
        gold_text = question["answer"]
        if "$" not in gold_text and "\\boxed" not in gold_text:
            gold_text = f"\\boxed{{{gold_text}}}"
        gold = parse(gold_text, [LatexExtractionConfig(), ExprExtractionConfig()], parsing_timeout=STEP_S)
        if not gold:
            return {"error": f"cannot parse the answer {question['answer']!r}"}
        found = parse(
            question["response"],
            [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()],
            parsing_timeout=STEP_S,
        )
        return {"reward": float(verify(gold, found, timeout_seconds=STEP_S))}

    async def answer(connection: socket.socket) -> None:
        messages = await Messages.over(connection)
        while (question := await messages.receive()) is not None:
            try:
                verdict = judge(question)
            except Exception as error:
                verdict = {"error": f"failed: {type(error).__name__}: {error}"}
            await messages.send(verdict)

    return lambda connection: asyncio.new_event_loop().run_until_complete(answer(connection))


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), load)
