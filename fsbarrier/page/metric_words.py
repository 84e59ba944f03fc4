"""The curves in words: which metrics belong together, what each is called, and a sentence that says what it tells.

metric_words.txt has them. Metrics with names of the user's own, such as the parts of a reward, are described by a pattern of their column.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

TABLE = Path(__file__).with_name("metric_words.txt")
#: the groups in their order on the page
GROUPS = (
    "Reward",
    "Held-out evaluation",
    "Answers",
    "What the update learns from",
    "The policy's change",
    "Engine and trainer",
    "Optimizer",
    "Critic",
    "Time",
    "Other",
)


class Words(NamedTuple):
    """A metric's group, its name, and what it tells."""

    group: str
    title: str
    says: str


def words_of(column: str) -> Words:
    """A column in words."""
    for pattern, words in _table():
        if match := pattern.fullmatch(column):
            named = [part.replace("_", " ") for part in match.groups()]
            return words._replace(title=words.title.format(*named))
    return Words("Other", column.replace("_", " "), "A figure of the run.")


def is_curve(column: str) -> bool:
    """Whether a column is a curve of its own. Positions and standard errors are none."""
    return column not in ("iteration", "policy_version") and not column.endswith("_se")


@cache
def _table() -> list[tuple[re.Pattern[str], Words]]:
    lines = [line for line in TABLE.read_text(encoding="utf-8").splitlines() if line and line[0] != "#"]
    split = [line.split(" | ") for line in lines]
    return [(re.compile(pattern), Words(*words)) for pattern, *words in split]
