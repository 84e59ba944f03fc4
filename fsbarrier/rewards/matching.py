"""`reward.kind=exact` and `numeric`: compare the response with the answer."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from fsbarrier.data.tasks import Task
from fsbarrier.rewards.score import Answer, Reward, Score

#: relative tolerance for equal numbers
TOLERANCE = 1e-6

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_NUMBER = re.compile(
    rf"""(?P<sign>(?<![\w.)}}\]])-)?\$?(?:
        \\[dt]?frac\s*{{\s*(?P<top>-?(?:{_DIGITS}))\s*}}\s*{{\s*(?P<bottom>-?(?:{_DIGITS}))\s*}}
        | (?P<number>(?:{_DIGITS})(?:[eE][+-]?\d+)?)(?:\s*/\s*(?P<over>(?:{_DIGITS})))?
    )""",
    re.VERBOSE,
)
# The contents of \boxed{...}, with up to two levels of nested braces.
_BOXED = re.compile(r"\\boxed\s*{((?:[^{}]|{(?:[^{}]|{[^{}]*})*})*)}")
# Digit group separators: LaTeX commas and thin spaces, and Unicode thin spaces.
_THIN = re.compile(r"\{,\}|\\[,!;]|(?<=\d)[\u00a0\u2009\u202f](?=\d)")


class MatchReward(Reward):
    """Wraps a fast pure function of response and answer as a Reward."""

    def __init__(self, kind: str, match: Callable[[str, object], float]) -> None:
        self.kind, self.match = kind, match

    async def score(self, task: Task, answer: Answer) -> Score:
        if (problem := unusable(self.kind, task.answer)) is not None:
            return Score(0.0, error=problem)
        reward = self.match(answer.text, task.answer)
        return Score(reward, {self.kind: reward})


def unusable(kind: str, answer: object) -> str | None:
    """Why a reward of this kind cannot compare with a task's answer."""
    if isinstance(answer, list) and answer and kind != "math":
        return next((problem for alternative in answer if (problem := unusable(kind, alternative))), None)
    if answer is None or answer == [] or not str(answer).strip():
        return f"reward.kind={kind} needs an answer, and the task has none"
    if isinstance(answer, list | dict):
        return f"reward.kind={kind} cannot compare with {_kind_of(answer)}: give text or a number"
    if kind == "numeric" and last_number(str(answer)) is None:
        return f"reward.kind={kind} needs an answer with a number, not {answer!r}"
    return None


def _kind_of(answer: list[object] | dict[str, object]) -> str:
    return "a list" if isinstance(answer, list) else "a JSON object"


def exact(response: str, answer: object) -> float:
    """1.0 if the response equals the answer, ignoring surrounding whitespace. If the answer is a list, any of its items may match."""
    right = answer if isinstance(answer, list) else [answer]
    return float(response.strip() in {str(alternative).strip() for alternative in right})


def numeric(response: str, answer: object) -> float:
    """1.0 if the last numbers of response and answer are equal within TOLERANCE; see `last_number`."""
    right = answer if isinstance(answer, list) else [answer]
    return max(
        (_equal(last_number(response), last_number(str(alternative))) for alternative in right), default=0.0
    )


def _equal(given: float | None, wanted: float | None) -> float:
    if given is None or wanted is None:
        return 0.0
    return float(math.isclose(given, wanted, rel_tol=TOLERANCE, abs_tol=1e-12))


def last_number(text: str) -> float | None:
    r"""The last number in a text: in its last \boxed{...} that contains a number, else anywhere.

    Ignores thousands separators, currency signs and % ("50%" is 50). "3/4" and "\frac{3}{4}" are quotients. A minus sign
    counts unless something directly precedes it ("5-3" ends in 3). None: no finite number.
    """
    text = _THIN.sub("", text.replace("\u2212", "-").replace("\\$", "$").replace("\\%", "%"))
    for boxed in reversed(_BOXED.findall(text)):
        number = _last_number_anywhere(boxed)
        if number is not None:
            return number
    return _last_number_anywhere(text)


def _last_number_anywhere(text: str) -> float | None:
    value = None
    for match in _NUMBER.finditer(text):
        top, bottom = match["top"] or match["number"], match["bottom"] or match["over"] or "1"
        numerator, denominator = (float(part.replace(",", "")) for part in (top, bottom))
        if denominator:
            value = (-1 if match["sign"] else 1) * numerator / denominator
        elif match["over"]:
            # For "3/0" use the 3. Ignore a \frac with denominator 0 and keep the number before it.
            value = numerator
    return value if value is not None and math.isfinite(value) else None
