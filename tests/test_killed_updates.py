"""Each process of an update is killed at each stage of it: what is left is usable, and the run goes on as if nothing had been."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path

import pytest
from forks import run_script

pytestmark = pytest.mark.torch

# See killed_updates.STAGES, which loads torch. What only the first process ever does comes last.
EITHER = ["batch", "loaded", "forward", "backward", "reduce", "step", "stepped", "gather", "copy", "part"]
EITHER += ["result"]
FIRST = ["commit", "committed"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_process_that_is_killed_in_an_update_costs_that_update_alone(tmp_path: Path) -> None:
    run_script("killed_updates.py", tmp_path, "forked", "2x1:all:4", "gather:0")


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("case", ["2x1:none:4", "2x1:all:4:bf16", "2x1:auto:4:zero3"])
def test_a_process_under_torchrun_is_killed_at_each_stage(tmp_path: Path, case: str) -> None:
    stages = [f"{stage}:{rank}" for stage, rank in zip(EITHER, cycle((1, 0)), strict=False)]
    run_script("killed_updates.py", tmp_path, "torchrun", case, *stages, *(f"{stage}:0" for stage in FIRST))


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    "case",
    ["2x1:none:4", "2x1:all:4", "2x1:all:4:bf16", "1x2:node:4", "2x1:all:4:lora"]
    + [f"2x1:auto:4:zero{stage}" for stage in (1, 2, 3)],
)
def test_each_process_is_killed_at_each_stage(tmp_path: Path, case: str) -> None:
    stages = [f"{stage}:{rank}" for stage in EITHER for rank in (0, 1)]
    run_script("killed_updates.py", tmp_path, "forked", case, *stages, *(f"{stage}:0" for stage in FIRST))


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("case", ["2x1:all:4:critic", "2x1:none:4:bf16:critic"])
def test_a_process_is_killed_while_the_critic_learns(tmp_path: Path, case: str) -> None:
    stages = [f"{stage}:{rank}" for stage in ("value", "part", "stepped") for rank in (0, 1)]
    run_script("killed_updates.py", tmp_path, "forked", case, *stages)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_each_of_four_processes_of_two_nodes_is_killed(tmp_path: Path) -> None:
    stages = [f"{stage}:{rank}" for stage in ("backward", "step", "gather", "part") for rank in range(4)]
    run_script("killed_updates.py", tmp_path, "forked", "2x2:node:4", *stages)
