"""`reward.kind=code`: tests in the public formats, and programs that attack whoever runs them."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import pickle
import shutil
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fsbarrier.cli.start.node_checks import unconfined
from fsbarrier.data.tasks import Task, read_tasks
from fsbarrier.errors import UsageError
from fsbarrier.rewards import code_sandbox
from fsbarrier.rewards.kinds import about_scorers, check_answers, open_reward
from fsbarrier.rewards.score import Answer, Score
from fsbarrier.settings.resolve import resolve
from fsbarrier.settings.sections import CodeSettings

ADDS = "a, b = map(int, input().split())\nprint(a + b)"
SUMS = "def total(numbers): return sum(numbers)"
METHOD = "class Solution:\n    def total(self, numbers: List[int]) -> int:\n        return sum(numbers)"


def packed(cases: object) -> str:
    """As LiveCodeBench has its hidden tests."""
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(cases)))).decode()


def case(given: str, expected: str, kind: str = "stdin") -> dict[str, str]:
    return {"input": given, "output": expected, "testtype": kind}


STDIN = {"inputs": ["1 2\n", "5 8\n"], "outputs": ["3\n", "13\n"]}
FUNCTION = {"fn_name": "total", "inputs": [[[4, 6]], [[]]], "outputs": [10, [0]]}
LIVE = {
    "public_test_cases": json.dumps([case("[7, 2]", "9", "functional")]),
    "private_test_cases": packed([case("[1]", "1", "functional")]),
    "metadata": json.dumps({"func_name": "total"}),
}
PRIME = {"fn_name": "total", "inputs": ["[3, 9]"], "outputs": ["12"]}
FORMATS: tuple[tuple[object, dict[str, Any], str, float], ...] = (
    (STDIN, {}, ADDS, 1.0),
    (json.dumps(STDIN), {}, ADDS.replace("a + b", "b"), 0.0),
    (None, {"input_output": json.dumps(FUNCTION)}, SUMS, 1.0),
    ({"inputs": [["1 2", "x"]], "outputs": [["3", ""]]}, {}, ADDS, 1.0),
    (None, LIVE, METHOD, 1.0),
    (None, LIVE, SUMS.replace("sum", "max"), 0.0),
    (json.dumps(PRIME), {}, METHOD, 1.0),
    ([case("6 1", "7")], {}, ADDS, 1.0),
    # White space at ends, and fractions, are compared leniently; whole numbers and words are not.
    (
        {"inputs": ["", ""], "outputs": ["0.30000000\nyes", "0.3\nyes"]},
        {},
        "print(0.1 + 0.2, '\\nyes  \\n')",
        1.0,
    ),
    ({"inputs": [""], "outputs": ["100000000000000001"]}, {}, "print(100000000000000000)", 0.0),
    ({"inputs": [""], "outputs": ["yes"]}, {}, "print('Yes')", 0.0),
    ({"fn_name": "f", "inputs": [[2]], "outputs": [[1, 1.5]]}, {}, "def f(x): return x / 2, 3 * x / 4", 1.0),
    ({"fn_name": "f", "inputs": [[]], "outputs": [True]}, {}, "def f(): return 1", 0.0),
    ({"fn_name": "f", "inputs": [[]], "outputs": [2**70]}, {}, "def f(): return 2 ** 70", 1.0),
    ({"fn_name": "f", "inputs": [[]], "outputs": [{"1": []}]}, {}, "def f(): return {1: []}", 1.0),
    # Nothing but what the function returns counts, and a function that prints is as good.
    ({"fn_name": "f", "inputs": [[]], "outputs": [5]}, {}, "def f():\n    print(4)\n    return 5", 1.0),
)


def scored(
    tasks_and_answers: Sequence[tuple[object, dict[str, Any], str]],
    *,
    kind: str = "code",
    timeout_s: float = 120.0,
    **settings: Any,
) -> list[Score]:
    async def scores() -> list[Score]:
        reward = open_reward(kind, timeout_s=timeout_s, code=CodeSettings(**settings))
        try:
            await reward.open()
            each = (
                reward.score_group(Task(number, str(number), "?", answer, metadata), [Answer(text)])
                for number, (answer, metadata, text) in enumerate(tasks_and_answers)
            )
            return [score for (score,) in await asyncio.gather(*each)]
        finally:
            await reward.close()

    return asyncio.run(scores())


def block(program: str) -> str:
    return f"Here it is:\n```python\n{program}\n```\nDone."


def test_the_public_formats() -> None:
    scores = scored([(answer, more, block(program)) for answer, more, program, _ in FORMATS])
    assert [(one.reward, one.error) for one in scores] == [(reward, None) for *_, reward in FORMATS]


def test_which_program_counts_and_what_partial_credit_is() -> None:
    three = {"inputs": ["1 1", "2 5", "4 4"], "outputs": ["2", "7", "8"]}
    odd = block("a, b = map(int, input().split())\nassert a != b, 'equal'\nprint(a + b)")
    answers = [ADDS, f"<think>{block('x')}</think>{block(ADDS)}", f"{block('print(0)')}{block(ADDS)}", odd]
    answers += [f"{block(ADDS)}\n```cpp\nint main()\n```", "```cpp\nint main()\n```"]
    partial = scored([(three, {}, text) for text in answers], partial=True)
    assert [round(one.reward, 3) for one in partial] == [1.0, 1.0, 1.0, 0.333, 1.0, 0.0]
    assert partial[3].info == {"code": "test 0: AssertionError: equal"}
    assert [one.reward for one in scored([(three, {}, odd)])] == [0.0]
    # verl gives the share for these sources.
    by_source = scored([(json.dumps(three), {"data_source": "apps"}, odd)], kind="verl")
    assert round(by_source[0].reward, 3) == 0.333


#: a program, and what is said about its test
HOSTILE = (
    ("import os\nwhile True: os.fork()", "PermissionError"),
    ("import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(999,)).start()", "can't start new thread"),
    ("x = bytearray(10 ** 10)", "MemoryError"),
    ("import os\nos.memfd_create('x')", "PermissionError"),
    ("import ctypes\nassert ctypes.CDLL(None).shmget(0, 4096, 0o1600) >= 0, 'no memory'", "no memory"),
    ("while True: print('x' * 1000)", "File too large"),
    ("import os\nos.kill(os.getppid(), 9)", "PermissionError"),
    ("import os\nos.kill(-1, 9)", "PermissionError"),
    ("import resource, os\nresource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))", "PermissionError"),
    ("import subprocess\nsubprocess.run(['true'])", "PermissionError"),
    ("import socket\nsocket.create_connection(('127.0.0.1', 1))", "PermissionError"),
    ("import os\nos.execv('/bin/sh', ['sh'])", "PermissionError"),
    ("while True: pass", "it took too long"),
    ("import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(999)", "it took too long"),
    ("import ctypes\nassert ctypes.CDLL(None).prctl(1, 0, 0, 0, 0) == 0, 'goes on'", "goes on"),
    ("import os\nos.abort()", "it was ended by SIGABRT"),
    ("import sys\nsys.exit('enough')", "exit: enough"),
    ("print(", "SyntaxError"),
    ("import os\nos.close(0)\nos.close(1)", "a wrong answer"),
    ("import os\nfor fd in range(3, 99):\n    try: os.write(fd, b'{\"got\": \"7\"}\\n')\n    except OSError: pass", "a wrong answer"),
    ("def f(", "SyntaxError"),
)  # fmt: skip
#: what a sandbox prevents besides
CONFINED = (
    ("import os\nassert not os.path.exists(%(secret)r), open(%(secret)r).read()", "a wrong answer"),
    ("import os\nassert len([p for p in os.listdir('/proc') if p.isdigit()]) < 5", "a wrong answer"),
    ("import os\nopen(f'/proc/{os.getppid()}/mem', 'r+b')", "PermissionError"),
    ("open('/etc/passwd')", "No such file"),
    ("import os\nassert set(os.environ) < {'PATH', 'HOME', 'LANG', 'PWD', 'LC_CTYPE'} | {%(own)s}, dict(os.environ)", "a wrong answer"),
    ("for number in range(999): open(f'/tmp/{number}', 'wb').write(bytes(1 << 19))", "No space left"),
    ("open('/dev/mine', 'w')", "Read-only"),
    ("open('/mine', 'w')", "Read-only"),
    ("open('/dev/shm/mine', 'w')", "No such file"),
)  # fmt: skip


def check_hostile(programs: Sequence[tuple[str, str]]) -> None:
    test = {"inputs": ["3 4"], "outputs": ["7"]}
    scores = scored([(test, {}, block(program)) for program, _ in programs], timeout_s=60.0, memory_mb=256)
    for (program, says), score in zip(programs, scores, strict=True):
        assert score.error is None and score.reward == 0.0
        assert says in score.info["code"], program


def test_a_hostile_program_gets_nothing_and_costs_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a sandbox the limits hold as well."""
    without = tmp_path / "bin"
    without.mkdir()
    monkeypatch.setenv("PATH", str(without))
    code_sandbox.missing.cache_clear()
    try:
        assert code_sandbox.missing() == "bubblewrap (bwrap) is not installed"
        settings = resolve([], {"reward.kind": "code,exact", "model": "m"}, cross_checks=False)
        assert "they can read and write what you can: bubblewrap (bwrap) is not installed" in unconfined(
            settings
        )
        assert unconfined(resolve([], {"model": "m"}, cross_checks=False)) == ""
        check_hostile(HOSTILE)
        # A wrapper that fails, as where the host forbids namespaces, is no sandbox either.
        (without / "bwrap").write_text(
            "#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n"
        )
        (without / "bwrap").chmod(0o755)
        code_sandbox.missing.cache_clear()
        assert (
            code_sandbox.missing()
            == "bubblewrap does not work here: bwrap: No permissions to create new namespace"
        )
    finally:
        code_sandbox.missing.cache_clear()


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_a_program_in_a_sandbox_sees_nothing_of_the_host(tmp_path: Path) -> None:
    assert code_sandbox.missing() == ""
    secret = tmp_path / "secret"
    secret.write_text("of the run")
    tmp_path.chmod(0o755)
    own = ", ".join(map(repr, code_sandbox.ENVIRONMENT))
    confined = [
        (program % {"secret": str(secret), "own": own} if "%(" in program else program, says)
        for program, says in CONFINED
    ]
    check_hostile([*HOSTILE, *confined])


