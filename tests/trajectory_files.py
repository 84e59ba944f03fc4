"""Trajectories and rank files as the tests of storage and merging need them."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fsbarrier.trajectories import RankFileWriter


def trajectory(
    task: int, sample: int, *, tokens: int = 12, version: int = 3, rank: int = 0
) -> dict[str, Any]:
    """One trajectory with every kind of value, the same for the same arguments."""
    rng = random.Random(f"{task}:{sample}:{tokens}")
    text = f"answer {rng.random()} é 語 \udc80"
    return {
        "task_id": f"task-{task}",
        "task_index": task,
        "sample": sample,
        "reward": rng.choice([0.0, 0.25, 1.0]),
        "reward_parts": {"exact": 1.0, "length": -0.5},
        "policy_version": version,
        "node_rank": rank,
        "prompt": [{"role": "user", "content": f"question {task}"}],
        "messages": [{"role": "user", "content": f"question {task}"}, {"role": "assistant", "content": text}],
        "text": text,
        "token_ids": array("i", [rng.randrange(50_000) for _ in range(tokens)]),
        "prompt_tokens": 4,
        "loss_mask": array("B", [0] * 4 + [1] * (tokens - 4)),
        "logprobs": array("f", [-rng.random() for _ in range(tokens)]),
        "empty": array("f"),
        "valid": True,
        "finish_reason": "stop",
        "metadata": {
            "none": None,
            "big": 2**70,
            "numbers": [0, 255, 256, 65536, -1, -(2**40)],
            "list": [1, [2], []],
        },
    }


def group(task: int, *, samples: int = 2, tokens: int = 12, rank: int = 0) -> list[dict[str, Any]]:
    return [trajectory(task, sample, tokens=tokens, rank=rank) for sample in range(samples)]


def write_part(
    path: Path,
    tasks: Iterable[int],
    *,
    rank: int = 0,
    finished: bool = False,
    expected: Iterable[int] | None = None,
    generation: int = 1,
    samples: int = 2,
    tokens: int = 12,
    run_id: str = "run-1",
    policy: str = "policy-000003.g0001:0123456789abcdef",
) -> Path:
    """A rank's file with one group a task."""
    tasks = list(tasks)
    header = {
        "run_id": run_id,
        "node_rank": rank,
        "generation": generation,
        "iteration": 5,
        "split": "train",
        "policy_version": 3,
        "policy": policy,
        "expected": list(tasks if expected is None else expected),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with RankFileWriter(path, header=header) as writer:
        for task in tasks:
            writer.append_group(task, group(task, samples=samples, tokens=tokens, rank=rank))
        if finished:
            writer.finish()
    return path
