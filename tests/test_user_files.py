"""The catalogue of files that people bring (`tests/files/`), each with what must come of it. Whoever adds a file adds a line."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from commands import typed

from fsbarrier.data import demo_tasks
from fsbarrier.data.tasks import Task
from fsbarrier.rewards.kinds import open_reward
from fsbarrier.rewards.score import Answer, Score

MODEL = demo_tasks.FOLDER / "model"
FILES = Path(__file__).parent / "files"


def scored(kind: str, responses: Sequence[str], answer: object = "7") -> list[Score]:
    """The Scores of these answers to a task, as one group."""
    kind = ",".join(f"{FILES}/rewards/{one}" if ".py" in one else one for one in kind.split(","))

    async def run() -> list[Score]:
        reward = open_reward(kind, timeout_s=120.0)
        try:
            await reward.open()
            task = Task(0, "t-0", "How many?", answer, {"home": os.getcwd()})
            return await reward.score_group(task, [Answer(one) for one in responses])
        finally:
            await reward.close()

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("kind", "of_answers"),
    [
        ("annotated_dataclass.py:score", {"7": 1.0, "it is 7": 0.0}),
        # Two files of one name, both of which pickle their functions.
        ("parallel.py:forked,again/parallel.py:forked", {"7": 2.0, "8": 0.0}),
        ("parallel.py:spawned", {"7": 1.0, "8": 0.0}),
        ("models.py:score", {"7": 1.0, "8": 0.0}),
        ("habits.py:alarm", {"7": 1.0, "endless": -0.5}),
        ("habits.py:own_loop", {"7": 1.0, "8": 0.0}),
        # More answers than processes.
        ("habits.py:elsewhere", dict.fromkeys(map(str, range(10)), 1.0)),
        ("habits.py:crashes", {"7": 1.0, "crash": "crashes: its process was ended by signal 11 (SIGSEGV)"}),
        ("habits.py:leaves", {"leave": "leaves: its process ended with exit code 3", "7": 1.0}),
        ("groups.py:array", {"7": 1.0, "8": 0.0}),
        ("groups.py:column", {"7": 1.0, "8": 0.0}),
        pytest.param("groups.py:tensor", {"7": 1.0, "8": 0.0}, marks=pytest.mark.slow),
        ("groups.py:pairs", {"7": 1.0, "8": 0.0}),
        (
            "groups.py:by_answer",
            dict.fromkeys(("7", "8"), "by_answer: gave {'7': 1.0, '8': 0.0}, not a list of 2 rewards"),
        ),
        (
            "groups.py:one_number",
            dict.fromkeys(("7", "8"), "one_number: gave 1.0, not a list of 2 rewards"),
        ),
    ],
)
def test_a_reward_file_does_what_it_does_elsewhere(kind: str, of_answers: dict[str, float | str]) -> None:
    """For each answer its reward, or how the function's failure is told."""
    found = scored(kind, list(of_answers))
    for score, expected in zip(found, of_answers.values(), strict=True):
        if isinstance(expected, str):
            assert (score.reward, score.error) == (0.0, expected)
        else:
            assert (score.reward, score.error) == (expected, None)


GOOD = {"prompt": "dcba=", "answer": "abcd"}
#: a conversation in which a tool was called, with its arguments as text, as OpenAI's API has them
CALLED = [
    {"role": "user", "content": "dc="},
    {"role": "assistant", "tool_calls": [{"function": {"name": "sort", "arguments": '{"letters": "dc"}'}}]},
    {"role": "tool", "content": "cd", "tool_call_id": "call_1"},
]


@pytest.mark.parametrize(
    ("rows", "words", "says"),
    [
        (
            [GOOD, {"prompt": "ab=" * 20, "answer": "ab"}, GOOD],
            "reward.kind=exact",
            [
                "train: 3 tasks",
                "5 tokens in the middle, 60 at most (task train-1)",
                "after 1 prompt, engine.max_model_len=64 leaves fewer than rollout.max_tokens=8",
                "1 prompt equal to an earlier one",
                "    | dcba=",
                "reward.kind=exact: 1 for the reference answer, 0 for nonsense",
            ],
        ),
        (
            [{"prompt": [{"role": "user", "content": "dc="}], "answer": ["cd", "c d"]}],
            "reward.kind=exact",
            ["    | <user>dc=", "exact: 1 for the reference answer, 0 for nonsense"],
        ),
        (
            [{"prompt": CALLED, "answer": "cd"}],
            "reward.kind=exact",
            ["    | <user>dc=<assistant>lettersdc<tool>cd\n", "prompts: 37 tokens in the middle"],
        ),
        (
            [GOOD],
            "reward.kind=FILES/habits.py:alarm",
            ["1 for nonsense (mean of 1): it does not tell them apart"],
        ),
        ([GOOD], "reward.kind=FILES/groups.py:by_answer", ["fails: by_answer: gave {'abcd': 1.0,"]),
        (
            [{"prompt": "dc="}],
            "reward.kind=FILES/models.py:score",
            ["not tried, as the first tasks have no answer"],
        ),
    ],
)
def test_check_says_what_a_run_would_meet(
    tmp_path: Path, rows: list[dict[str, object]], words: str, says: list[str]
) -> None:
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for call in m.tool_calls %}"
        "{% for name, value in call.function.arguments.items() %}{{ name }}{{ value }}{% endfor %}{% endfor %}{% endfor %}"
    )
    kind = words.replace("FILES", f"{FILES}/rewards")
    limits = ("engine.max_model_len=64", "rollout.max_tokens=8")
    said = typed("check", tmp_path, "--model", model, kind, *limits).out
    for one in says:
        assert one in said, said
