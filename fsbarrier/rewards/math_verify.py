"""`reward.kind=math`: math-verify's judgement of LaTeX answers.

math-verify rests on a symbolic algebra system, which may take for ever on a strange answer. It interrupts itself by signals, and
those reach a main thread only. So it runs in processes of its own (math_verify_process.py), one question at a time, and one that is
late is killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Mapping

from fsbarrier.data.tasks import Task
from fsbarrier.rewards.score import Messages, Score

#: at most; each is started when there is a question and no other process is free
PROCESSES = 4


class MathReward:
    """Hands each question to a process that is free, or waits for one."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._free = asyncio.Semaphore(max(1, min(PROCESSES, len(os.sched_getaffinity(0)))))
        self._idle: list[asyncio.subprocess.Process] = []
        self._all: set[asyncio.subprocess.Process] = set()

    async def score(self, task: Task, response: str, messages: Messages | None = None) -> Score:
        async with self._free:
            started = time.monotonic()
            verdict = await self._verdict({"answer": str(task.answer), "response": response})
            seconds = time.monotonic() - started
        if isinstance(verdict, str):
            return Score(0.0, error=verdict, seconds=seconds)
        return Score(verdict, {"math": verdict}, seconds=seconds)

    async def _verdict(self, question: Mapping[str, str]) -> float | str:
        """The reward, or what went wrong. Only a process that has answered is asked again."""
        process = None
        try:
            process = self._idle.pop() if self._idle else await self._start()
            answer = await asyncio.wait_for(_answer(process, question), self.timeout_s)
            self._idle.append(process)
            process = None
            return float(answer["reward"]) if "reward" in answer else str(answer["error"])
        except TimeoutError:
            return f"math-verify: no verdict within {self.timeout_s:g} s (reward.timeout_s)"
        except EOFError:
            return "math-verify: its process ended"
        # ValueError: what came back is no line of JSON, or longer than a line may be
        except (OSError, ValueError) as error:
            return f"math-verify: {error}"
        finally:
            if process is not None:
                await self._end(process)

    async def _start(self) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "fsbarrier.rewards.math_verify_process"),
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


async def _answer(process: asyncio.subprocess.Process, question: Mapping[str, str]) -> dict[str, float | str]:
    """One line there, one line back. Raises EOFError, OSError, ValueError."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps(question).encode() + b"\n")
    line = await process.stdout.readline()
    if not line:
        raise EOFError
    answer: dict[str, float | str] = json.loads(line)
    return answer
