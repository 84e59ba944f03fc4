"""Two runs with the same settings sample the same (`rollout.reproducible`), by the requests that they make and with the real engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from complete_runs import Bench

from fsbarrier.data.demo_tasks import FOLDER
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.trajectories import load


@pytest.mark.torch
def test_each_task_of_each_iteration_has_a_seed_in_every_run(bench: Bench, tmp_path: Path) -> None:
    log = bench.folder / "fake" / "requests.jsonl"

    def seeds(run: str, *words: str) -> list[dict[str, int]]:
        before = log.stat().st_size if log.exists() else 0
        words = (
            "--iterations",
            "1",
            "rollout.tasks=3",
            "rollout.samples=3",
            "rollout.reproducible=true",
            *words,
        )
        bench.run(tmp_path / run, *words).check()
        with log.open() as stream:
            stream.seek(before)
            asked = [one for line in stream if (one := json.loads(line))["path"] == "/v1/completions"]
        assert all(len(one["prompt"]) == 1 for one in asked)
        # Trained on, evaluated before that, and evaluated at the end.
        of_kinds = [[one for one in asked if one["n"] == n] for n in (3, 1)]
        return [{str(one["prompt"][0]): one["seed"] for one in kind} for kind in of_kinds]

    train, test = seeds("first")
    assert seeds("second") == [train, test] != seeds("other", "rollout.seed=1")
    assert len({*train.values(), *test.values()}) == len(train) + len(test) == 3 + 2


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_runs_of_the_demo_sample_and_learn_the_same(tmp_path: Path) -> None:
    """With the real vLLM on a CPU. How the tasks meet in a batch differs, so the last bits of log-probabilities may."""
    small = ("rollout.tasks=24", "rollout.samples=8", "trainer.minibatch=96", "rollout.reproducible=true")

    def run(name: str) -> list[list[dict[str, Any]]]:
        argv = [sys.executable, "-m", "fsbarrier", "run", "--log-path", str(tmp_path / name)]
        words = [*argv, "--iterations", "2", "--eval-interval", "0", *small]
        done = subprocess.run(words, capture_output=True, text=True, timeout=800)
        assert done.returncode == 0, done.stderr
        files = [RunPaths(tmp_path / name).merged("train", iteration) for iteration in (1, 2)]
        return [[*load(file)["trajectories"]] for file in files]

    assert FOLDER.is_dir()
    for one, other in zip(run("a"), run("b"), strict=True):
        for a, b in zip(one, other, strict=True):
            assert [*a["token_ids"]] == [*b["token_ids"]] and a["reward"] == b["reward"]
            assert [*a["logprobs"]] == pytest.approx([*b["logprobs"]], abs=1e-5)
