"""The demo task: sort four letters. Contains only task files and settings; `fsbarrier.workers.demo_model` creates the model.

`dcba=` must be answered with `abcd` and the end token. A hash of the prompt decides whether each of the 26^4 prompts is for
training or held out, so the two files never share a prompt. A tiny model trained on mostly wrong demonstrations solves a
quarter of the tasks, and learns most of the rest by reinforcement within six iterations.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from fsbarrier.store.files import write_atomic

# Version of the demo folder's contents; changed whenever older folders must not be reused.
RECIPE: Final = "sort4-v1"

LETTERS: Final = "abcdefghijklmnopqrstuvwxyz"
LENGTH: Final = 4
TRAIN_TASKS: Final = 4096
TEST_TASKS: Final = 512

# The settings of the demo, by dotted name.
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
    """The folder of the demo with this recipe and seed, below `base`."""
    return base / f"{RECIPE}-seed{seed}"


def is_ready(path: Path) -> bool:
    """Whether `path` is a complete demo folder of this recipe (its READY marker is written last)."""
    try:
        ready = json.loads((path / "READY").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(ready, dict) and ready.get("recipe") == RECIPE


def answer_for(prompt: str) -> str:
    """The correct answer to a prompt such as `dcba=`: its letters in order."""
    return "".join(sorted(prompt[:LENGTH]))


def is_held_out(prompt: str) -> bool:
    """Whether a prompt is held out (a tenth of them); depends only on the prompt."""
    return hashlib.sha256(prompt.encode()).digest()[0] % 10 == 0


def prompts(rng: random.Random, *, held_out: bool) -> Iterator[str]:
    """Infinite random prompts of one side of the split, with repetitions."""
    while True:
        prompt = "".join(rng.choice(LETTERS) for _ in range(LENGTH)) + "="
        if is_held_out(prompt) == held_out:
            yield prompt


def distinct_prompts(rng: random.Random, count: int, *, held_out: bool) -> list[str]:
    """`count` distinct prompts of one side of the split, in random order."""
    found: dict[str, None] = {}
    for prompt in prompts(rng, held_out=held_out):
        found[prompt] = None
        if len(found) == count:
            return list(found)
    raise AssertionError("unreachable: prompts() is endless")


def demonstration(prompt: str, wrong_share: float, rng: random.Random) -> str:
    """A demonstration for the warm start, correct with probability 1 - `wrong_share`.

    A wrong one is, with equal probability, the correct answer reversed, the unsorted letters, or the correct answer with one
    letter missing; for a few prompts (`aaaa=`) it is correct anyway.
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
    """Write `train.jsonl` and `test.jsonl` into `out`, with `task_id`, `prompt` and `answer` per line. Raises OSError."""
    for name, held_out, count in (("train", False, TRAIN_TASKS), ("test", True, TEST_TASKS)):
        rng = random.Random(f"{RECIPE}/{seed}/{name}")
        lines = [
            json.dumps(
                {"task_id": f"sort4-{prompt[:LENGTH]}", "prompt": prompt, "answer": answer_for(prompt)}
            )
            for prompt in distinct_prompts(rng, count, held_out=held_out)
        ]
        write_atomic(out / f"{name}.jsonl", ("\n".join(lines) + "\n").encode(), durable=True)
