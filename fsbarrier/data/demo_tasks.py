"""The demo: sort four letters. Its tasks and its tiny model are in `FOLDER`, made by scripts/demo_model.py.

The model solves a quarter of the tasks, and learns most of the rest by reinforcement within six iterations.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

#: train.jsonl, test.jsonl and model/
FOLDER: Final = Path(__file__).resolve().parent / "demo"

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
