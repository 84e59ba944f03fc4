"""`reward.kind=math`: scores LaTeX answers with math-verify.

math-verify uses a symbolic algebra system that may not terminate on unusual answers. Its own timeout uses signals, which only work in a
main thread. It therefore runs in subprocesses (math_verify_process.py), one question at a time, which are killed on timeout.
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

#: maximum number of processes; each is started on demand
PROCESSES = 4


class MathReward:
    """Sends each question to a free process, or waits for one."""

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
        """The reward, or an error message. A process that failed to answer is not used again."""
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
        # ValueError: the reply is not a line of JSON, or too long
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
    """Send one line and read the reply. Raises EOFError, OSError, ValueError."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps(question).encode() + b"\n")
    line = await process.stdout.readline()
    if not line:
        raise EOFError
    answer: dict[str, float | str] = json.loads(line)
    return answer