def test_all_tests_together_may_take_no_longer_than_the_reward() -> None:
    """That is no error of the reward, which would end the phase if many answers do it."""
    twenty = {"inputs": ["1 1"] * 20, "outputs": ["2"] * 20}
    slow = block("import time\ntime.sleep(0.5)\nprint(2)")
    (score,) = scored([(twenty, {}, slow)], timeout_s=3.0, partial=True)
    assert score.error is None and 0.0 <= score.reward < 1.0 and "no time was left" in score.info["code"]


def test_tasks_without_usable_tests_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    stolen = tmp_path / "ran"

    class Code:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {stolen}",)

    hostile = base64.b64encode(zlib.compress(pickle.dumps([Code(), "[]", "[]"]))).decode()
    for row, says in (
        ({}, "has no tests: its answer must be an object with inputs and outputs"),
        ({"answer": "{"}, "has tests that are not JSON"),
        ({"answer": "[" * 100_000}, "nested too deeply"),
        ({"answer": {"inputs": ["1"], "outputs": []}}, "as many outputs as inputs"),
        ({"answer": {"inputs": [3], "outputs": ["3"]}}, "a test whose input or output is no text: 3"),
        ({"answer": {"fn_name": "a.b", "inputs": [[1]], "outputs": [1]}}, "no name of a function"),
        ({"answer": {"fn_name": "f", "inputs": [7], "outputs": [1]}}, "whose arguments are no list: 7"),
        ({"public_test_cases": 8}, "test cases that are no list: 8"),
        ({"public_test_cases": [case("1", "1"), case("2", "2", "functional")]}, "functional, stdin; all must be"),
        ({"public_test_cases": [case("1", "1", "functional")]}, "no func_name in its metadata"),
        ({"public_test_cases": [case("1", "1")], "private_test_cases": "?"}, "neither JSON nor LiveCodeBench's"),
        ({"public_test_cases": [case("1", "1")], "private_test_cases": hostile}, "neither JSON nor LiveCodeBench's"),
    ):  # fmt: skip
        path.write_text(
            json.dumps({"prompt": "?", "answer": json.dumps(STDIN)})
            + "\n"
            + json.dumps({"prompt": "!", **row})
            + "\n"
        )
        tasks = dict(read_tasks(path).tasks)
        with pytest.raises(
            UsageError, match=f"train.jsonl, line 2: reward.kind=code: the task .*{says}".replace("(", r"\(")
        ):
            check_answers("code", tasks.values(), path)
    assert not stolen.exists()
    path.write_text(json.dumps({"prompt": "?", "answer": json.dumps(STDIN), "data_source": "taco"}) + "\n")
    tasks = dict(read_tasks(path).tasks)
    check_answers("verl", tasks.values(), path)
    assert "code for taco (1)" in about_scorers("verl", tasks.values(), path)
