"""math-verify as a process: a line of JSON {"answer", "response"} in, a line {"reward"} or {"error"} out, until the input ends.

`python -m fsbarrier.workers.math_reward`; fsbarrier/rewards/rewards.py starts it. In a main thread of its own math-verify can
interrupt itself.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import Any

STEP_S = 5  # for one reading or one comparison; math-verify's own default


def main() -> int:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    logging.disable(logging.CRITICAL)  # it warns of each answer that it cannot read
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints goes to the log, not between the verdicts

    def judge(question: dict[str, str]) -> dict[str, Any]:
        gold_text = question["answer"]
        if "$" not in gold_text and "\\boxed" not in gold_text:
            gold_text = f"\\boxed{{{gold_text}}}"
        gold = parse(gold_text, [LatexExtractionConfig(), ExprExtractionConfig()], parsing_timeout=STEP_S)
        if not gold:
            return {"error": f"math-verify cannot read the answer {question['answer']!r}", "alive": True}
        found = parse(
            question["response"],
            [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()],
            parsing_timeout=STEP_S,
        )
        return {"reward": float(verify(gold, found, timeout_seconds=STEP_S))}

    for line in sys.stdin:
        try:
            verdict = judge(json.loads(line))
        except Exception as error:
            verdict = {"error": f"math-verify: {type(error).__name__}: {error}", "alive": True}
        print(json.dumps(verdict), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
