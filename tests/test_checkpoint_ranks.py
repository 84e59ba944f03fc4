"""Checkpoints of several processes: read back by any others, cut off, damaged, and written by processes that are killed."""

from __future__ import annotations

from pathlib import Path

import pytest
from forks import run_script

pytestmark = pytest.mark.torch


def test_any_processes_go_on_from_what_any_others_left_and_a_killed_one_leaves_nothing_half(
    tmp_path: Path,
) -> None:
    run_script("checkpoint_ranks.py", tmp_path, 1, "reshard=2", "damage=10", "kill=1")


@pytest.mark.slow
def test_a_tied_embedding_of_which_a_process_has_no_row(tmp_path: Path) -> None:
    run_script("zero_checkpoints.py", tmp_path, "tied", "1x4:all:5", "1x2:all:5")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_three_nodes_then_two_then_one_go_on_from_each_other(tmp_path: Path) -> None:
    run_script("checkpoint_ranks.py", tmp_path, 7, "fewer=12")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "cases",
    [
        ["3x2:node:5", "2x2:all:5", "1x3:none:5", "1x1:none:5"],
        ["3x2:all:5:bf16", "2x2:node:5:bf16", "1x3:all:5:bf16", "1x1:none:5:bf16"],
        ["3x2:auto:5:zero3", "2x2:auto:5:zero2", "1x3:all:5", "1x1:none:5"],
    ],
    ids=["float32", "bfloat16", "zero3"],
)
def test_what_the_trainer_saved_on_three_nodes_is_read_on_fewer(tmp_path: Path, cases: list[str]) -> None:
    run_script("zero_checkpoints.py", tmp_path, *cases)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_process_killed_at_each_stage_of_a_save(tmp_path: Path) -> None:
    run_script("checkpoint_ranks.py", tmp_path, 5, "stages=8")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(4))
def test_saves_and_loads_of_any_processes_many_times(tmp_path: Path, seed: int) -> None:
    run_script(
        "checkpoint_ranks.py",
        tmp_path,
        100 + seed,
        "reshard=25",
        "damage=200",
        "kill=25",
        "stages=32",
    )
