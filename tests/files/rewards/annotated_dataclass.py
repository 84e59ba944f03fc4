from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass
class Verdict:
    reward: float
    words: int


def score(prompt, response, answer, metadata):
    return asdict(Verdict(float(response == answer), len(response.split())))
