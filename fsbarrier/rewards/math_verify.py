"""`reward.kind=math`: scores LaTeX answers with math-verify.

math-verify uses a symbolic algebra system that may not terminate on unusual answers. Its own timeout uses signals, which only work in a
main thread. It therefore runs in subprocesses (`python -m fsbarrier.rewards.math_verify`), one question at a time, which are killed on
timeout. They read JSON lines {"answer", "response"} and write JSON lines {"reward"} or {"error"}, until EOF.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from collections.abc import Mapping

from fsbarrier.data.tasks import Task
from fsbarrier.rewards.matching import unusable
from fsbarrier.rewards.score import Answer, Reward, Score

#: maximum number of processes; each is started on demand
PROCESSES = 4
#: timeout of one parse or comparison; math-verify's default
STEP_S = 5


class MathReward(Reward):
    """Sends each question to a free process, or waits for one."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._free = asyncio.Semaphore(max(1, min(PROCESSES, len(os.sched_getaffinity(0)))))
        self._idle: list[asyncio.subprocess.Process] = []
        self._all: set[asyncio.subprocess.Process] = set()

    async def score(self, task: Task, answer: Answer) -> Score:
        if (problem := unusable("math", task.answer)) is not None:
            return Score(0.0, error=problem)
        async with self._free:
            started = time.monotonic()
            verdict = await self._verdict({"answer": str(task.answer), "response": answer.text})
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
            *(sys.executable, "-P", "-m", "fsbarrier.rewards.math_verify"),
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


def main() -> int:
    """The subprocess."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    # math-verify warns about each answer it cannot parse.
    logging.disable(logging.CRITICAL)
    # Keep library output out of the replies; it goes to the log.
    verdicts = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def judge(question: dict[str, str]) -> dict[str, float | str]:
        gold_text = question["answer"]
        if "$" not in gold_text and "\\boxed" not in gold_text:
            gold_text = f"\\boxed{{{gold_text}}}"
        gold = parse(gold_text, [LatexExtractionConfig(), ExprExtractionConfig()], parsing_timeout=STEP_S)
        if not gold:
            return {"error": f"math-verify cannot parse the answer {question['answer']!r}"}
        found = parse(
            question["response"],
            [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()],
            parsing_timeout=STEP_S,
        )
        return {"reward": float(verify(gold, found, timeout_seconds=STEP_S))}

    for line in sys.stdin:
        verdict: dict[str, float | str]
        try:
            verdict = judge(json.loads(line))
        except Exception as error:
            verdict = {"error": f"math-verify: {type(error).__name__}: {error}"}
        print(json.dumps(verdict), file=verdicts, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
