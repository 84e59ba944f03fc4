"""math-verify as a subprocess: reads JSON lines {"answer", "response"}, writes JSON lines {"reward"} or {"error"}, until EOF.

Started by math_verify.py as `python -m fsbarrier.rewards.math_verify_process`.
"""

from __future__ import annotations

import json
import logging
import os
import sys

#: timeout of one parse or comparison; math-verify's default
STEP_S = 5


def main() -> int:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    # math-verify warns about each answer it cannot parse.
    logging.disable(logging.CRITICAL)
    # Keep library output out of the replies; it goes to the log.
    verdicts = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def judge(question: dict[str, str]) -> dict[str, float | str]:
        gold_text = question["answer"]
        if "$" not in gold_text and "\\boxed" not in gold_text:
            gold_text = f"\\boxed{{{gold_text}}}"
        gold = parse(gold_text, [LatexExtractionConfig(), ExprExtractionConfig()], parsing_timeout=STEP_S)
        if not gold:
            return {"error": f"math-verify cannot parse the answer {question['answer']!r}"}
        found = parse(
            question["response"],
            [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()],
            parsing_timeout=STEP_S,
        )
        return {"reward": float(verify(gold, found, timeout_seconds=STEP_S))}

    for line in sys.stdin:
        verdict: dict[str, float | str]
        try:
            verdict = judge(json.loads(line))
        except Exception as error:
            verdict = {"error": f"math-verify: {type(error).__name__}: {error}"}
        print(json.dumps(verdict), file=verdicts, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
