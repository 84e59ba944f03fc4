"""`reward.kind=code`: whether the program in an answer passes the task's tests (code_tests.py), run by answer_program.py in a sandbox.

It runs like a user's function, in processes of the reward, below a guard that ends all that a call has started.
"""

from __future__ import annotations

import json
import math
import os
import select
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fsbarrier.errors import UsageError
from fsbarrier.rewards import code_sandbox, code_tests
from fsbarrier.rewards.answer_program import READY
from fsbarrier.rewards.score import Score
from fsbarrier.settings.sections import CodeSettings

#: the most that a program may print, or write into one file
OUTPUT_BYTES = 1 << 20
# The longest line of the runner: JSON takes up to six bytes for each byte of output.
LINE_BYTES = 6 * OUTPUT_BYTES + 4096
#: a test may wait this many times as long as it may compute
WAITS = 3
MIB = 1 << 20
TRIAL = {"inputs": ["2"], "outputs": ["4"]}


def usable() -> Callable[..., Score]:
    """`code`, once a program has passed a test on this node. Raises UsageError."""
    options = {**CodeSettings().as_json(), "within_s": 60.0}
    tried = code("", "print(2 * int(input()))", TRIAL, {}, options)
    if tried.reward != 1.0:
        raise UsageError(f"reward.kind=code: {tried.error or tried.info['code']}")
    return code


def code(
    prompt: object, response: str, answer: object, metadata: Mapping[str, object], options: Mapping[str, Any]
) -> Score:
    """Run the program in an answer on the task's tests. `options`: the settings `code.*`, and `within_s`, the time for all of them."""
    try:
        tests = code_tests.tests_of(answer, metadata)
    except code_tests.NoTests as error:
        return Score(0.0, error=f"the task {error}")
    asked = {
        "program": code_tests.program_of(response),
        "function": tests.function,
        "inputs": tests.inputs,
        "cpu_s": math.ceil(options["timeout_s"]),
        "wall_s": WAITS * options["timeout_s"],
        "memory": options["memory_mb"] * MIB,
        "output": OUTPUT_BYTES,
    }
    passed, first = 0, ""
    right = code_tests.printed_right if tests.function is None else _returned_right
    with code_sandbox.opened() as runner:
        lines = _lines(runner, asked, time.monotonic() + options["within_s"])
        if (said_first := next(lines, b"it ended")) != READY.encode():
            return Score(
                0.0, error=f"programs of answers cannot run here: {said_first.decode(errors='replace')}"
            )
        for number, expected in enumerate(tests.outputs):
            said = _said(next(lines, None))
            if "got" in said and right(said["got"], expected):
                passed += 1
                continue
            why = said.get("failed", "a wrong answer") if said else "no time was left for it"
            first = first or f"test {number}: {why}"
            if not options["partial"] or not said:
                break
    share = passed / len(tests.outputs)
    info = {"code": first or "all tests passed"}
    return Score(share if options["partial"] else float(share == 1.0), {"tests_passed": share}, info)


def _said(line: bytes | None) -> dict[str, str]:
    """The runner's line about a test; {} if there is none. The answer's program may have taken control of the runner, so a line may hold
    anything."""
    try:
        said = json.loads(line or b"{}")
    except (ValueError, RecursionError):
        return {}
    return {
        name: said[name]
        for name in ("got", "failed")
        if isinstance(said, dict) and isinstance(said.get(name), str)
    }


def _returned_right(got: str, expected: object) -> bool:
    try:
        return code_tests.returned_right(code_tests.json_value(got), expected)
    except ValueError:
        return False


def _lines(runner: subprocess.Popen[bytes], asked: object, deadline: float) -> Iterator[bytes]:
    """Send the runner the program and its tests (`asked`), and yield its lines until the deadline."""
    assert runner.stdin is not None and runner.stdout is not None
    to, source = runner.stdin.fileno(), runner.stdout.fileno()
    os.set_blocking(to, False)
    left, received = memoryview(json.dumps(asked).encode() + b"\n"), b""
    while (left_s := deadline - time.monotonic()) > 0:
        readable, writable, _ = select.select([source], [to] if left else [], [], left_s)
        if writable:
            try:
                left = left[os.write(to, left) :]
            except OSError:
                return
        if readable:
            data = os.read(source, 1 << 16)
            if not data or len(received) > LINE_BYTES:
                return
            *complete, received = (received + data).split(b"\n")
            yield from complete
