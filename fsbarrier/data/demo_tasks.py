"""The demonstration task: sort four letters. Light: only task files and settings; `fsbarrier.workers.demo_model` makes the model.

`dcba=` must be answered with `abcd` and the end of the text. There are 26^4 prompts; a hash of the prompt says whether it may
be trained on or is held out, so the two files cannot share a prompt whatever the seed. A tiny model that has seen mostly wrong
demonstrations answers a quarter of them and learns most of the rest by reinforcement within six iterations.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from fsbarrier.files import write_atomic

# Names what the demo folder holds; changes whenever a folder made by older code must not be used.
RECIPE: Final = "sort4-v1"

LETTERS: Final = "abcdefghijklmnopqrstuvwxyz"
LENGTH: Final = 4
TRAIN_TASKS: Final = 4096
TEST_TASKS: Final = 512

# Dotted settings with which the demo learns.
DEMO_SETTINGS: Final[dict[str, str | int | float]] = {
    "iterations": 6,
    "rollout.tasks": 128,
    "rollout.samples": 16,
    "rollout.temperature": 1.0,
    "rollout.max_tokens": 8,
    "eval.tasks": 256,
    "eval.samples": 1,
    "eval.temperature": 1.0,
    "reward.kind": "exact",
    "algorithm.loss": "grpo",
    "optimizer.lr": 5e-4,
    "optimizer.warmup_steps": 4,
    "trainer.epochs": 2,
    "trainer.minibatch": 512,
    "trainer.dtype": "float32",
    "engine.dtype": "float32",
    "engine.max_model_len": 64,
}


def folder(base: Path, seed: int = 0) -> Path:
    """Where the demo of this recipe and seed lies below `base`."""
    return base / f"{RECIPE}-seed{seed}"


def is_ready(path: Path) -> bool:
    """Whether `path` is a complete demo folder of this recipe (its READY marker is written last)."""
    try:
        ready = json.loads((path / "READY").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(ready, dict) and ready.get("recipe") == RECIPE


def answer_for(prompt: str) -> str:
    """The right answer to a prompt such as `dcba=`: its letters in order."""
    return "".join(sorted(prompt[:LENGTH]))


def is_held_out(prompt: str) -> bool:
    """Whether a prompt belongs to the held-out tenth; depends on the prompt alone."""
    return hashlib.sha256(prompt.encode()).digest()[0] % 10 == 0


def prompts(rng: random.Random, *, held_out: bool) -> Iterator[str]:
    """Endless random prompts of one side of the split, with repetitions."""
    while True:
        prompt = "".join(rng.choice(LETTERS) for _ in range(LENGTH)) + "="
        if is_held_out(prompt) == held_out:
            yield prompt


def distinct_prompts(rng: random.Random, count: int, *, held_out: bool) -> list[str]:
    """`count` different prompts of one side of the split, in random order."""
    found: dict[str, None] = {}
    for prompt in prompts(rng, held_out=held_out):
        found[prompt] = None
        if len(found) == count:
            return list(found)
    raise AssertionError("unreachable: prompts() is endless")


def demonstration(prompt: str, wrong_share: float, rng: random.Random) -> str:
    """An answer to imitate during the warm start: right with probability 1 - `wrong_share`.

    A wrong one is the right answer reversed, the letters as they came, or the right answer with one letter missing, in equal
    parts; for a few prompts (`aaaa=`) it happens to be right all the same.
    """
    right = answer_for(prompt)
    if rng.random() >= wrong_share:
        return right
    kind = rng.randrange(3)
    if kind == 0:
        return right[::-1]
    if kind == 1:
        return prompt[:LENGTH]
    missing = rng.randrange(LENGTH)
    return right[:missing] + right[missing + 1 :]


def write_tasks(out: Path, seed: int = 0) -> None:
    """Write `train.jsonl` and `test.jsonl` into `out`: one task a line, `task_id`, `prompt` and `answer`. Raises OSError."""
    for name, held_out, count in (("train", False, TRAIN_TASKS), ("test", True, TEST_TASKS)):
        rng = random.Random(f"{RECIPE}/{seed}/{name}")
        lines = [
            json.dumps(
                {"task_id": f"sort4-{prompt[:LENGTH]}", "prompt": prompt, "answer": answer_for(prompt)}
            )
            for prompt in distinct_prompts(rng, count, held_out=held_out)
        ]
        write_atomic(out / f"{name}.jsonl", ("\n".join(lines) + "\n").encode(), durable=True)
