"""The catalogue of files that people bring (`tests/files/`), each with what must come of it. Whoever adds a file adds a line."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from fsbarrier.data.tasks import Task
from fsbarrier.rewards.kinds import open_reward
from fsbarrier.rewards.score import Answer, Score

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
