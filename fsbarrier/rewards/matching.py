"""`reward.kind=exact` and `numeric`: the response is compared with the answer, at once and without help."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from fsbarrier.data.tasks import Task
from fsbarrier.rewards.score import Messages, Score

#: relative, between two numbers that count as the same
TOLERANCE = 1e-6

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_NUMBER = re.compile(
    rf"""(?P<sign>(?<![\w.)}}\]])-)?\$?(?:
        \\[dt]?frac\s*{{\s*(?P<top>-?(?:{_DIGITS}))\s*}}\s*{{\s*(?P<bottom>-?(?:{_DIGITS}))\s*}}
        | (?P<number>(?:{_DIGITS})(?:[eE][+-]?\d+)?)(?:\s*/\s*(?P<over>(?:{_DIGITS})))?
    )""",
    re.VERBOSE,
)
# What stands in \boxed{...}, with up to two levels of braces inside.
_BOXED = re.compile(r"\\boxed\s*{((?:[^{}]|{(?:[^{}]|{[^{}]*})*})*)}")
# What only separates groups of digits: LaTeX's ways to write a comma or a thin space, and the thin spaces themselves.
_THIN = re.compile(r"\{,\}|\\[,!;]|(?<=\d)[\u00a0\u2009\u202f](?=\d)")


class MatchReward:
    """A quick pure function of response and answer as a Reward."""

    def __init__(self, kind: str, match: Callable[[str, object], float]) -> None:
        self.kind, self.match = kind, match

    async def score(self, task: Task, response: str, messages: Messages | None = None) -> Score:
        reward = self.match(response, task.answer)
        return Score(reward, {self.kind: reward})

    async def close(self) -> None:
        pass


def exact(response: str, answer: object) -> float:
    """1.0 where the response is the answer, but for white space around either."""
    return float(response.strip() == str(answer).strip())


def numeric(response: str, answer: object) -> float:
    """1.0 where the response's last number is the answer's, within TOLERANCE; see `last_number`."""
    found, wanted = last_number(response), last_number(str(answer))
    if found is None or wanted is None:
        return 0.0
    return float(math.isclose(found, wanted, rel_tol=TOLERANCE, abs_tol=1e-12))


def last_number(text: str) -> float | None:
    r"""The last number in a text: in its last \boxed{...} if there is one with a number, else anywhere.

    Thousands' commas and a currency sign are read over, and so is %: "50%" is 50. "3/4" and "\frac{3}{4}" are quotients. A minus
    counts unless something stands right before it ("5-3" ends in 3). None: no finite number.
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
            # "3/0" is no quotient, but a 3 was read. A fraction with 0 below is nothing: the number before it stays.
            value = numerator
    return value if value is not None and math.isfinite(value) else None
