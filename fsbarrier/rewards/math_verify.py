"""`reward.kind=math`: scores LaTeX answers with math-verify.

math-verify uses a symbolic algebra system that may not terminate on unusual answers, and its own timeout uses signals, which only work in a
main thread. It therefore runs like a user's function, in its own processes, which are killed on timeout.
"""

from __future__ import annotations

import logging

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from fsbarrier.rewards.matching import unusable
from fsbarrier.rewards.score import Score

#: timeout of one parse or comparison; math-verify's default
STEP_S = 5

# math-verify warns about each answer it cannot parse.
logging.disable(logging.CRITICAL)


def math(prompt: object, response: str, answer: object, metadata: object) -> Score:
    """Whether the response equals the answer."""
    if (problem := unusable("math", answer)) is not None:
        return Score(0.0, error=problem)
    gold_text = str(answer)
    if "$" not in gold_text and "\\boxed" not in gold_text:
        gold_text = f"\\boxed{{{gold_text}}}"
    gold = parse(gold_text, [LatexExtractionConfig(), ExprExtractionConfig()], parsing_timeout=STEP_S)
    if not gold:
        return Score(0.0, error=f"math-verify cannot parse the answer {answer!r}")
    given = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    parsed = parse(response, given, parsing_timeout=STEP_S)
    reward = float(verify(gold, parsed, timeout_seconds=STEP_S))
    return Score(reward, {"math": reward})
