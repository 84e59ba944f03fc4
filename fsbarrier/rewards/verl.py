"""`reward.kind=verl`: each task is scored as verl's `default_compute_score` scores its `data_source`, where that scorer exists here too.

A task whose scorer does not exist here is refused before the start, since any other scorer would give it wrong rewards in silence.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from fsbarrier.data.tasks import Task
from fsbarrier.rewards import code_tests
from fsbarrier.rewards.matching import numeric, unusable
from fsbarrier.rewards.score import Answer, Reward, Score

_MATH = (
    *("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500", "math_dapo"),
    *("numina_aops_forum", "numina_synthetic_math", "numina_amc_aime", "numina_synthetic_amc"),
    *("numina_cn_k12", "numina_olympiads"),
)
_CODE = ("codecontests", "apps", "codeforces", "taco")
#: the scorer of each `data_source`; verl also takes each source whose name begins with "aime" for mathematics
SCORERS = {"openai/gsm8k": "gsm8k"} | dict.fromkeys(_MATH, "math") | dict.fromkeys(_CODE, "code")
_MARKED = re.compile(r"####\s*(-?\$?[0-9.,]+)")


def scorer_of(task: Task) -> str | None:
    """gsm8k, math or code; None if there is none for this task's `data_source`."""
    source = str(task.metadata.get("data_source"))
    return "math" if source.startswith("aime") else SCORERS.get(source)


def problem_of(task: Task) -> str | None:
    """Why a task cannot be scored."""
    model = task.metadata.get("reward_model")
    style = model.get("style") if isinstance(model, Mapping) else None
    if style not in (None, "rule"):
        return f"reward_model.style={style} is scored by a model: use reward.kind=judge or engines.NAME"
    scorer = scorer_of(task)
    if scorer is None:
        source, known = task.metadata.get("data_source"), ", ".join((*SCORERS, "aime*"))
        has = "has no data_source" if source is None else f"data_source={source} has no scorer here"
        return f"reward.kind=verl: {has}; the known ones are {known}"
    if scorer == "code":
        return code_tests.problem_of(task.answer, task.metadata)
    return unusable("numeric" if scorer == "gsm8k" else scorer, task.answer)


def chosen(tasks: Iterable[Task]) -> str:
    """Which scorer was chosen for which tasks, in words."""
    counts = Counter((task.metadata["data_source"], scorer_of(task)) for task in tasks)
    return ", ".join(f"{scorer} for {source} ({count})" for (source, scorer), count in counts.items())


def gsm8k(response: str, answer: object) -> float:
    """1.0 if the number after the last "####" of the response equals the answer. Without "####" it is 0.0, as in verl."""
    marked = _MARKED.findall(response)
    return numeric(marked[-1], answer) if marked else 0.0


class VerlReward(Reward):
    """`math` scores what verl takes for mathematics, `code` programs. Each is opened with its first task."""

    def __init__(self, math: Reward, code: Reward) -> None:
        self.math, self.code = math, code

    async def score_group(self, task: Task, answers: Sequence[Answer]) -> list[Score]:
        if (problem := problem_of(task)) is not None:
            return [Score(0.0, error=problem) for _ in answers]
        if (scorer := scorer_of(task)) != "gsm8k":
            return await (self.math if scorer == "math" else self.code).score_group(task, answers)
        rewards = [gsm8k(answer.text, task.answer) for answer in answers]
        return [Score(reward, {"gsm8k": reward}) for reward in rewards]

    async def close(self) -> None:
        await self.math.close()
        await self.code.close()
