"""A reward of one's own, as an example: `reward.kind=scripts/short_and_right.py:judge`. Half for ending in time, half for the number."""

from __future__ import annotations

import re
from typing import Any


def judge(prompt: Any, response: str, answer: Any, metadata: dict[str, Any]) -> dict[str, float]:
    """Only answers that ended are judged at all (one that was cut off is no success), so that much is earned already."""
    numbers = re.findall(r"\d+", response)
    right = float(bool(numbers) and numbers[-1] == str(answer))
    return {"reward": 0.5 + 0.5 * right, "ended": 1.0, "right": right}
