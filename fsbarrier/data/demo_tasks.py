"""The demo: sort four letters. Its tasks and its tiny model are in `FOLDER`, made by scripts/demo_model.py.

The model solves a quarter of the tasks, and learns most of the rest by reinforcement within six iterations. A run
gets its own copy, because the nodes need not have this package in the same place.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from fsbarrier.errors import UsageError
from fsbarrier.store import files

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


def make(target: Path) -> None:
    """Create `target` (the run's demo folder) atomically, with the run's permissions, unless it exists. Raises UsageError."""
    if target.is_dir():
        return
    staging = files.temporary_beside(target)
    try:
        files.make_dirs(target.parent)
        for folder, _, names in os.walk(FOLDER):
            copied = staging / Path(folder).relative_to(FOLDER)
            files.make_dirs(copied)
            for name in names:
                files.write_atomic(copied / name, (Path(folder) / name).read_bytes())
        try:
            os.rename(staging, target)
        except OSError:
            # Another start may have been faster.
            if not target.is_dir():
                raise
    except OSError as error:
        raise UsageError(f"--log-path {target.parent}: not writable: {error.strerror or error}") from None
    finally:
        files.discard(staging)
